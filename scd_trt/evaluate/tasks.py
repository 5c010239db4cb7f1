"""Question-answering tasks: held-out questions, their prompts, and the scores of an answer.

Owns: which questions a split holds, how a question becomes chat messages, and SQuAD's answer normalisation.
The context comes first in the prompt, so that all questions about one text share the KV of everything before the question:

    user: "{context}\\n\\nQuestion: {question}"

Questions are split with their context (`corpus.split_of`): no text is in two splits.
Several documents (`piled_questions`): documents of one split, of both sets, are laid one after the other into contexts of a
given length; each is used once. Questions are about one of the documents, the others are hay.
DisflQA's unanswerable questions (their answer is the word "unknown") are left out: a model that always says "unknown" would
score on them without reading anything, which would hide a broken cache.

Sources: NarrativeQA (Kocisky et al. 2018), DisflQA (Gupta et al. 2021), scores as in SQuAD's official script
(Rajpurkar et al. 2016): lower case, no punctuation, no articles, single spaces; the best score over all reference answers.
Errors: `TaskError` for an unknown task, too few questions, or prompts that have nothing in common.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from scd_trt.config import ScdError
from scd_trt.corpus import Split, packaged_rows, split_of, text_digest

Task = Literal["narrativeqa", "disflqa"]
TASKS: tuple[Task, ...] = get_args(Task)

UNANSWERABLE = "unknown"

QUESTIONS_PER_PILE = 4
"""Questions about each context of several documents: they share its cost, but are no independent draws."""

_PILE_SEPARATOR = "\n\n"
_SEPARATOR_TOKENS = 2
"""At most, in any tokenizer."""

_FULL_PILE = 0.75

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class TaskError(ScdError):
    """A task does not exist, or cannot supply what was asked of it."""


@dataclass(frozen=True)
class Question:
    """One question about one text.

    Attributes:
        context: the text, without surrounding white space.
        question: one line.
        answers: accepted answers, at least one.
        digest: `corpus.text_digest(context)`; questions with equal digests share their context.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Prompt:
    """Chat messages of one question.

    Attributes:
        messages: one user message, for the model's own chat template.
        shared_text: the beginning of the user message that every question about this context has in common.
    """

    messages: tuple[dict[str, str], ...]
    shared_text: str

    def num_shared_chars(self, rendered: str) -> int:
        """Length of the shared beginning of `rendered`, these messages put through a chat template."""
        start = rendered.find(self.shared_text)
        if start < 0:
            raise TaskError("the chat template changed the text of the context, so its shared prefix is unknown")
        return start + len(self.shared_text)


def questions(task: str, *, split: Split = "test", limit: int | None = None, seed: int = 0) -> list[Question]:
    """A seeded sample of `limit` questions (None: all) of one split; questions about one context stand together.

    Raises:
        TaskError: unknown task, or the split holds fewer than `limit` questions.
    """
    found = [question for question in _all_questions(task) if split_of(question.context) == split]
    if limit is not None and not 0 < limit <= len(found):
        raise TaskError(f"{task}: the {split} split holds {len(found)} questions, {limit} were asked for")
    random.Random(seed).shuffle(found)
    return _grouped_by_context(found[:limit])


def piled_questions(
    num_tokens: Callable[[str], int],
    *,
    context_tokens: int,
    limit: int | None = None,
    split: Split = "test",
    seed: int = 0,
) -> list[Question]:
    """Questions about one of several documents that share a context; questions about one context stand together.

    Of each context `QUESTIONS_PER_PILE` are asked, about as many different documents as can be; fewer where `limit` is so
    small that there would not be two contexts.

    Args:
        num_tokens: length of a text in the consumer's tokens.
        context_tokens: contexts are at most this long, and at least 3/4 of it.
        limit: at most so many questions (None: all); fewer if the split has no more documents.
    Raises:
        TaskError: the split cannot fill one context with at least two documents, or `limit` is not positive.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"multidoc: {limit} questions were asked for; ask for at least one")
    by_document: dict[str, list[Question]] = {}
    for task in TASKS:
        for question in questions(task, split=split, seed=seed):
            by_document.setdefault(question.context, []).append(question)
    piles = _piles({context: num_tokens(context) for context in by_document}, context_tokens, random.Random(seed))
    each = QUESTIONS_PER_PILE if limit is None else max(1, min(QUESTIONS_PER_PILE, limit // 2))
    asked = [question for pile in piles for question in _about(pile, by_document)[:each]]
    if not asked:
        raise TaskError(
            f"multidoc: the {split} split cannot fill a context of {context_tokens} tokens with two documents; "
            "choose a length between 512 and 8192"
        )
    return asked[:limit]


def prompt(question: Question) -> Prompt:
    """The chat prompt of a question, context first."""
    shared_text = f"{question.context}\n\nQuestion: "
    return Prompt(({"role": "user", "content": shared_text + question.question},), shared_text)


def num_shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the longest token prefix common to all tokenized prompts; exact where a character count is not.

    Raises:
        TaskError: no prompts.
    """
    if not prompts:
        raise TaskError("a shared prefix needs at least one prompt")
    columns = zip(*prompts, strict=False)
    differing = (index for index, column in enumerate(columns) if len(set(column)) > 1)
    return next(differing, min(map(len, prompts)))


def normalise(answer: str) -> str:
    """SQuAD's normal form of an answer."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Token F1 of a prediction against the closest of the accepted answers, in [0, 1]."""
    return _best(_f1_one, prediction, answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the prediction equals one of the accepted answers after normalisation, else 0.0."""
    return _best(lambda left, right: float(left == right), prediction, answers)


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    if not answers:
        raise TaskError("an answer is scored against at least one accepted answer, none were given")
    return max(score(normalise(prediction), normalise(answer)) for answer in answers)


def _f1_one(prediction: str, answer: str) -> float:
    predicted, expected = prediction.split(), answer.split()
    if not predicted or not expected:
        return float(predicted == expected)
    num_common = (Counter(predicted) & Counter(expected)).total()
    return 2 * num_common / (len(predicted) + len(expected))


def _all_questions(task: str) -> Iterator[Question]:
    if task not in TASKS:
        raise TaskError(f"task {task!r} does not exist; choose one of {', '.join(TASKS)}")
    for row in packaged_rows(task):
        answers = _answers(row)
        if answers:
            context = row["passage"].strip()
            yield Question(context, " ".join(row["question"].split()), answers, text_digest(context))


def _piles(lengths: dict[str, int], context_tokens: int, generator: random.Random) -> list[list[str]]:
    """Documents in random order, each laid on the current pile if it fits; what is left begins the next one."""
    remaining = [document for document in lengths if lengths[document] <= context_tokens]
    generator.shuffle(remaining)
    piles = []
    while remaining:
        pile = _fill(remaining, lengths, context_tokens)
        full = sum(lengths[document] for document in pile) >= _FULL_PILE * context_tokens
        if full and len(pile) > 1:
            piles.append(pile)
            remaining = [document for document in remaining if document not in set(pile)]
        else:
            # nothing goes well with this document: the others may fill a pile without it
            remaining = remaining[1:]
    return piles


def _fill(documents: list[str], lengths: dict[str, int], context_tokens: int) -> list[str]:
    pile, room = [], context_tokens
    for document in documents:
        if lengths[document] <= room:
            pile.append(document)
            room -= lengths[document] + _SEPARATOR_TOKENS
    return pile


def _about(pile: list[str], by_document: dict[str, list[Question]]) -> list[Question]:
    """A pile's questions: the first of documents spread over the pile, then the second ones."""
    context = _PILE_SEPARATOR.join(pile)
    digest = text_digest(context)
    step = max(1, len(pile) // QUESTIONS_PER_PILE)
    spread = [document for start in range(step) for document in pile[start::step]]
    in_turn = [question for row in zip_longest(*(by_document[document] for document in spread)) for question in row]
    chosen = [question for question in in_turn if question is not None][:QUESTIONS_PER_PILE]
    return [replace(question, context=context, digest=digest) for question in chosen]


def _answers(row: dict[str, Any]) -> tuple[str, ...]:
    stored = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    return tuple(dict.fromkeys(answer.strip() for answer in stored if answer.strip() not in ("", UNANSWERABLE)))


def _grouped_by_context(found: list[Question]) -> list[Question]:
    groups: dict[str, list[Question]] = {}
    for question in found:
        groups.setdefault(question.digest, []).append(question)
    return [question for group in groups.values() for question in group]
