"""Reading TensorRT-LLM's files: form, lines, and what becomes of keys that the mirror does not know.

Owns the two loaders and the judgement of unknown keys. They are
judged one by one, because the stock files grow with every release:
- near a known key (a typo, or the name that the command line uses): a mistake, with the key that was meant. A new key that
  only looks like a typo is allowed by name: `config check --allow KEY`, or `scd.allow_keys` in the disaggregated file;
- else passed through with a warning. A worker's options are checked by TensorRT-LLM itself, which forbids unknown ones
  and says so at start-up; the disaggregated file's are not, hence the warning. A list of ours that refused every key it
  does not know would stop working with the next release.
Our own section, `scd`, is strict: every unknown key in it is a mistake.

Errors: `ConfigError`, one line per mistake with file, line, key and cure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from scd_trt.config import ConfigError, read_mapping, validated
from scd_trt.deploy.scd_section import resolve_paths
from scd_trt.deploy.stock_schema import DisaggFile, ServerOptions, Stock
from scd_trt.yaml_mistakes import line_of, model_in, nearest

NEAR = 0.8
"""How alike (0..1, difflib's ratio) an unknown key must be to a known one to be taken for a typo of it."""

AnyOptions = TypeVar("AnyOptions", bound=ServerOptions)


@dataclass(frozen=True)
class Passed:
    """A key that this mirror does not know and leaves to TensorRT-LLM."""

    line: int
    key: str


@dataclass(frozen=True)
class StockFile:
    """A file that was read: its content, the keys left to TensorRT-LLM, and the tree that knows the lines."""

    path: Path
    options: ServerOptions
    passed: tuple[Passed, ...]
    node: yaml.Node | None = field(repr=False, compare=False, default=None)

    def line_of(self, key: str) -> int:
        """Line of a dotted key, or of the deepest section that the file has."""
        return line_of(self.node, key.split("."))


@dataclass(frozen=True)
class DisaggStockFile(StockFile):
    """The disaggregated file."""

    options: DisaggFile


def load_server_options(path: Path, *, allow: frozenset[str] = frozenset()) -> StockFile:
    """Read the options of one worker.

    Args:
        allow: dotted keys that are right although they look like typos of known ones.

    Raises:
        ConfigError: one line per mistake.
    """
    node, options, passed = _load(path, ServerOptions, allow)
    return StockFile(path, options, passed, node)


def load_disagg(path: Path, *, allow: frozenset[str] = frozenset()) -> DisaggStockFile:
    """Read a disaggregated file; relative paths in its `scd` section are relative to the file.

    Raises:
        ConfigError: one line per mistake.
    """
    node, options, passed = _load(path, DisaggFile, allow)
    if options.scd is not None:
        options = options.model_copy(update={"scd": resolve_paths(options.scd, path.parent)})
    return DisaggStockFile(path, options, passed, node)


def is_pair_file(data: Mapping[str, Any]) -> bool:
    """Whether the content of a YAML file is meant to be a pair file and none of TensorRT-LLM's."""
    return bool({"producer", "consumer"} & data.keys())


def _load(
    path: Path, model: type[AnyOptions], allow: frozenset[str]
) -> tuple[yaml.Node | None, AnyOptions, tuple[Passed, ...]]:
    node, data = read_mapping(path, model, example="a file of TensorRT-LLM such as engine_configs/*/*/decode.yaml")
    section = data.get("scd")
    allowed = section.get("allow_keys") if isinstance(section, dict) else None
    sieve = _Sieve(node, allow | frozenset(map(str, allowed if isinstance(allowed, list) else ())))
    known = sieve.sift(data, model)
    try:
        options = validated(path, node, known, model)
    except ConfigError as error:
        raise ConfigError("\n".join((*sieve.told(path), str(error)))) from error
    if sieve.typos:
        raise ConfigError("\n".join(sieve.told(path)))
    return node, options, tuple(sieve.passed)


class _Sieve:
    """Takes the keys that only TensorRT-LLM reads out of a file, and notes those that look like typos."""

    def __init__(self, node: yaml.Node | None, allow: frozenset[str]) -> None:
        self._node = node
        self._allow = allow
        self.typos: list[tuple[int, str]] = []
        self.passed: list[Passed] = []

    def told(self, path: Path) -> list[str]:
        return [f"{path}:{line}: {text}" for line, text in self.typos]

    def sift(self, data: dict[str, Any], model: type[Stock], at: tuple[str, ...] = ()) -> dict[str, Any]:
        """`data` without the keys that are not modelled."""
        return {key: self._value(data[key], model, (*at, key)) for key in data if self._is_modelled(key, model, at)}

    def _value(self, value: Any, model: type[Stock], at: tuple[str, ...]) -> Any:
        section = model_in(model.model_fields[at[-1]].annotation)
        if section and issubclass(section, Stock) and isinstance(value, dict):
            return self.sift(value, section, at)
        return value

    def _is_modelled(self, key: Any, model: type[Stock], at: tuple[str, ...]) -> bool:
        if key in model.model_fields:
            return True
        if key not in model.other_keys:
            self._judge(str(key), model, (*at, str(key)))
        return False

    def _judge(self, key: str, model: type[Stock], at: tuple[str, ...]) -> None:
        dotted, line = ".".join(at), line_of(self._node, at)
        meant = model.mistaken_keys.get(key) or nearest(key, (*model.model_fields, *model.other_keys), cutoff=NEAR)
        if meant is None or dotted in self._allow:
            self.passed.append(Passed(line, dotted))
        else:
            self.typos.append((line, f"{dotted}: unknown key; did you mean {meant!r}? If not, allow {dotted}"))
