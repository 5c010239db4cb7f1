"""A client that is killed frees both workers within a second: four real processes, real sockets, SIGKILL.

The client is a process of its own, so that its end is the kernel's doing and not that of an HTTP library.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_pairs import TinyPair, complete, served_slowly

from scd_trt.serving.launcher import Child
from scd_trt.transfer.control import ControlClient

pytestmark = pytest.mark.timeout(240)

FREED_WITHIN_S = 1.0
CLIENT = """
import socket, sys
host, port, path, body = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.stdin.buffer.read()
with socket.create_connection((host, port)) as connection:
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}", "", ""]
    connection.sendall("\\r\\n".join(head).encode() + body)
    print("sent", flush=True)
    connection.recv(1)
    print("first byte", flush=True)
    while connection.recv(1 << 16):
        pass
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyPair, dict[str, Child]]]:
    with served_slowly(tmp_path_factory.mktemp("slow")) as found:
        yield found


@contextmanager
def client_process(url: str, body: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A client that reads as fast as it can, until killed."""
    where = httpx.URL(url)
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, where.host, str(where.port), "/v1/completions"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(body))
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def expect_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def text_of(seed: int, length: int) -> str:
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefghijklmnop qrstuvwxyz.") for _ in range(length))


def num_left(child: Child) -> int:
    """Requests that ended because their client had left."""
    found = re.search(r'scd_requests_total\{[^}]*status="499"\} (\d+)', httpx.get(f"{child.url}/metrics").text)
    return int(found[1]) if found else 0


def counters(pair: TinyPair) -> dict[str, int]:
    """Of the decode worker's transfers."""

    async def ask() -> dict[str, int]:
        decode = pair.config.servers.decode
        client = ControlClient(f"{decode.host}:{decode.control_port}", pair.config.control)
        try:
            return (await client.status()).counters
        finally:
            await client.close()

    return asyncio.run(ask())


def freed_after_s(is_free: Callable[[], bool]) -> float:
    """Seconds until `is_free`."""
    begin_s = time.monotonic()
    while not is_free():
        if time.monotonic() - begin_s > 30:
            pytest.fail("not freed within 30 s")
        time.sleep(0.01)
    return time.monotonic() - begin_s


def test_client_killed_within_its_stream(slow: tuple[TinyPair, dict[str, Child]]) -> None:
    pair, children = slow
    before, arena = num_left(children["decode"]), counters(pair)["arena_free_bytes"]
    body = {"model": pair.config.name, "prompt": text_of(1, 200), "max_tokens": 800, "ignore_eos": True}
    with client_process(children["router"].url, body | {"stream": True}) as client:
        expect_line(client, "sent")
        expect_line(client, "first byte")
        assert num_left(children["decode"]) == before
        client.kill()
        taken_s = freed_after_s(lambda: num_left(children["decode"]) > before)
    assert taken_s < FREED_WITHIN_S
    assert counters(pair)["arena_free_bytes"] == arena
    assert num_left(children["prefill"]) == 0  # it was done already
    assert complete(children["router"].url, text_of(2, 60), model=pair.config.name)["usage"]["scd"]["fallback"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_client_killed_while_prefill_computes(slow: tuple[TinyPair, dict[str, Child]], stream: bool) -> None:
    pair, children = slow
    before, counted = num_left(children["prefill"]), counters(pair)
    body = {"model": pair.config.name, "prompt": text_of(3 + stream, 1000), "max_tokens": 4, "stream": stream}
    with client_process(children["router"].url, body) as client:
        expect_line(client, "sent")
        # the grant is out and codes have landed: both workers work for this client
        freed_after_s(lambda: counters(pair).get("landed", 0) > counted.get("landed", 0))
        client.kill()
        taken_s = freed_after_s(
            lambda: (
                num_left(children["prefill"]) > before
                and counters(pair)["arena_free_bytes"] == counted["arena_free_bytes"]
            )
        )
    assert taken_s < FREED_WITHIN_S
    assert counters(pair)["failed_aborted"] == counted.get("failed_aborted", 0) + 1
    assert num_left(children["router"]) > 0


def test_logs_hold_no_trace(slow: tuple[TinyPair, dict[str, Child]]) -> None:
    """Runs last: clients that leave are everyday, not a bug."""
    for child in slow[1].values():
        assert "Traceback" not in Path(child.log).read_text(), child.role
