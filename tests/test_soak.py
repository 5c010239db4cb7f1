"""Load on real processes that are killed and stopped: every answer is right or a proper error, and nothing is left behind.

One body, two lengths: half a minute of load with every test run, half an hour with `make test-soak`, which prints the
figures; SCD_SOAK_S sets another number of seconds for the latter.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from serving_pairs import write_pair
from soak_fleet import DECODE, PREFILL, Fleet, Server, fleet_of
from soak_load import TOKENS_PER_BLOCK, Load, questions

from scd_trt.distill.pipeline import distill
from scd_trt.models import load_model

MIB = 1 << 20
SEED = 20261130
NUM_CLIENTS = 4
NUM_BLOCKS = 512
ARENA_BYTES = SEND_BUFFER_BYTES = 16 * MIB
# One worker of each role is stopped but never killed, so that its memory is seen over the whole run.
MORTAL = (PREFILL[1], DECODE[1])
WARM_UP_REQUESTS = 40
SETTLES_WITHIN_S = 90.0
# What grows until it is full, after the warm-up: code store (4 MiB), records of 8,192 transfers, trace events, the router's
# index of 131,072 blocks (some 40 MB when full), and what the allocator keeps for itself.
MEMORY_SLACK_MIB = 64.0
# Idle connections of the HTTP clients come and go within two seconds; every session of a pair of workers has a socket and the
# handful of descriptors of its data path.
FD_SLACK = 16


@dataclass(frozen=True)
class Length:
    """How long, and how often something is done to a worker."""

    load_s: float
    disturb_every_s: float


SHORT = Length(load_s=32.0, disturb_every_s=8.0)
LONG = Length(load_s=float(os.environ.get("SCD_SOAK_S", "1800")), disturb_every_s=20.0)


@dataclass
class Disturber:
    """Kills or stops a worker again and again; a killed one is started again."""

    fleet: Fleet
    chosen: random.Random
    done: Counter[str] = field(default_factory=Counter)

    async def run(self, length: Length) -> None:
        begin_s = time.monotonic()
        kinds = iter(["kill", "stop"])  # the first two are of both kinds; then chance decides
        for number in range(1, int(length.load_s / length.disturb_every_s)):
            await asyncio.sleep(max(0.0, begin_s + number * length.disturb_every_s - time.monotonic()))
            await self._disturb(next(kinds, None) or self.chosen.choice(("kill", "stop")))

    async def _disturb(self, kind: str) -> None:
        names = MORTAL if kind == "kill" else (*PREFILL, *DECODE)
        ready = [self.fleet.servers[name] for name in names]
        ready = [server for server in ready if await asyncio.to_thread(server.is_ready)]
        if not ready:
            return
        server = self.chosen.choice(ready)
        self.done[kind] += 1
        if kind == "kill":
            server.kill()
            server.start()
            return
        server.halt()
        # shorter and longer than the 3 s after which peers take it for gone
        await asyncio.sleep(self.chosen.uniform(0.5, 6.0))
        server.resume()


@pytest.mark.timeout(600)  # a busy machine takes minutes to start five processes
def test_soak_short(tmp_path: Path) -> None:
    soak(tmp_path, SHORT)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_soak_long(tmp_path: Path) -> None:
    soak(tmp_path, LONG)


def soak(root: Path, length: Length) -> None:
    pair = write_pair(
        root,
        policy="exact",  # codes that lose nothing, so that the answer with and without them is the same
        same_model=True,
        engine={"max_num_tokens": 64, "num_blocks": NUM_BLOCKS, "tokens_per_block": TOKENS_PER_BLOCK},
        transport={"arena_bytes": ARENA_BYTES, "send_buffer_bytes": SEND_BUFFER_BYTES},
        store={"capacity_bytes": 4 * MIB},
        control={"lease_s": 10.0},
    )
    distill(pair.config)
    asked = questions(load_model(pair.consumer), SEED)
    with fleet_of(pair) as fleet:
        load = Load(fleet.router.url, pair.config.name, asked, seed=SEED)
        figures = asyncio.run(_run(fleet, load, length))
        metrics = fleet.router.metrics()
        statuses = fleet.end()
    print(json.dumps(figures))
    assert load.tally.failures == []
    assert load.tally.num_right + load.tally.num_cancelled + sum(load.tally.errors.values()) == load.tally.num_requests
    assert figures["kills"] > 0
    assert figures["stops"] > 0
    assert load.tally.num_cancelled > 0
    assert load.tally.num_with_codes > 0
    assert metrics.get('scd_fallback_total{reason="other"}', 0) == 0
    for name, (before, after) in figures["rss_mib"].items():
        assert after - before < MEMORY_SLACK_MIB, f"memory of {name}"
    for name, (before, after) in figures["fds"].items():
        assert after - before <= FD_SLACK, f"descriptors of {name}"
    assert set(statuses.values()) == {0}, statuses
    assert fleet.num_left() == 0
    for server in fleet.servers.values():
        assert "Traceback" not in server.log.read_text(), server.name


async def _run(fleet: Fleet, load: Load, length: Length) -> dict[str, Any]:
    await load.run(NUM_CLIENTS, lambda number: number < WARM_UP_REQUESTS)
    await _settled(fleet)
    observed = [fleet.router, *(server for server in fleet.workers if server.name not in MORTAL)]
    before = _sizes(observed)
    disturber, begin_s = Disturber(fleet, random.Random(SEED)), time.monotonic()
    disturbing = asyncio.create_task(disturber.run(length))
    await load.run(NUM_CLIENTS, lambda _: time.monotonic() - begin_s < length.load_s)
    await disturbing
    load_s = time.monotonic() - begin_s
    left = await _settled(fleet)
    after = _sizes(observed)
    return load.tally.figures() | {
        "load_s": round(load_s, 1),
        "clients": NUM_CLIENTS,
        "seed": SEED,
        "kills": disturber.done["kill"],
        "stops": disturber.done["stop"],
        "rss_mib": {name: (before[name][0], after[name][0]) for name in after},
        "fds": {name: (before[name][1], after[name][1]) for name in after},
        "left_behind": sum(left.values()),
    }


def _sizes(servers: list[Server]) -> dict[str, tuple[float, int]]:
    return {server.name: (round(server.memory_mib(), 1), server.num_fds()) for server in servers}


async def _settled(fleet: Fleet) -> dict[str, int]:
    """Wait until nobody holds anything; what is left after that is an orphan, and fails the test."""
    deadline_s = time.monotonic() + SETTLES_WITHIN_S
    await asyncio.to_thread(fleet.await_ready)
    while any((left := await _held(fleet)).values()):
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        await asyncio.sleep(0.2)
    return left


async def _held(fleet: Fleet) -> dict[str, int]:
    """Everything that ends with the request it belongs to."""
    held: dict[str, int] = {}
    for server in fleet.workers:
        counters, metrics = await fleet.counters(server), await asyncio.to_thread(server.metrics)
        held |= {f"{server.name} {what}": number for what, number in _of_transfers(server, counters).items()}
        held |= {
            f"{server.name} requests": int(sum(_matching(metrics, r"scd_engine_requests\{.*"))),
            f"{server.name} blocks": NUM_BLOCKS - int(metrics["scd_engine_free_blocks"]),
        }
    router = await asyncio.to_thread(fleet.router.metrics)
    return held | {"router transfers": int(router["scd_inflight_transfers"])}


def _of_transfers(server: Server, counters: dict[str, int]) -> dict[str, int]:
    if server.name in PREFILL:
        return {
            "leases": counters.get("granted", 0) - counters.get("ended", 0),
            "slots": SEND_BUFFER_BYTES - counters["send_buffer_free_bytes"],
        }
    over = counters.get("landed_transfers", 0) + sum(
        number for name, number in counters.items() if name.startswith("failed_")
    )
    return {
        "transfers": counters.get("expected", 0) - over,
        "extents": ARENA_BYTES - counters["arena_free_bytes"],
        "quarantined": counters["arena_quarantined_bytes"],
    }


def _matching(metrics: dict[str, float], pattern: str) -> list[float]:
    return [value for name, value in metrics.items() if re.fullmatch(pattern, name)]
