"""What a check found: one line for a person, one record for a machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "skip", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        check: what was looked at, one word or two.
        level: `fail` means that serving will not work as configured, `warn` that it may be slower or less safe than it
            looks, `skip` that there was nothing to look at here.
        text: what was found, with its value.
        cure: what to do, for `warn` and `fail`.
        details: values for machines.
    """

    check: str
    level: Level
    text: str
    cure: str = ""
    details: tuple[tuple[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"details": dict(self.details)}

    def lines(self) -> list[str]:
        """For people: the finding, and below it the cure."""
        shown = "FAIL" if self.level == "fail" else self.level
        first = f"{shown:<5} {self.check}: {self.text}"
        return [first, *(f"      -> {line}" for line in self.cure.splitlines())]


def is_fit(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.level != "fail" for finding in findings)
