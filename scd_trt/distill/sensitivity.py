"""What the consumer feels: held-out text scored by B over any mixture of caches, layer by layer.

Shapes: S prefix tokens, T scored tokens, H kv heads, D head size, V vocabulary, N mixtures scored at once, Q query heads.
A held-out sequence is a prefix of S tokens and T tokens that continue it. B's own cache of the prefix is the *oracle*; B's
logits of the T tokens over it are the reference distribution. A *source* is one way to obtain the prefix's cache (oracle,
raw, reuse, patch, ...; raw ones only where both models have one shape): keys after RoPE and values of every layer, rounded to
the dtype of the consumer's pool. A *mixture* names one source for each layer; scoring it costs T tokens of B, not S + T, and
N mixtures share one pass.

Owns: `Heldout`, which holds the sequences and their sources, and the restore-one profile (METHOD, section 1). Both models run
in the dtypes in which they serve, and sources are made by the encoder and decoder that the servers run. Memory is that of
the held-out caches; it does not depend on the calibration text.

`Heldout.kl` is float32 against log-probabilities computed once, for decisions; `Heldout.compare` is float64, for reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.codec import Decoder, Encoder, LayerInput, through_codes
from scd_trt.evaluate.metrics import LogitComparison, compare_logits
from scd_trt.model_spec import same_shape
from scd_trt.models import LoadedModel, cache_layers, forward_with_cache, trace
from scd_trt.translator import Translator

Mixture = tuple[str, ...]
"""Name of the source of each layer's cache."""

KvLayer = tuple[Tensor, Tensor]
"""Keys after RoPE and values of one layer, `[S, H, D]`."""

ORACLE, RAW, REROTATED = "oracle", "raw", "raw_rerotated"
MAX_ROWS = 512
"""Rows of logits computed at once (N * T): bounds their memory to this times the vocabulary."""


@dataclass(frozen=True)
class HeldoutSequence:
    """What one sequence needs for scoring, and what the producer computed on its prefix."""

    scored_T: Tensor
    targets_T: Tensor
    oracle_log_p_TV: Tensor
    inputs: tuple[LayerInput, ...]
    sources: dict[str, dict[int, KvLayer]]


class Heldout:
    """Held-out sequences of a pair and the caches that the consumer may be given for them."""

    def __init__(self, consumer: LoadedModel, *, on_scored: Callable[[int], None] = lambda _: None) -> None:
        """`on_scored` is told how many (mixture, sequence) pairs were scored."""
        self.consumer = consumer
        self.sequences: list[HeldoutSequence] = []
        self._on_scored = on_scored

    @property
    def num_layers(self) -> int:
        return self.consumer.spec.num_layers

    def mixture(self, default: str, changed: Iterable[int] = (), source: str = "") -> Mixture:
        """`default` everywhere but in the `changed` layers, which take `source`."""
        layers = set(changed)
        return tuple(source if layer in layers else default for layer in range(self.num_layers))

    @torch.no_grad()
    def add_sequence(self, producer: LoadedModel, token_ids: Sequence[int], *, prefix_tokens: int) -> None:
        """Run both models over a sequence: `prefix_tokens`, then the scored ones, then one more as the last target."""
        ids = torch.tensor(token_ids)
        prefix_S, scored_T = ids[:prefix_tokens], ids[prefix_tokens:-1]
        oracle = cache_layers(self.consumer, trace(self.consumer, prefix_S, capture={"kv"}))
        traced = trace(producer, prefix_S, capture={"kv", "x"})
        raw = cache_layers(producer, traced)
        sources = {ORACLE: oracle}
        if same_shape(producer.spec, self.consumer.spec):
            # re-rotated: the producer's projections before rotation, rotated as the consumer does
            sources |= {RAW: raw, REROTATED: cache_layers(self.consumer, traced)}
        logits_TV = forward_with_cache(self.consumer, scored_T, oracle, start_position=prefix_tokens)
        self.sequences.append(
            HeldoutSequence(
                scored_T=scored_T,
                targets_T=ids[prefix_tokens + 1 :],
                oracle_log_p_TV=logits_TV.float().log_softmax(-1),
                inputs=tuple(LayerInput(k, v, x) for (k, v), x in zip(raw, traced.x_TM, strict=True)),
                sources={name: dict(enumerate(map(self._as_pool, layers))) for name, layers in sources.items()},
            )
        )

    @torch.no_grad()
    def add_source(self, name: str, translator: Translator, layers: Iterable[int]) -> None:
        """Encode and decode the groups of the given layers of every prefix."""
        wanted = set(layers)
        groups = [index for index, group in enumerate(translator.manifest.groups) if wanted.intersection(range(*group))]
        encoder, decoder = Encoder(translator), Decoder(translator)
        for sequence in self.sequences:
            kept = sequence.sources.setdefault(name, {})
            for group in groups:
                start, stop = translator.manifest.groups[group]
                decoded = through_codes(encoder, decoder, group, sequence.inputs)
                kept.update(zip(range(start, stop), map(self._as_pool, decoded), strict=True))

    def add_mismatched(self, name: str, mixture: Mixture) -> None:
        """A source that gives every sequence the next one's cache: what reads the cache must suffer."""
        following = [*self.sequences[1:], self.sequences[0]]
        for sequence, other in zip(self.sequences, following, strict=True):
            sequence.sources[name] = {layer: other.sources[source][layer] for layer, source in enumerate(mixture)}

    def drop_source(self, name: str) -> None:
        """Free a source's memory."""
        for sequence in self.sequences:
            sequence.sources.pop(name)

    @torch.no_grad()
    def kl(self, mixtures: Sequence[Mixture]) -> list[float]:
        """KL divergence from the oracle in nats per token, mean over sequences, of each mixture."""
        totals = [0.0] * len(mixtures)
        for sequence in self.sequences:
            batch = max(1, MAX_ROWS // len(sequence.scored_T))
            for start in range(0, len(mixtures), batch):
                part = mixtures[start : start + batch]
                for index, logits_TV in enumerate(self._logits(sequence, part), start):
                    totals[index] += _mean_kl(sequence.oracle_log_p_TV, logits_TV)
                self._on_scored(len(part))
        return [total / len(self.sequences) for total in totals]

    @torch.no_grad()
    def compare(self, mixture: Mixture) -> list[LogitComparison]:
        """All measures of one mixture, per sequence."""
        found = []
        for sequence in self.sequences:
            logits_TV = self._logits(sequence, [mixture])[0]
            found.append(compare_logits(sequence.oracle_log_p_TV, logits_TV.float(), targets_T=sequence.targets_T))
            self._on_scored(1)
        return found

    @torch.no_grad()
    def query_errors(self, mixtures: Sequence[Mixture]) -> list[list[float]]:
        """`||q - q_oracle|| / ||q_oracle||` of B's queries on the scored tokens, of each mixture and layer."""
        errors_NL = torch.zeros(len(mixtures), self.num_layers, dtype=torch.float64)
        norms_L = torch.zeros(self.num_layers, dtype=torch.float64)
        for sequence in self.sequences:
            past = _stacked(sequence, [self.mixture(ORACLE), *mixtures])
            queries = trace(self.consumer, sequence.scored_T, past=past, capture={"q"}).q_TQD
            for layer, q_NTQD in enumerate(queries):
                oracle, others = q_NTQD[0].double(), q_NTQD[1:].double()
                errors_NL[:, layer] += (others - oracle).square().flatten(1).sum(1)
                norms_L[layer] += oracle.square().sum()
            self._on_scored(len(mixtures))
        return [[float(ratio) for ratio in row] for row in (errors_NL / norms_L).sqrt()]

    def _logits(self, sequence: HeldoutSequence, mixtures: Sequence[Mixture]) -> Tensor:
        start = sequence.inputs[0].k_THD.shape[0]
        return forward_with_cache(self.consumer, sequence.scored_T, _stacked(sequence, mixtures), start_position=start)

    def _as_pool(self, pair: KvLayer) -> KvLayer:
        return pair[0].to(self.consumer.dtype), pair[1].to(self.consumer.dtype)


def restore_one_profile(heldout: Heldout, base: str) -> dict[int, float]:
    """For each layer: by how much KL falls when the oracle's cache of this layer alone replaces `base`."""
    layers = range(heldout.num_layers)
    base_kl, *restored = heldout.kl(
        [heldout.mixture(base), *(heldout.mixture(base, [layer], ORACLE) for layer in layers)]
    )
    return {layer: base_kl - kl for layer, kl in zip(layers, restored, strict=True)}


def _stacked(sequence: HeldoutSequence, mixtures: Sequence[Mixture]) -> list[KvLayer]:
    """The cache of every mixture, with a leading N."""
    layers = []
    for layer, sources in enumerate(zip(*mixtures, strict=True)):
        pairs = [sequence.sources[source][layer] for source in sources]
        layers.append((torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])))
    return layers


def _mean_kl(log_p_TV: Tensor, logits_TV: Tensor) -> float:
    log_q_TV = logits_TV.float().log_softmax(-1)
    return float((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1).double().mean())
