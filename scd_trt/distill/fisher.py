"""How much B's output feels an error in its cache: the diagonal Fisher information of keys and values, streamed.

Shapes: S prefix tokens, T scored tokens, L layers, H kv heads, D head size, F = H * D.
For a cache element c of one prefix token, `I_c = E[(d log p(y) / dc)^2]` over scored positions and labels y drawn from B's
own distribution; to second order an error e_c costs `KL = 1/2 sum_c I_c e_c^2` nats per scored token (METHOD, 2.3). What is
kept is the sum over a prefix's tokens divided by their number: the weight of one element of one *average* token, so that

    predicted KL per scored token = 1/2 * S * sum_o weight_o * D_o,      D_o = mean squared error of element o

Keys are weighted before RoPE, where codes live: the gradient of a rotated key is rotated back.
One backward pass serves all T positions: with random signs r_t, `E[(sum_t r_t g_t)^2] = sum_t g_t^2` (Hutchinson).

Weights are shrunk towards the mean of their layer and kind: elements that the sample hardly touched are not free.
Arithmetic: model in float32, sums in float64. Deterministic for a seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scd_trt.models import LoadedModel, cache_layers, forward_with_cache, trace

SHRINKAGE = 0.1
"""Share of the mean of layer and kind in every weight."""


class FisherWeights:
    """Accumulates the diagonal Fisher information of a consumer's cache."""

    def __init__(self, consumer: LoadedModel, *, seed: int) -> None:
        self._consumer = consumer
        self._generator = torch.Generator().manual_seed(seed)
        self._num_scored = 0
        self.sum_L2F = torch.zeros(consumer.spec.num_layers, 2, consumer.spec.kv_dim, dtype=torch.float64)

    def update(self, token_ids: Sequence[int], *, scored_tokens: int) -> None:
        """Fold in one sequence: its last `scored_tokens` are scored over the cache of the tokens before them.

        Raises:
            ValueError: nothing is left for the prefix.
        """
        num_prefix = len(token_ids) - scored_tokens
        if num_prefix < 1 or scored_tokens < 1:
            raise ValueError(f"{len(token_ids)} tokens cannot be split into a prefix and {scored_tokens} scored tokens")
        traced = trace(self._consumer, token_ids[:num_prefix], capture={"kv"})
        layers = [
            (k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in cache_layers(self._consumer, traced)
        ]
        with torch.enable_grad():
            log_p_TV = forward_with_cache(
                self._consumer, token_ids[num_prefix:], layers, start_position=num_prefix
            ).log_softmax(-1)
            score = self._signed_score(log_p_TV)
        leaves = [tensor for pair in layers for tensor in pair]
        self._fold(torch.autograd.grad(score, leaves), num_prefix)
        self._num_scored += scored_tokens

    def weights(self) -> Tensor:
        """Weights `[L, 2, F]` float64, keys first; positive.

        Raises:
            ValueError: no sequence was folded in.
        """
        if not self._num_scored:
            raise ValueError("no sequence was folded in: the weights are undefined")
        mean_L2F = self.sum_L2F / self._num_scored
        overall_L2 = mean_L2F.mean(-1, keepdim=True)
        floor = torch.finfo(torch.float64).tiny
        return ((1 - SHRINKAGE) * mean_L2F + SHRINKAGE * overall_L2).clamp_min(floor)

    def _signed_score(self, log_p_TV: Tensor) -> Tensor:
        labels_T1 = torch.multinomial(log_p_TV.detach().exp(), 1, generator=self._generator)
        signs_T = torch.randint(0, 2, (len(log_p_TV),), generator=self._generator) * 2 - 1
        return (log_p_TV.gather(1, labels_T1)[:, 0] * signs_T).sum()

    def _fold(self, gradients: Sequence[Tensor], num_prefix: int) -> None:
        positions_S = torch.arange(num_prefix)
        for layer, rope in enumerate(self._consumer.ropes):
            # the rotation scales by attention_scaling s: dL/dk = s * R' dL/d(s R k), and strip divides by s
            tables = rope.tables(positions_S, seq_len=num_prefix)
            grad_k = tables.strip(gradients[2 * layer]) * tables.attention_scaling**2
            for kind, gradient in enumerate((grad_k, gradients[2 * layer + 1])):
                self.sum_L2F[layer, kind] += gradient.flatten(1).double().square().sum(0) / num_prefix
