"""How long an engine waits for `get_num_new_matched_tokens`, with 100,000 blocks in the decode server's store.

TensorRT-LLM asks while it holds its radix tree's mutex, so every microsecond here is one in which nothing is scheduled. Three
prompts of each length: one that landed, one of which nothing did, one that the engine asks about again. The store is in use
meanwhile as it is on a server: its reaper and its statistics run in another thread (`busy`), once in `REAP_S`.

Figures are the calling thread's own processor time, so that other processes on the machine count as little as can be, and the
wall time beside it. Of `NUM_ROUNDS` rounds the quietest is taken, since a neighbour on the core still empties its caches.
`longest hold` is the longest time that the reaper or the statistics kept the store's lock: an engine that asks in that moment
waits for it.

    python benchmarks/match_latency.py

The process ends with 1 if the 99th percentile of a prompt of `JUDGED_TOKENS` exceeds `LIMIT_US`.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serving_pairs import loopback_config
from tiny_translators import tiny_spec

from scd_trt import translator as translators
from scd_trt.serving.connector import ScdConnectorScheduler
from scd_trt.serving.connector_runtime import ConnectorRuntime
from scd_trt.serving.paged_executor import PagedRequest
from scd_trt.translator import RawLayer

NUM_BLOCKS = 100_000
TOKENS_PER_BLOCK = 32
LENGTHS = (512, 2048, 8192, 32768)
JUDGED_TOKENS = 2048
LIMIT_US = 200.0
NUM_CALLS = 300
NUM_ROUNDS = 20
REAP_S = 0.1


@dataclass(frozen=True)
class Sample:
    """Times of many calls, in microseconds."""

    cpu_us: list[float]
    wall_us: list[float]

    @classmethod
    def quietest(cls, make: Callable[[], Sample]) -> Sample:
        """The best of several rounds."""
        return min((make() for _ in range(NUM_ROUNDS)), key=lambda sample: sample.cpu_p99_us)

    @property
    def cpu_p99_us(self) -> float:
        """99th percentile of processor time."""
        return statistics.quantiles(self.cpu_us, n=100)[98]

    def words(self) -> str:
        """Medians and 99th percentiles."""
        cpu, wall = (statistics.quantiles(times, n=100) for times in (self.cpu_us, self.wall_us))
        return f"{cpu[49]:8.1f} {cpu[98]:8.1f}   {wall[49]:8.1f} {wall[98]:8.1f}"


def measure(scheduler: ScdConnectorScheduler, request: Callable[[int], PagedRequest], *, again: bool) -> Sample:
    """Ask about a prompt in a request of its own each time, or `again` about the same one."""
    sample = Sample([], [])
    for index in range(NUM_CALLS):
        asked = request(0 if again else index)
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        scheduler.get_num_new_matched_tokens(asked, 0)
        sample.cpu_us.append((time.thread_time_ns() - cpu_ns) / 1e3)
        sample.wall_us.append((time.perf_counter_ns() - wall_ns) / 1e3)
        if not again:
            scheduler.request_finished(asked, [])
    scheduler.request_finished(asked, [])
    return sample


class Housekeeping(threading.Thread):
    """What a server does to its store by timer."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        super().__init__(daemon=True)
        self._store, self._is_over = runtime.store, threading.Event()
        self.longest_us = 0.0

    def run(self) -> None:
        """Until `end`."""
        while not self._is_over.wait(REAP_S):
            for work in (self._store.reap, self._store.statistics):
                began_ns = time.thread_time_ns()
                work()
                self.longest_us = max(self.longest_us, (time.thread_time_ns() - began_ns) / 1e3)

    def end(self) -> None:
        """Stop and wait."""
        self._is_over.set()
        self.join()


def _request(tokens: list[int], index: int) -> PagedRequest:
    return PagedRequest(index, tokens, len(tokens), len(tokens))


def run(runtime: ConnectorRuntime) -> float:
    """Print the table; returns the figure that is judged."""
    chance = random.Random(0)
    entry = bytes(runtime.layout.block_bytes)
    prompts = {length: [chance.randrange(128_000) for _ in range(length + 1)] for length in LENGTHS}
    keys = [key for prompt in prompts.values() for key in runtime.sent_block_keys(prompt, "")]
    for key in (chance.randbytes(16) for _ in range(NUM_BLOCKS - len(keys))):
        runtime.store.put(key, entry)
    for key in keys:
        runtime.store.put(key, entry)
    housekeeping = Housekeeping(runtime)
    housekeeping.start()
    scheduler, judged_us = ScdConnectorScheduler(runtime), 0.0
    print(f"{runtime.store.statistics().num_entries} blocks in the store, best of {NUM_ROUNDS} x {NUM_CALLS} calls; us")
    print(f"{'prompt':>8} {'':8} {'cpu p50':>8} {'p99':>8}   {'wall p50':>8} {'p99':>8}")
    for length, prompt in prompts.items():
        absent = [token + 1 for token in prompt]
        for name, tokens, again in (("landed", prompt, False), ("absent", absent, False), ("again", prompt, True)):
            request = partial(_request, tokens)
            sample = Sample.quietest(partial(measure, scheduler, request, again=again))
            print(f"{length:8d} {name:8} {sample.words()}")
            if length == JUDGED_TOKENS:
                judged_us = max(judged_us, sample.cpu_p99_us)
    housekeeping.end()
    print(f"longest hold of the store's lock by timer: {housekeeping.longest_us:.0f} us")
    return judged_us


def main() -> None:
    """See the module's docstring."""
    spec = tiny_spec(1)
    translator = translators.build(
        {
            "name": "match-latency",
            "policy": "exact",
            "code_dtype": "float32",
            "raw_dtype": "bfloat16",
            "producer": spec,
            "consumer": spec,
            "groups": ((0, 1),),
        },
        (RawLayer(),),
    )
    config = loopback_config(TOKENS_PER_BLOCK, store={"capacity_bytes": 1 << 40})
    runtime = ConnectorRuntime.open_with(translator, config, "decode", listen="127.0.0.1:0")
    try:
        judged_us = run(runtime)
    finally:
        runtime.close()
    verdict = "met" if judged_us < LIMIT_US else "MISSED"
    print(f"p99 at {JUDGED_TOKENS} tokens: {judged_us:.0f} us, limit {LIMIT_US:.0f} us: {verdict}")
    sys.exit(judged_us >= LIMIT_US)


if __name__ == "__main__":
    main()
