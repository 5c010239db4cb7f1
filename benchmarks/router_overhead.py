"""What the router costs a request: the same request to a decode worker, straight and through the router.

    python benchmarks/router_overhead.py [--requests 200] [--tokens 2048]

Three processes on loopback: workers, router, client. Engines are scripted (no model computes, codes are constant), so that
what remains is the path itself. One request at a time. Rows, medians of whole answers in ms:

    straight    decode worker alone
    local       the router decides that decode prefills (two prompts in one request): parse, tokenise, forward
    stored      all blocks are in the decode worker's store: the same, hash, Expect, report
    send        codes travel: the same, a prefill request, codes over the loopback transport, Wait
    round trip  GET /version of the decode worker: the unit in which hops are counted

The prompt is given as token ids. Each hop parses the body again, so the cost of length shows in all rows but the last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from routed_workers import TERMS, group_of_two, routed
from tiny_models import save_tiny_tokenizer

from scd_trt.models import load_tokenizer
from scd_trt.serving.routes import Route

WARM_UP = 20
_spawn = multiprocessing.get_context("spawn")


def run_workers(tokenizer_path: Path, pipe: Connection) -> None:
    """Process of both workers: tells its configuration, ends when told."""
    with group_of_two(load_tokenizer(tokenizer_path)) as group:
        for served in (group.prefill_served, group.decode_served):
            served.engine.max_prompt_tokens = 1 << 20
        pipe.send((group.config(router={"landing_timeout_s": 5.0}), group.decode_served.port))
        pipe.recv()


def run_router(tokenizer_path: Path, config: Any, pipe: Connection) -> None:
    """Process of the router: tells its URL, ends when told."""
    with routed(Route(config, TERMS, load_tokenizer(tokenizer_path))) as (client, _):
        pipe.send(str(client.base_url))
        pipe.recv()


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that tells one thing, and ends with the block."""
    here, there = _spawn.Pipe()
    process = _spawn.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    try:
        if not here.poll(120):
            raise SystemExit(f"{target.__name__} did not start")
        yield here.recv()
        here.send("end")
        process.join(20)
    finally:
        process.kill()


def body(first: int, num_tokens: int, *, num_prompts: int = 1) -> dict[str, Any]:
    """A prompt that begins like no other one."""
    ids = [first % 200, first // 200 % 200, *[7] * (num_tokens - 2)]
    return {
        "model": "pair",
        "prompt": ids if num_prompts == 1 else [ids] * num_prompts,
        "max_tokens": 1,
        "temperature": 0,
    }


def timed(client: httpx.Client, bodies: list[dict[str, Any]], decision: str | None = None) -> float:
    """Median of whole answers, in ms; checks that the router decided as meant."""
    taken_ms = []
    for each in bodies:
        begin_s = time.perf_counter()
        answer = client.post("/v1/completions", json=each).raise_for_status().json()
        taken_ms.append(1000 * (time.perf_counter() - begin_s))
        found = answer["usage"].get("scd", {}).get("decision")
        if found != decision:
            raise SystemExit(f"decided {found} instead of {decision}: {answer['usage']}")
    return statistics.median(taken_ms[WARM_UP:])


def measure(straight: httpx.Client, router: httpx.Client, num_requests: int, num_tokens: int) -> dict[str, float]:
    """Milliseconds per row."""
    numbers = range(num_requests + WARM_UP)
    fresh = [body(number, num_tokens) for number in numbers]
    halves = [body(number, num_tokens // 2, num_prompts=2) for number in numbers]
    found = {"straight": timed(straight, [body(20_000, num_tokens)] * len(numbers))}
    found["local"] = timed(router, halves, "local")
    found["send"] = timed(router, fresh, "send")
    found["stored"] = timed(router, [fresh[-1]] * len(numbers), "stored")
    round_trips = []
    for _ in numbers:
        begin_s = time.perf_counter()
        straight.get("/version")
        round_trips.append(1000 * (time.perf_counter() - begin_s))
    found["round trip"] = statistics.median(round_trips[WARM_UP:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200, help="per row")
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = save_tiny_tokenizer(Path(directory))
        with child(run_workers, tokenizer) as (config, port), child(run_router, tokenizer, config) as router_url:
            clients = [
                httpx.Client(base_url=url, timeout=30, trust_env=False)
                for url in (f"http://127.0.0.1:{port}", router_url)
            ]
            found = measure(clients[0], clients[1], options.requests, options.tokens)
    print(f"{options.tokens} tokens, {options.requests} requests per row, one at a time; medians in ms")
    for name, milliseconds in found.items():
        more = "" if name in ("straight", "round trip") else f"   +{milliseconds - found['straight']:.2f}"
        print(f"{name:12}{milliseconds:8.2f}{more}")


if __name__ == "__main__":
    main()
