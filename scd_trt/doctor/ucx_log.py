"""What UCX says of itself in its log: version, library, and the transports that it chose for writes between two processes.

UCX writes this with `UCX_LOG_LEVEL=info` and `UCX_PROTO_INFO=y` (`logging_to`); seen with UCX 1.23, the one in nixl 1.5.1:

    ... UCX  INFO  Version 1.23.0 (loaded from /.../libucp.so.0.0.0, git branch <unknown>, revision 65e342a)
    ...   | near inter-node cfg#1                                    |
    ...   | remote memory write by ucp_put* from host memory to host |
    ...   +--------+-------------+-----------------------------------+
    ...   | Range  | Description |              Config               |
    ...   +--------+-------------+-----------------------------------+
    ...   | 0..inf | zero-copy   | rc_mlx5/mlx5_0:1                  |

Only tables of `intra-node` and `inter-node` connections count: each agent also connects to itself. A log that is written
differently yields nothing, never something wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+) \(loaded from ([^,)]+)")
_CELLS = re.compile(r"\]\s+\|(.*)\|\s*$")
_BETWEEN_PROCESSES = re.compile(r"\b(intra|inter)-node cfg#\d+")
_LANE = re.compile(r"\b[a-z][a-z0-9_]*/[A-Za-z0-9_.:-]+")
MAX_LOG_BYTES = 4 << 20


@dataclass(frozen=True)
class UcxLog:
    """What was said; empty where it was not.

    Attributes:
        version: of UCX.
        library: path of libucp.
        lanes: transport/device of remote memory writes, e.g. `tcp/eth0`, `rc_mlx5/mlx5_0:1`, `cma/memory`.
    """

    version: str = ""
    library: str = ""
    lanes: tuple[str, ...] = ()


def logging_to(path: Path) -> dict[str, str]:
    """Variables that make a process write this log, to be set before it loads UCX."""
    return {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(path), "UCX_PROTO_INFO": "y"}


def read_log(path: Path) -> UcxLog:
    """Read a log; a file that is not there says nothing."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return UcxLog()
    return parse(text)


def parse(text: str) -> UcxLog:
    """See the module."""
    version = _VERSION.search(text)
    return UcxLog(
        version[1] if version else "",
        str(Path(version[2]).resolve()) if version else "",
        tuple(sorted(_write_lanes(text))),
    )


def _write_lanes(text: str) -> set[str]:
    lanes: set[str] = set()
    is_between = is_write = False
    for line in text.splitlines():
        row = _CELLS.search(line)
        cells = row[1].split("|") if row else []
        if len(cells) == 1:  # a title of two lines: whose connection, which operation
            is_between = bool(_BETWEEN_PROCESSES.search(cells[0])) or (is_between and "cfg#" not in cells[0])
            is_write = "remote memory write" in cells[0]
        elif len(cells) == 3 and is_between and is_write:
            lanes.update(_LANE.findall(cells[2]))
    return lanes
