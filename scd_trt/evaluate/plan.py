"""What `scd-trt evaluate` is asked to measure: rows of the results, items of each, seed, controls.

Owns: names of tasks, and the words of the command line that choose among them. A *row* is one task, at one context length
where the task has one: `text@512`, `multidoc@2048`, `narrativeqa`. An *item* is one text or one question.

    text           plain text of the test split, from the pair file's held-out source
    narrativeqa    questions about one story, answered freely
    disflqa        questions about one paragraph, the answer is in it
    multidoc       the same questions, their text among others
    refusal        requests to refuse, or not

Errors: `EvaluationError` for a name that does not exist, or a number that makes no sense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from scd_trt.config import HeldoutConfig, ScdError

TaskName = Literal["text", "narrativeqa", "disflqa", "multidoc", "refusal"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
DEFAULT_TASKS: tuple[TaskName, ...] = ("text", "narrativeqa")
DEFAULT_ITEMS = 24
MULTIDOC_TOKENS = 1024
"""Length of a context of several documents where none is asked for."""

MIN_ITEMS = 2
"""The mismatched cache is that of another item."""

_WITH_CONTEXTS: tuple[TaskName, ...] = ("text", "multidoc")


class EvaluationError(ScdError):
    """There is nothing to measure, or the output directory holds the results of other settings."""


@dataclass(frozen=True)
class Row:
    """One row of the results.

    Attributes:
        context_tokens: None where every question brings its own text.
        num_items: at most; fewer where the split holds no more.
    """

    task: TaskName
    num_items: int = DEFAULT_ITEMS
    context_tokens: int | None = None

    @property
    def name(self) -> str:
        """`task`, or `task@tokens`."""
        return self.task if self.context_tokens is None else f"{self.task}@{self.context_tokens}"


@dataclass(frozen=True)
class EvaluationPlan:
    """What is measured.

    Attributes:
        controls: names; empty for all. The oracle and no cache are always among them.
    """

    rows: tuple[Row, ...]
    seed: int = 0
    controls: tuple[str, ...] = ()


def make_plan(
    heldout: HeldoutConfig,
    *,
    tasks: Sequence[str] = (),
    items: str = str(DEFAULT_ITEMS),
    contexts: str = "",
    controls: str = "",
    seed: int = 0,
) -> EvaluationPlan:
    """The plan that the words of the command line describe.

    Args:
        tasks: names, or `all`; none for the default ones.
        items: one number for all rows, or `text=24,multidoc@4096=8`, where the rest keep the default.
        contexts: lengths of prefixes for `text` and `multidoc`, in tokens: `512,2048`; none for the pair file's.
        controls: names between commas; none for all.
    Raises:
        EvaluationError: a task does not exist, or a number cannot be read or is too small.
    """
    chosen = check_tasks(tasks or DEFAULT_TASKS)
    lengths = [_number(part, "--contexts", at_least=1) for part in _parts(contexts)]
    rows = [row for task in chosen for row in _rows(task, lengths, heldout)]
    wanted = _item_counts(items, {name for row in rows for name in (row.name, row.task)})
    counted = [
        Row(row.task, wanted.get(row.name, wanted.get(row.task, wanted[""])), row.context_tokens) for row in rows
    ]
    return EvaluationPlan(tuple(counted), seed, tuple(_parts(controls)))


def check_tasks(names: Sequence[str]) -> tuple[TaskName, ...]:
    """The tasks of these names, in their usual order; `all` stands for every one.

    Raises:
        EvaluationError: an unknown name.
    """
    split = [name for given in names for name in _parts(given)]
    for name in split:
        if name not in (*TASK_NAMES, "all"):
            raise EvaluationError(f"task {name!r} does not exist; {choice(name, TASK_NAMES)}, or all")
    return tuple(task for task in TASK_NAMES if task in split or "all" in split)


def choice(name: str, known: Sequence[str]) -> str:
    """Words that name the alternatives to an unknown name, the nearest first if there is one."""
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choose from {', '.join(known)}"


def _rows(task: TaskName, lengths: Sequence[int], heldout: HeldoutConfig) -> list[Row]:
    if task not in _WITH_CONTEXTS:
        return [Row(task)]
    default = heldout.prefix_tokens if task == "text" else MULTIDOC_TOKENS
    return [Row(task, context_tokens=length) for length in dict.fromkeys(lengths or [default])]


def _item_counts(items: str, known: set[str]) -> dict[str, int]:
    """Items by row or task; the empty name is everything else."""
    counts = {"": DEFAULT_ITEMS}
    for part in _parts(items):
        name, equals, number = part.rpartition("=")
        if equals and name not in known:
            raise EvaluationError(f"--items {part}: {name!r} is not measured; {choice(name, sorted(known))}")
        counts[name] = _number(number, "--items", at_least=MIN_ITEMS)
    return counts


def _number(text: str, option: str, *, at_least: int) -> int:
    if not text.strip().isdecimal() or int(text) < at_least:
        raise EvaluationError(f"{option}: {text!r} is not a whole number of at least {at_least}")
    return int(text)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
