"""What a GPU host has and what it lacks: every skip of this directory names the missing thing and how to get it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys

import torch

MODEL_VARIABLE = "SCD_GPU_MODEL"
ROUTER_VARIABLE = "SCD_GPU_ROUTER_PYTHON"
MIN_FREE_BYTES = 8 << 30


def missing_for_torch() -> str:
    """Why tests with torch alone cannot run; empty where they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device: torch.cuda.is_available() is False"
    return ""


def missing_for_nixl() -> str:
    """Why tests that move device memory cannot run."""
    if not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl")):
        return "needs NIXL: pip install nixl-cu12==1.5.1 (nixl-cu13 with CUDA 13)"
    return missing_for_torch()


def missing_for_api() -> str:
    """Why the connector interface cannot be compared; TensorRT-LLM is not imported to find out."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return "needs tensorrt_llm, e.g. the image nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
    return missing_for_torch()


@functools.cache
def missing_for_servers() -> str:
    """Why two `trtllm-serve` and a router cannot be started."""
    if shutil.which("trtllm-serve") is None:
        return "needs trtllm-serve on the PATH, e.g. of the image nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
    if reason := missing_for_api() or missing_for_nixl():
        return reason
    if not _is_installed("scd-trt"):
        return "needs this project beside tensorrt_llm, not only its sources: pip install --no-deps -e . msgspec xxhash"
    free, _ = torch.cuda.mem_get_info()
    if free < MIN_FREE_BYTES:
        return f"needs {MIN_FREE_BYTES >> 30} GiB of free device memory; there are {free >> 30}"
    return _missing_for_router()


def router_python() -> str:
    """The Python that runs the router: it needs transformers 5, which TensorRT-LLM 1.2 does not have."""
    return os.environ.get(ROUTER_VARIABLE, sys.executable)


def _missing_for_router() -> str:
    probe = "import scd_trt.serving.worker"
    done = subprocess.run([router_python(), "-c", probe], capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return ""
    why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"
    return (
        f"{router_python()} cannot run the router ({why}): make a virtual environment with this project and name its python "
        f"in {ROUTER_VARIABLE}"
    )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
