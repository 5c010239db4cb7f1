"""Question-answering tasks: held-out questions, their prompts, and the scores of an answer.

Owns: which questions a split holds, how a question becomes chat messages, and SQuAD's answer normalisation.
The context comes first in the prompt, so that all questions about one text share the KV of everything before the question:

    user: "{context}\\n\\nQuestion: {question}"

Questions are split with their context (`corpus.split_of`): no text is in two splits.
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
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scd_trt.config import ScdError
from scd_trt.corpus import Split, packaged_rows, split_of, text_digest

Task = Literal["narrativeqa", "disflqa"]
TASKS: tuple[Task, ...] = get_args(Task)

UNANSWERABLE = "unknown"

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


def _answers(row: dict[str, Any]) -> tuple[str, ...]:
    stored = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    return tuple(dict.fromkeys(answer.strip() for answer in stored if answer.strip() not in ("", UNANSWERABLE)))


def _grouped_by_context(found: list[Question]) -> list[Question]:
    groups: dict[str, list[Question]] = {}
    for question in found:
        groups.setdefault(question.digest, []).append(question)
    return [question for group in groups.values() for question in group]
