"""What a user is told about a YAML file that does not fit its pydantic model: file and line, key, value, what is right.

Owns the text of one mistake (`explain`), the line that a key stands on (`line_of`), keys written twice in one mapping
(`duplicate_keys`), and what counts as the nearest known key (`nearest`). It reads no file and raises nothing: `config`
and `deploy` do, each for its own files.

`root` is the model of the whole file, `location` a pydantic error location: keys and list indices from the top. A line is
that of the deepest part of the location which the file contains, so a missing key is reported at its section.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

Location = Sequence[int | str]
FALLBACK = "see docs/configuration.md"


def explain(path: Path, node: yaml.Node | None, item: ErrorDetails, root: type[BaseModel]) -> str:
    """One mistake that pydantic found, in one line."""
    location = [part for part in item["loc"] if isinstance(part, int) or not _is_union_branch(str(part))]
    keys = ".".join(str(part) for part in location) or "(top level)"
    line = line_of(node, location)
    section = section_at(root, location[:-1])
    if item["type"] == "extra_forbidden":
        return f"{path}:{line}: {unknown_key(location, list(section.model_fields) if section else [])}"
    if item["type"] == "missing":
        return f"{path}:{line}: {keys}: missing; {_description(section, location)}"
    message = item["msg"].removeprefix("Value error, ")
    near = nearest(str(item["input"]), _literals(section, location), cutoff=0.5)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{path}:{line}: {keys}: {message}; found {_short(item['input'])}{hint} ({_description(section, location)})"


def unknown_key(location: Location, known: Sequence[str], *, near: str | None = None) -> str:
    """What to say of a key that the section does not have; `near` where the caller knows which one was meant."""
    keys = ".".join(str(part) for part in location)
    meant = near or nearest(str(location[-1]), known, cutoff=0.5)
    hint = f"did you mean {meant!r}? " if meant else ""
    return f"{keys}: unknown key; {hint}known keys: {', '.join(known)}"


def nearest(word: str, known: Iterable[str], *, cutoff: float) -> str | None:
    """The known word most like `word`, if it is at least `cutoff` (0..1) like it."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def section_at(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model of the section that `location` leads to; None where the way leaves the models."""
    section: type[BaseModel] | None = root
    for part in location:
        field = section.model_fields.get(str(part)) if section else None
        section = model_in(field.annotation) if field else None
    return section


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, looking through `Optional`; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    branches = [model_in(branch) for branch in get_args(annotation) if branch is not type(None)]
    return branches[0] if len(branches) == 1 else None


def literal_values(annotation: Any) -> Iterator[Any]:
    """Every value that the `Literal`s inside an annotation allow."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is Union or get_args(annotation):
        for branch in get_args(annotation):
            yield from literal_values(branch)


def line_of(node: yaml.Node | None, location: Location) -> int:
    """Line, from 1, of the deepest part of `location` that the file has."""
    line = 1
    for part in location:
        child = _child(node, part)
        if child is None:
            break
        line, node = child
    return line


def duplicate_keys(node: yaml.Node | None) -> Iterator[tuple[int, str]]:
    """Line and dotted key of every key that its mapping already has: YAML would silently keep the last one."""
    # aliases make the tree a graph, and may make it circular: every node is looked at once
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], yaml.Node | None]] = [((), node)]
    while waiting:
        at, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield from _keys_given_twice(node, at)
            waiting += [((*at, str(key.value)), value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [((*at, str(index)), value) for index, value in enumerate(node.value)]


def _keys_given_twice(node: yaml.MappingNode, at: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    known: set[str] = set()
    for key, _ in node.value:
        name = str(key.value)
        if name in known:
            yield key.start_mark.line + 1, ".".join((*at, name))
        known.add(name)


def _is_union_branch(part: str) -> bool:
    """Pydantic adds the branch of a union to the location; it is no key of the file."""
    return "[" in part or part in {"int", "constrained-int", "str"} or part.startswith(("literal", "function-"))


def _description(section: type[BaseModel] | None, location: Location) -> str:
    names = [part for part in location if isinstance(part, str)]
    field = section.model_fields.get(names[-1]) if section and names else None
    return (field.description or FALLBACK) if field else FALLBACK


def _literals(section: type[BaseModel] | None, location: Location) -> list[str]:
    field = section.model_fields.get(str(location[-1])) if section and location else None
    return [str(value) for value in literal_values(field.annotation)] if field else []


def _child(node: yaml.Node | None, part: int | str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
