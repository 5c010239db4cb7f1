"""How much B's output feels an error in its cache: the Fisher information of keys and values, streamed.

Shapes: S prefix tokens, T scored tokens, L layers, H kv heads, D head size, F = H * D, O rows of a group (layers * F).
For a cache element c of one prefix token, `I_c = E[(d log p(y) / dc)^2]` over scored positions and labels y drawn from B's
own distribution; to second order an error e_c costs `KL = 1/2 sum_c I_c e_c^2` nats per scored token (METHOD, 2.3). What is
kept is the sum over a prefix's tokens divided by their number: the weight of one element of one *average* token, so that

    predicted KL per scored token = 1/2 * S * sum_o weight_o * D_o,      D_o = mean squared error of element o

Elements of one head act together, so the same is kept for whole heads: with `g` the gradient of a head's elements, the matrix
`E[g g']` prices an error e of that head at `1/2 e' E[g g'] e`; its diagonal are the weights above. Between heads and layers
errors are priced as if they were independent.

Keys are weighted before RoPE, where codes live: the gradient of a rotated key is rotated back.
One backward pass serves all T positions: with random signs r_t, `E[(sum_t r_t g_t)^2] = sum_t g_t^2` (Hutchinson).

Attention sinks are left out: attention reads them so much that their gradients would set the weights of all tokens, while
their own rows are stored and lose nothing (`transform.SinkRows`).

Weights are shrunk towards the mean of their layer and kind: elements that the sample hardly touched are not free.
Arithmetic: model in float32, sums in float64. Deterministic for a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.models import LoadedModel, cache_layers, forward_with_cache, trace

SHRINKAGE = 0.1
"""Share of the mean of layer and kind in every weight."""


@dataclass(frozen=True)
class ErrorWeights:
    """What an error costs, float64, keys first.

    Attributes:
        elements_L2F: of every element by itself, positive.
        heads_L2HDD: of every head as a whole, positive definite; None where elements are taken by themselves.
    """

    elements_L2F: Tensor
    heads_L2HDD: Tensor | None = None

    @classmethod
    def equal(cls, num_layers: int, kv_dim: int) -> ErrorWeights:
        """All errors cost the same."""
        return cls(torch.ones(num_layers, 2, kv_dim, dtype=torch.float64))

    def of_group(self, start: int, stop: int, kind: int) -> Tensor:
        """Weights of the rows of layers `start` to `stop` side by side: `[O]`, or `[O, O]` with heads as blocks."""
        if self.heads_L2HDD is None:
            return self.elements_L2F[start:stop, kind].flatten()
        heads_NDD = self.heads_L2HDD[start:stop, kind].flatten(0, 1)
        num_heads, size, _ = heads_NDD.shape
        eye_NN = torch.eye(num_heads, dtype=torch.float64)
        return (heads_NDD[:, :, None] * eye_NN[:, None, :, None]).reshape(num_heads * size, num_heads * size)


class FisherWeights:
    """Accumulates the Fisher information of a consumer's cache."""

    def __init__(self, consumer: LoadedModel, *, seed: int, num_sink_tokens: int = 0) -> None:
        """Rows of the first `num_sink_tokens` positions have no say."""
        self._consumer = consumer
        self._num_sinks = num_sink_tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._num_scored = 0
        spec = consumer.spec
        self.sum_L2HDD = torch.zeros(
            spec.num_layers, 2, spec.num_kv_heads, spec.head_dim, spec.head_dim, dtype=torch.float64
        )

    @property
    def sum_L2F(self) -> Tensor:
        """Sum of squared gradients of every element."""
        return self.sum_L2HDD.diagonal(dim1=-2, dim2=-1).flatten(-2)

    def update(self, token_ids: Sequence[int], *, scored_tokens: int) -> None:
        """Fold in one sequence: its last `scored_tokens` are scored over the cache of the tokens before them.

        Raises:
            ValueError: nothing is left for the prefix.
        """
        num_prefix = len(token_ids) - scored_tokens
        if num_prefix <= self._num_sinks or scored_tokens < 1:
            raise ValueError(
                f"{len(token_ids)} tokens cannot be split into a prefix and {scored_tokens} scored tokens; of the prefix "
                f"{self._num_sinks} are sinks, which have no say"
            )
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

    def weights(self, *, of_heads: bool = False) -> ErrorWeights:
        """Weights of every element, and on demand of whole heads.

        Raises:
            ValueError: no sequence was folded in.
        """
        if not self._num_scored:
            raise ValueError("no sequence was folded in: the weights are undefined")
        mean_L2HDD = self.sum_L2HDD / self._num_scored
        overall_L2 = self.sum_L2F.mean(-1) / self._num_scored
        least = torch.finfo(torch.float64).tiny
        level_L2 = (SHRINKAGE * overall_L2).clamp_min(least)
        eye_DD = torch.eye(mean_L2HDD.shape[-1], dtype=torch.float64)
        heads_L2HDD = (1 - SHRINKAGE) * mean_L2HDD + level_L2[..., None, None, None] * eye_DD
        elements_L2F = heads_L2HDD.diagonal(dim1=-2, dim2=-1).flatten(-2)
        return ErrorWeights(elements_L2F, heads_L2HDD if of_heads else None)

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
                gradient_HSD = gradient[self._num_sinks :].transpose(0, 1).double()
                self.sum_L2HDD[layer, kind] += gradient_HSD.transpose(1, 2) @ gradient_HSD / gradient_HSD.shape[1]
