"""YAML with comments, written deterministically: what `render` builds its files from.

A document is a tuple of `Entry`: key, value, and a comment that is put above the key, wrapped. Values are scalars, lists of
scalars, or nested entries. Numbers, booleans and null are YAML's; every text is quoted where YAML would read it as anything
else. The same entries give the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

WIDTH = 116
Scalar = str | int | float | bool | None
Value = Scalar | tuple[Scalar, ...] | tuple["Entry", ...]


@dataclass(frozen=True)
class Entry:
    """One key of a mapping."""

    key: str
    value: Value
    comment: str = ""


def comment_lines(text: str, indent: str = "") -> list[str]:
    """`text` as comment lines; a blank line stays one, and an indented one (a command) is not wrapped."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        if paragraph.startswith("  "):
            lines.append(f"{indent}# {paragraph}")
            continue
        wrapped = textwrap.wrap(paragraph, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
        lines += [f"{indent}# {line}" for line in wrapped] or [f"{indent}#"]
    return lines


def dump(entries: Sequence[Entry]) -> str:
    """The document, with a newline at its end."""
    return "\n".join(_lines(entries, "")) + "\n"


def _lines(entries: Sequence[Entry], indent: str) -> Iterator[str]:
    for entry in entries:
        if entry.comment:
            yield from comment_lines(entry.comment, indent)
        yield from _entry_lines(entry, indent)


def _entry_lines(entry: Entry, indent: str) -> Iterator[str]:
    value = entry.value
    if not isinstance(value, tuple):
        yield f"{indent}{entry.key}: {_plain(value)}"
        return
    children = [item for item in value if isinstance(item, Entry)]
    if children:
        yield f"{indent}{entry.key}:"
        yield from _lines(children, indent + "  ")
        return
    yield f"{indent}{entry.key}: {_plain(list(value))}"


def _plain(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
