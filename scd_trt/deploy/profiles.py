"""Kinds of machines that `render` writes files for: what differs between them, in one table.

A profile fills in what a pair file does not say. What it must decide, because the pair file's value is for the embedded
engine: lane, sizes of batches, memory shares. None of the sizes has been measured on such a machine: they are starting
points from the memory and links that the machines have, and the rendered files say so.

Units: `_bytes`, `_tokens` in names; fractions are of the memory that is free after the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scd_trt.config import MIB, ScdError

GIB = 1024 * MIB


class ProfileError(ScdError):
    """No such profile."""


@dataclass(frozen=True)
class Profile:
    """One kind of machine, the same for both roles unless a name says otherwise."""

    name: str
    machine: str
    lane: Literal["auto", "tcp"]
    lane_note: str
    free_gpu_memory_fraction: float
    max_num_tokens: int
    prefill_batch_size: int
    decode_batch_size: int
    arena_bytes: int
    send_buffer_bytes: int
    store_bytes: int
    window: int
    environment: tuple[tuple[str, str], ...]
    """Variables to export beside the two of SCD's own, and why."""


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="h200-ib",
            machine="hosts with H200 GPUs on InfiniBand or RoCE",
            lane="auto",
            lane_note="auto lets UCX use RDMA; without memlock it falls back to tcp and says nothing",
            free_gpu_memory_fraction=0.85,
            max_num_tokens=8192,
            prefill_batch_size=32,
            decode_batch_size=256,
            arena_bytes=4 * GIB,
            send_buffer_bytes=GIB,
            store_bytes=32 * GIB,
            window=8,
            environment=(("ulimit -l unlimited", "RDMA pins the arena; in a pod only uid 0 keeps IPC_LOCK"),),
        ),
        Profile(
            name="tcp",
            machine="hosts with NVIDIA GPUs and Ethernet between them, across racks or sites",
            lane="tcp",
            lane_note="tcp also forbids shortcuts inside one host, so that what is measured is the network",
            free_gpu_memory_fraction=0.85,
            max_num_tokens=4096,
            prefill_batch_size=16,
            decode_batch_size=128,
            arena_bytes=GIB,
            send_buffer_bytes=512 * MIB,
            store_bytes=16 * GIB,
            window=8,
            environment=(("export UCX_TCP_PORT_RANGE=20000-20099", "the ports to open between the workers"),),
        ),
        Profile(
            name="gb200",
            machine="GB200 NVL72 nodes",
            lane="auto",
            lane_note="codes leave from host memory, so RDMA or tcp carries them; NVLink between nodes is not used yet",
            free_gpu_memory_fraction=0.85,
            max_num_tokens=16384,
            prefill_batch_size=64,
            decode_batch_size=512,
            arena_bytes=8 * GIB,
            send_buffer_bytes=2 * GIB,
            store_bytes=64 * GIB,
            window=8,
            environment=(("ulimit -l unlimited", "RDMA pins the arena; in a pod only uid 0 keeps IPC_LOCK"),),
        ),
    )
}


def profile_named(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ProfileError: there is none.
    """
    if name not in PROFILES:
        raise ProfileError(f"profile {name!r}: unknown; known profiles: {', '.join(PROFILES)}")
    return PROFILES[name]
