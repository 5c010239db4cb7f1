"""Files of a deployment against what SCD needs: which settings are right, which are not, and what breaks.

Owns `check_files`. It takes pair files, options of workers, and disaggregated files in any mix, tells them apart by their
keys, and returns one frozen report per file. Nothing is started, no host is asked, no model is opened.

The role of a file with worker options is in its name (`prefill.yaml`, `ctx_extra.yaml`, `decode-2.yaml`, ...) or is given.
Files in one directory belong together: with a disaggregated file, one prefill and one decode file, their shared settings
are compared too. Mistakes of form (`ConfigError`) become the report's `mistakes`: one wrong file does not hide another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from scd_trt.config import ConfigError, PairConfig, load_pair, read_mapping
from scd_trt.deploy import requirements
from scd_trt.deploy.requirements import UNSET, Group, Requirement, Role, as_yaml, found
from scd_trt.deploy.stock_files import (
    DisaggStockFile,
    Passed,
    StockFile,
    is_pair_file,
    load_disagg,
    load_server_options,
)
from scd_trt.deploy.stock_schema import DisaggFile, ServerOptions

Kind = Literal["pair", "prefill", "decode", "disagg", "unknown"]

_ROLE_WORDS: dict[Role, tuple[str, ...]] = {
    "prefill": ("prefill", "ctx", "context"),
    "decode": ("decode", "gen", "generation"),
}


@dataclass(frozen=True)
class Finding:
    """One requirement, and what a file says about it."""

    key: str
    line: int
    found: str
    required: str
    why: str
    level: Literal["required", "advised"]
    ok: bool


@dataclass(frozen=True)
class FileReport:
    """What is to be said of one file."""

    path: Path
    kind: Kind
    mistakes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    passed: tuple[Passed, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether SCD can run with the file; advice does not count."""
        return not self.mistakes and all(finding.ok or finding.level == "advised" for finding in self.findings)


def check_files(
    paths: Iterable[Path], *, role: Role | None = None, allow: frozenset[str] = frozenset()
) -> tuple[FileReport, ...]:
    """One report per file, in the given order.

    Args:
        role: of every file with worker options; default: from its name.
        allow: dotted keys that are right although they look like typos of known ones.
    """
    read = [_read(path, role, allow) for path in paths]
    reports = [report for report, _ in read]
    groups: dict[Path, list[int]] = defaultdict(list)
    for index, report in enumerate(reports):
        groups[report.path.resolve().parent].append(index)
    for indices in groups.values():
        _add_group_findings(reports, {index: file for index in indices if (file := read[index][1])})
    return tuple(reports)


def _read(path: Path, role: Role | None, allow: frozenset[str]) -> tuple[FileReport, StockFile | None]:
    kind: Kind = "unknown"
    try:
        kind = _kind(path, role)
        if kind == "pair":
            load_pair(path)
            return FileReport(path, kind), None
        if kind == "disagg":
            return _report(load_disagg(path, allow=allow), kind, requirements.DISAGG)
        return _report(load_server_options(path, allow=allow), kind, requirements.of_role(kind))
    except ConfigError as error:
        return FileReport(path, kind, mistakes=tuple(str(error).splitlines())), None


def _kind(path: Path, role: Role | None) -> Literal["pair", "prefill", "decode", "disagg"]:
    _, data = read_mapping(path, ServerOptions, example="a pair file or a file of TensorRT-LLM")
    if is_pair_file(data):
        return "pair"
    own = set(DisaggFile.model_fields) - set(ServerOptions.model_fields) - {"perf_metrics_max_requests"}
    if own & data.keys():
        return "disagg"
    return role or _role_in(path)


def _role_in(path: Path) -> Role:
    words = set(re.findall(r"[a-z]+", path.stem.lower()))
    roles = [role for role, names in _ROLE_WORDS.items() if words & set(names)]
    if len(roles) != 1:
        raise ConfigError(
            f"{path}: options of which worker? Name the file prefill*.yaml or decode*.yaml, or give --role; a pair file has "
            f"the keys {', '.join(list(PairConfig.model_fields)[:3])}, a disaggregated file context_servers"
        )
    return roles[0]


def _report(file: StockFile, kind: Kind, needed: Sequence[Requirement]) -> tuple[FileReport, StockFile]:
    findings = tuple(_finding(file, requirement, file.options) for requirement in needed)
    return FileReport(file.path, kind, findings=findings, passed=file.passed), file


def _finding(file: StockFile, requirement: Requirement, content: Any) -> Finding:
    return Finding(
        requirement.key,
        file.line_of(requirement.key),
        requirement.shows(content) if requirement.shows else _shown(found(file.options, requirement.key)),
        requirement.required,
        requirement.why,
        requirement.level,
        requirement.holds(content),
    )


def _shown(value: Any) -> str:
    if value is UNSET:
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return "given" if hasattr(value, "model_fields_set") or isinstance(value, dict) else as_yaml(value)


def _add_group_findings(reports: list[FileReport], files: dict[int, StockFile]) -> None:
    disaggs = [(index, file) for index, file in files.items() if isinstance(file, DisaggStockFile)]
    prefills = [file for index, file in files.items() if reports[index].kind == "prefill"]
    decodes = [file for index, file in files.items() if reports[index].kind == "decode"]
    if len(disaggs) != 1 or len(prefills) != 1 or len(decodes) != 1:
        return
    index, disagg = disaggs[0]
    group = Group(prefills[0].options, decodes[0].options, disagg.options)
    shared = tuple(_finding(disagg, requirement, group) for requirement in requirements.GROUP)
    reports[index] = replace(reports[index], findings=reports[index].findings + shared)
