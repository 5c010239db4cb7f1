"""The items of a row as token ids: which prefix is replaced, what follows it, how it is scored.

Shapes: S prefix tokens, T tail tokens. A *probe* is one item: a tail behind a prefix. Probes with exactly the same prefix
form one *group*, whose caches are made once:

    text       S tokens replaced, T scored; every text is a group
    questions  the prompt's full blocks before its last token are replaced, as when serving. Questions about one context
               share everything up to the question; whether the last block reaches into it depends on its length, so
               that a context gives one group for those where it does not, and one for each other question
    refusal    as questions

The mismatched cache of a group is made of the prefix of another text (for requests, of one of the other kind).
Deterministic: the same plan and tokenizer give the same groups in the same order. Loads no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from scd_trt.config import PairConfig
from scd_trt.corpus import documents
from scd_trt.distill.calibration import text_sequences
from scd_trt.evaluate.plan import MIN_ITEMS, EvaluationError, Row
from scd_trt.evaluate.refusal import Request, requests
from scd_trt.evaluate.tasks import TASKS, Question, piled_questions, prompt, questions
from scd_trt.kv_cache import num_sent_blocks

Ids = tuple[int, ...]
Scored = Ids | Question | Request
"""What a probe is scored by: the true next tokens of its tail, a question's answers, or a request's kind."""


@dataclass(frozen=True)
class Probe:
    """One item.

    Attributes:
        item: its number within the row.
        document: items of one document are no independent draws.
        tail_ids: what follows the prefix, at least one token.
    """

    item: int
    document: str
    tail_ids: Ids
    scored: Scored


@dataclass(frozen=True)
class Group:
    """Probes behind one prefix, and the prefix that the mismatched cache is made of."""

    prefix_ids: Ids
    other_ids: Ids
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class _Asked:
    """A prompt before it has its number and its other prefix."""

    context: Hashable
    document: str
    prefix_ids: Ids
    tail_ids: Ids
    scored: Question | Request


def groups_of(row: Row, config: PairConfig, tokenizer: Any, *, seed: int) -> list[Group]:
    """All items of a row.

    Raises:
        EvaluationError: there are not two items of different texts.
        CorpusError, TaskError: see there.
    """
    if row.task == "text":
        return _texts(row, config, tokenizer, seed)
    block = config.engine.tokens_per_block
    if row.task == "refusal":
        return _grouped(
            row, [_ask(row, tokenizer, block, index, request) for index, request in enumerate(requests(row.num_items))]
        )
    asked = [_ask(row, tokenizer, block, question.digest, question) for question in _questions(row, tokenizer, seed)]
    return _grouped(row, asked)


def _texts(row: Row, config: PairConfig, tokenizer: Any, seed: int) -> list[Group]:
    source, num_prefix = config.heldout.source, row.context_tokens or config.heldout.prefix_tokens
    length = num_prefix + config.heldout.scored_tokens + 1
    num_items = min(row.num_items, _num_tokens(source, tokenizer) // length)
    if num_items < MIN_ITEMS:
        raise EvaluationError(
            f"{row.name}: the test split of {source} holds {num_items} sequences of {length} tokens, {MIN_ITEMS} are "
            "needed; ask for shorter --contexts, or name more text in heldout.source"
        )
    sequences = text_sequences(tokenizer, source, "test", num_sequences=num_items, sequence_tokens=length, seed=seed)
    return [
        Group(
            ids[:num_prefix],
            sequences[(index + 1) % num_items][:num_prefix],
            (Probe(index, str(index), ids[num_prefix:-1], ids[num_prefix + 1 :]),),
        )
        for index, ids in enumerate(sequences)
    ]


def _num_tokens(source: str | Sequence[str], tokenizer: Any) -> int:
    """Tokens of text in the test split."""
    sources = (source,) if isinstance(source, str) else source
    texts = {document.text for name in sources for document in documents(name, split="test")}
    return sum(map(_counter(tokenizer), texts))


def _counter(tokenizer: Any) -> Callable[[str], int]:
    # verbose would warn of texts longer than the context
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _questions(row: Row, tokenizer: Any, seed: int) -> list[Question]:
    if row.context_tokens is not None:
        tokens, count = row.context_tokens, _counter(tokenizer)
        return piled_questions(count, context_tokens=tokens, limit=row.num_items, seed=seed)
    if row.task not in TASKS:
        raise EvaluationError(f"{row.name}: needs a context length")
    num_held = len(questions(row.task, split="test"))
    return questions(row.task, split="test", limit=min(row.num_items, num_held), seed=seed)


def _ask(row: Row, tokenizer: Any, block: int, context: Hashable, asked: Question | Request) -> _Asked:
    messages = list(prompt(asked).messages) if isinstance(asked, Question) else asked.messages
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tuple(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])
    num_prefix = num_sent_blocks(len(ids), block) * block
    if not num_prefix:
        raise EvaluationError(f"{row.name}: a prompt of {len(ids)} tokens fills no block of {block}: nothing is sent")
    document = asked.digest if isinstance(asked, Question) else asked.text
    return _Asked(context, document, ids[:num_prefix], ids[num_prefix:], asked)


def _grouped(row: Row, asked: Sequence[_Asked]) -> list[Group]:
    """Prompts by context, then by prefix; contexts keep their order, the other prefix is the next context's first."""
    by_context = [
        sorted(found, key=lambda one: (len(one.prefix_ids), one.prefix_ids))
        for _, found in groupby(asked, key=lambda one: one.context)
    ]
    if len(by_context) < MIN_ITEMS:
        raise EvaluationError(f"{row.name}: all {len(asked)} items are about one text; ask for more --items")
    groups, num_items = [], 0
    for index, found in enumerate(by_context):
        other_ids = by_context[(index + 1) % len(by_context)][0].prefix_ids
        for prefix_ids, sharing in groupby(found, key=lambda one: one.prefix_ids):
            probes = tuple(
                Probe(number, one.document, one.tail_ids, one.scored) for number, one in enumerate(sharing, num_items)
            )
            groups.append(Group(prefix_ids, other_ids, probes))
            num_items += len(probes)
    return groups
