"""TensorRT-LLM as far as this project touches it. The only file that imports it, and only inside its own processes.

Owns what differs between its versions: where the connector's base classes live (1.1 to about 1.3.0rc11, and later), and the
collectives between the ranks of one server. TensorRT-LLM loads the connector by name, so in its processes it is imported
already; everywhere else (router, embedded engine, tests) nothing here imports it, even where it is installed, because that
takes many seconds and a GPU.

Deriving from the host's own base classes matters: newer versions call methods that older ones do not have, and bring their
defaults in the base class.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scd_trt.config import ScdError
from scd_trt.serving import connector_api
from scd_trt.serving.ranks import RankGroup, SingleRank

PACKAGE = "tensorrt_llm"
API_PATHS = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Newest first: a version that moved the file may leave a shim behind."""


class HostError(ScdError):
    """This TensorRT-LLM is not one that the connector knows."""


def is_host() -> bool:
    """True in a process of TensorRT-LLM."""
    return PACKAGE in sys.modules


def host_version() -> str:
    """Version of the host, or `unknown`."""
    return str(getattr(sys.modules.get(PACKAGE), "__version__", "unknown"))


def connector_bases() -> tuple[type, type]:
    """Base classes of scheduler and worker: the host's in a process of TensorRT-LLM, else those of `connector_api`.

    Raises:
        HostError: the host has no connector interface where the known versions have it.
    """
    api: Any = load_api() if is_host() else connector_api
    return api.KvCacheConnectorScheduler, api.KvCacheConnectorWorker


def load_api() -> ModuleType:
    """The host's module with the connector interface.

    Raises:
        HostError: it is in none of the known places.
    """
    for path in API_PATHS:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            # something else missing is a broken installation, which its own message describes better
            if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                raise
    raise HostError(
        f"TensorRT-LLM {host_version()} has its connector interface in none of {', '.join(API_PATHS)}; "
        "1.2 and 1.3 are supported"
    )


def host_ranks() -> RankGroup:
    """The ranks of the server that this process belongs to."""
    if not is_host():
        return SingleRank()
    from tensorrt_llm._utils import mpi_allgather, mpi_rank, mpi_world_size

    size = int(mpi_world_size())
    return MpiRanks(int(mpi_rank()), size, mpi_allgather) if size > 1 else SingleRank()


class MpiRanks:
    """Ranks over the host's MPI communicator, the one that it broadcasts connector metadata over.

    Rows travel through host memory: simple and the same in all versions, not fast.
    """

    def __init__(self, rank: int, size: int, allgather: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size = rank, size
        self._allgather = allgather

    def all_gather(self, rows: Tensor, /) -> list[Tensor]:
        """See `RankGroup`."""
        mine = rows.detach().cpu().contiguous()
        # as bytes: numpy has no bfloat16
        parts = self._allgather(mine.view(torch.uint8).numpy())
        return [torch.from_numpy(part).view(mine.dtype).view(mine.shape) for part in parts]
