"""Checks of what is installed: this package, NIXL, TensorRT-LLM, and variables that would change what they do.

Versions are read from the packages' metadata: nothing is imported, because TensorRT-LLM takes long and wants a GPU, and NIXL
reads its settings once per process.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

from scd_trt import __version__
from scd_trt.config import ServedPair, TransportConfig
from scd_trt.deploy.scd_section import CONFIG_VARIABLE, ROLE_VARIABLE
from scd_trt.doctor.findings import Finding
from scd_trt.doctor.host import Host
from scd_trt.transfer.nixl import ucx_environment
from scd_trt.transfer.transport import LibraryError

NIXL_DISTRIBUTIONS = ("nixl-cu13", "nixl-cu12", "nixl")
OLDEST_NIXL = (1, 4)
TENSORRT_LLM = "tensorrt_llm"
SUPPORTED_TENSORRT_LLM = (1, 2)
KNOWN_TENSORRT_LLM = ((1, 3), (1, 4))


def examine_software(pair: ServedPair | None, host: Host, *, file: Path | None = None) -> Iterator[Finding]:
    """All of them."""
    yield Finding("scd-trt", "ok", f"{__version__}, Python {platform.python_version()}")
    yield check_nixl(host)
    yield check_variables(pair.transport if pair else TransportConfig(), host)
    yield check_tensorrt_llm(host)
    if file is not None:
        yield check_selected(file, host)


def check_nixl(host: Host) -> Finding:
    """One NIXL that speaks to its peers' versions."""
    installed = {name: version for name in NIXL_DISTRIBUTIONS if (version := host.installed_version(name))}
    listed = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not installed:
        cure = "pip install nixl-cu12==1.5.1 (nixl-cu13 with CUDA 13); never the meta package nixl"
        return Finding("nixl", "fail", "not installed", cure)
    name, version = next(iter(installed.items()))  # the order in which it is imported
    if _numbers(version) < OLDEST_NIXL:
        cure = f"pip install {name}==1.5.1: releases before 1.4 were seen to fail or crash with newer peers"
        return Finding("nixl", "fail", listed, cure)
    if len(installed) > 1:
        return Finding("nixl", "warn", f"{listed}; {name} is used", "keep one: two in one process clash")
    return Finding("nixl", "ok", listed)


def check_variables(transport: TransportConfig, host: Host) -> Finding:
    """Variables of UCX that are set here already and contradict the configuration."""
    try:
        ucx_environment(transport, host.environment)
    except LibraryError as error:
        return Finding("environment", "fail", str(error), "unset it where workers are started")
    given = sorted(name for name in host.environment if name.startswith("UCX_"))
    return Finding("environment", "ok", f"UCX variables set here: {', '.join(given) or 'none'}")


def check_tensorrt_llm(host: Host) -> Finding:
    """A version whose connector interface is known."""
    version = host.installed_version(TENSORRT_LLM)
    if version is None:
        return Finding("tensorrt-llm", "skip", "not installed here; worker hosts need 1.2, the router does not")
    if _numbers(version) == SUPPORTED_TENSORRT_LLM:
        return Finding("tensorrt-llm", "ok", version)
    if _numbers(version) in KNOWN_TENSORRT_LLM:
        return Finding("tensorrt-llm", "warn", f"{version} was read, never run", "see docs/tensorrt-llm.md, Versions")
    return Finding("tensorrt-llm", "fail", f"{version} is not known", "use 1.2, e.g. its image release:1.2.1")


def check_selected(file: Path, host: Host) -> Finding:
    """What the connectors of a `trtllm-serve` started from this shell would read."""
    selected, role = host.environment.get(CONFIG_VARIABLE), host.environment.get(ROLE_VARIABLE)
    if not selected:
        return Finding("selection", "skip", f"{CONFIG_VARIABLE} is not set in this shell")
    if Path(selected).resolve() != file.resolve():
        text = f"{CONFIG_VARIABLE} names {selected}, not the file examined here"
        return Finding("selection", "warn", text, f"export {CONFIG_VARIABLE}={file.resolve()}")
    if role not in ("prefill", "decode"):
        return Finding(
            "selection", "fail", f"{ROLE_VARIABLE} is {role!r}", f"export {ROLE_VARIABLE}=prefill, or decode"
        )
    return Finding("selection", "ok", f"{CONFIG_VARIABLE} names this file, {ROLE_VARIABLE} is {role}")


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
