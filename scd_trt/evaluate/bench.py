"""Both models of a pair and the caches under test, and the measurement of one group of items.

Shapes: S prefix tokens, N caches (rows), T tail tokens, A answer tokens, V vocabulary.

Caches are made and measured a few at a time (`_Chunk`), whatever the number of controls: a chunk's rows and logits stay
within `CHUNK_BYTES`. The consumer's own cache is a row of every chunk, so that a control is compared with an oracle that went
through the same kernels in the same shapes: equal caches differ by exactly zero.

Metrics by kind of item:

    text         kl, top1_agreement and nll of the T true tokens
    questions    f1 and exact_match of the greedy answer with the accepted ones; against the consumer's answer over its own
                 cache: oracle_f1, same_text (letter for letter), and answer_kl, KL per token of that answer and its end
    refusal      refused_harmful or refused_benign, same_decision as the oracle (both refuse or neither), answer_kl, same_text
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scd_trt.evaluate.baselines import NO_CACHE
from scd_trt.evaluate.caches import Control, GivenCache, KvLayer, Prefix, prefix_of
from scd_trt.evaluate.generation import Answer, GrowingCache, answer_each, finish, forced
from scd_trt.evaluate.metrics import Reference
from scd_trt.evaluate.refusal import Request, is_refusal
from scd_trt.evaluate.tasks import Question, exact_match, f1
from scd_trt.evaluate.work import Group, Ids, Probe
from scd_trt.models import LoadedModel

ORACLE = "oracle"
MAX_ANSWER_TOKENS = 24
MAX_REFUSAL_TOKENS = 16
"""A refusal shows in the first words; the rest of an answer to a request is long, and is not looked at."""

CHUNK_BYTES = 512 << 20
"""Memory of a chunk's rows, and of its logits, each."""

_KEPT_PREFIXES = 3
"""The mismatched cache of one group is made of the prefix of the next: each is computed once."""


@dataclass(frozen=True)
class Measured:
    """One control on one item: `values` by metric name; bytes per token of the prefix as packed."""

    task: str
    item: int
    document: str
    control: str
    bytes_per_token: float
    values: dict[str, float]


@dataclass(frozen=True)
class _Made:
    """A control's cache of one prefix, in the model's dtype."""

    name: str
    bytes_per_token: float
    layers: list[KvLayer]
    keep: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class _Chunk:
    """Some caches of one prefix, the oracle's first: the bytes per token of each row, and the rows."""

    sizes: dict[str, float]
    rows: GrowingCache


@dataclass
class Bench:
    """Two loaded models and the controls between them; the oracle is one of them, no cache is measured too."""

    producer: LoadedModel
    consumer: LoadedModel
    controls: dict[str, Control]
    _prefixes: OrderedDict[Ids, Prefix] = field(default_factory=OrderedDict)

    @torch.no_grad()
    def measure(self, row: str, group: Group, *, skip: int = 0) -> list[list[Measured]]:
        """All controls on the items of a group, without its first `skip`; one list per item, in the controls' order."""
        probes = group.probes[skip:]
        prefix, other = self._prefix(group.prefix_ids), self._prefix(group.other_ids)
        items = [_Item(self.consumer, probe, own) for probe, own in zip(probes, self._own(prefix, probes), strict=True)]
        found: list[dict[str, Measured]] = [{} for _ in items]
        for chunk in self._chunks(prefix, other, probes):
            for item, by_control in zip(items, found, strict=True):
                values = item.score(chunk, first_position=prefix.num_tokens)
                for (name, size), metrics in zip(chunk.sizes.items(), values, strict=True):
                    # the oracle is in every chunk, and always the same
                    probe = item.probe
                    by_control.setdefault(name, Measured(row, probe.item, probe.document, name, size, metrics))
        return [[by_control[name] for name in (*self.controls, NO_CACHE)] for by_control in found]

    def _prefix(self, ids: Ids) -> Prefix:
        if ids not in self._prefixes:
            self._prefixes[ids] = prefix_of(self.producer, self.consumer, torch.tensor(ids))
        self._prefixes.move_to_end(ids)
        while len(self._prefixes) > _KEPT_PREFIXES:
            self._prefixes.popitem(last=False)
        return self._prefixes[ids]

    def _own(self, prefix: Prefix, probes: Sequence[Probe]) -> list[Answer]:
        """What the consumer says over its own cache, token by token; nothing where the item is a text."""
        rows = self._reserve(1, prefix.num_tokens, probes)
        rows.put(0, prefix.oracle)
        answers = []
        for probe in probes:
            if isinstance(probe.scored, tuple):
                answers.append(Answer(()))
                continue
            rows.truncate(prefix.num_tokens)
            where = {"first_position": prefix.num_tokens, "max_tokens": _most_tokens(probe)}
            answers += answer_each(self.consumer, rows, probe.tail_ids, **where)
        return answers

    def _chunks(self, prefix: Prefix, other: Prefix, probes: Sequence[Probe]) -> Iterator[_Chunk]:
        """Every control in turn, a few at a time; caches with holes apart, since a mask for one row slows all of a pass."""
        num_rows = self._rows_per_chunk(prefix.num_tokens, probes) - 1
        waiting: dict[bool, list[_Made]] = {False: [], True: []}
        for made in self._made(prefix, other):
            batch = waiting[made.keep is not None]
            batch.append(made)
            if len(batch) == num_rows:
                yield self._chunk(batch, prefix, probes)
        for batch in waiting.values():
            if batch:
                yield self._chunk(batch, prefix, probes)

    def _made(self, prefix: Prefix, other: Prefix) -> Iterator[_Made]:
        dtype = self.consumer.dtype
        for control in self.controls.values():
            if control.name != ORACLE:
                yield _make(control, prefix, other, dtype)
        # a cache of holes only: what follows stands at its true positions and sees nothing before it
        layers = [(torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)) for k, v in prefix.oracle]
        yield _Made(NO_CACHE, 0.0, layers, [torch.zeros(k.shape[:2], dtype=torch.bool) for k, _ in layers])

    def _chunk(self, batch: list[_Made], prefix: Prefix, probes: Sequence[Probe]) -> _Chunk:
        """The oracle and the caches of a batch as rows; the batch is emptied, so that nothing is held twice for long."""
        with_holes = any(made.keep is not None for made in batch)
        rows = self._reserve(1 + len(batch), prefix.num_tokens, probes, with_holes=with_holes)
        rows.put(0, prefix.oracle)
        sizes = {ORACLE: 0.0}
        for place, made in enumerate(batch, start=1):
            rows.put(place, made.layers, keep=made.keep)
            sizes[made.name] = made.bytes_per_token
        batch.clear()
        return _Chunk(sizes, rows)

    def _reserve(
        self, num_rows: int, num_tokens: int, probes: Sequence[Probe], *, with_holes: bool = False
    ) -> GrowingCache:
        return GrowingCache.reserve(
            self.consumer, num_rows=num_rows, num_tokens=num_tokens, room=_room(probes), with_holes=with_holes
        )

    def _rows_per_chunk(self, num_tokens: int, probes: Sequence[Probe]) -> int:
        """At least the oracle's and one other."""
        spec, itemsize = self.consumer.spec, self.consumer.dtype.itemsize
        row_bytes = (num_tokens + _room(probes)) * 2 * spec.num_layers * spec.kv_dim * itemsize
        num_logits = max(_num_logits(probe) for probe in probes)
        return max(2, CHUNK_BYTES // max(row_bytes, num_logits * spec.vocab_size * itemsize))


class _Item:
    """One item, and how far every chunk's rows are from its oracle."""

    def __init__(self, consumer: LoadedModel, probe: Probe, own: Answer) -> None:
        self.probe = probe
        self._consumer, self._own = consumer, own

    def score(self, chunk: _Chunk, *, first_position: int) -> list[dict[str, float]]:
        """Metrics of every row of a chunk, whose rows are as before afterwards."""
        rows, num_held = chunk.rows, chunk.rows.num_tokens
        ids = (*self.probe.tail_ids, *self._own.token_ids)
        logits = forced(
            self._consumer, rows, ids, first_position=first_position, num_logits=_num_logits(self.probe, self._own)
        )
        if isinstance(self.probe.scored, tuple):
            targets, answers = self.probe.scored, [self._own] * len(logits)
        else:
            targets = self._own.all_ids
            logits = logits[:, : len(targets)]
            answers = finish(
                self._consumer,
                rows,
                logits,
                self._own,
                position=first_position + len(self.probe.tail_ids),
                max_tokens=_most_tokens(self.probe),
            )
        rows.truncate(num_held)
        # the first row is the oracle's; what it said was found token by token, which may round otherwise
        answers[0] = self._own
        reference = Reference(logits[0], targets_T=torch.tensor(targets))
        return [self._values(reference, found, answer) for found, answer in zip(logits, answers, strict=True)]

    def _values(self, reference: Reference, logits_TV: Tensor, answer: Answer) -> dict[str, float]:
        compared = reference.compare(logits_TV)
        scored = self.probe.scored
        if isinstance(scored, tuple):
            return {"kl": compared.kl, "top1_agreement": compared.top1_agreement, "nll": compared.nll}
        text, own = self._text(answer), self._text(self._own)
        values = _question_values(scored, text, own) if isinstance(scored, Question) else _kind(scored, text, own)
        return values | {"same_text": float(text == own), "answer_kl": compared.kl}

    def _text(self, answer: Answer) -> str:
        text: str = self._consumer.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        return text.strip()


def _question_values(question: Question, text: str, own: str) -> dict[str, float]:
    return {
        "f1": f1(text, question.answers),
        "exact_match": exact_match(text, question.answers),
        "oracle_f1": f1(text, [own]),
    }


def _kind(request: Request, text: str, own: str) -> dict[str, float]:
    refused = is_refusal(text)
    return {
        "refused_harmful" if request.is_harmful else "refused_benign": float(refused),
        "same_decision": float(refused == is_refusal(own)),
    }


def _make(control: Control, prefix: Prefix, other: Prefix, dtype: torch.dtype) -> _Made:
    made = control.cache(prefix, other)
    layers = [(k_SHD.to(dtype), v_SHD.to(dtype)) for k_SHD, v_SHD in made]
    keep = made.keep if isinstance(made, GivenCache) else None
    return _Made(control.name, control.measured_bytes(made), layers, keep)


def _room(probes: Sequence[Probe]) -> int:
    return max(len(probe.tail_ids) for probe in probes) + MAX_ANSWER_TOKENS


def _most_tokens(probe: Probe) -> int:
    return MAX_REFUSAL_TOKENS if isinstance(probe.scored, Request) else MAX_ANSWER_TOKENS


def _num_logits(probe: Probe, own: Answer | None = None) -> int:
    """Rows of logits that are scored: a text's tail; or all tokens of an answer, and what follows it."""
    if isinstance(probe.scored, tuple):
        return len(probe.tail_ids)
    return 1 + (MAX_ANSWER_TOKENS if own is None else len(own.token_ids))
