"""A worker that is asked to stop finishes what it holds and leaves; the router asks others meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from routed_workers import (
    TERMS,
    Served,
    ask,
    completion,
    decode_worker,
    pair_config,
    prefill_worker,
    prompt,
    raw_server,
    routed,
)
from serving_pairs import TinyPair, complete, served_slowly
from tiny_models import save_tiny_tokenizer
from transformers import AutoTokenizer

from scd_trt.serving.launcher import Child
from scd_trt.serving.routes import Route
from scd_trt.transfer.control import ControlClient

pytestmark = pytest.mark.timeout(400)

WAIT_S = 60.0
NEVER_DRAINED = """
import asyncio, uvicorn
from scd_trt.serving.draining import DrainingServer

async def app(scope, receive, send):
    await receive()
    print("listening", flush=True)
    await send({"type": "lifespan.startup.complete"})
    await receive()

async def drain():
    print("draining", flush=True)
    await asyncio.Event().wait()

DrainingServer(uvicorn.Config(app, port=0, log_level="warning"), drain).run()
"""
LEAVES_FOR_LONG = {"decision": {"prefill_retry_s": 60.0}, "policy": "round_robin"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyPair, dict[str, Child]]]:
    with served_slowly(tmp_path_factory.mktemp("slow")) as found:
        yield found


def text_of(seed: int, length: int) -> str:
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefghijklmnop qrstuvwxyz.") for _ in range(length))


def until_refusing(child: Child) -> None:
    """Return once the worker says that it is not to be asked any more."""
    deadline_s = time.monotonic() + WAIT_S
    while httpx.get(f"{child.url}/health").status_code != 503:
        assert time.monotonic() < deadline_s, "the worker goes on as if nothing had happened"
        time.sleep(0.01)


def streamed_text(lines: Iterator[str]) -> str:
    """The rest of a stream; it must end as it should."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return "".join(choice["text"] for event in data[:-1] for choice in json.loads(event)["choices"])


def test_prefill_worker_finishes_its_leases(slow: tuple[TinyPair, dict[str, Child]]) -> None:
    pair, children = slow
    prefill, router = children["prefill"], children["router"]
    question = text_of(2, 900)
    own = complete(children["decode"].url, question, model=pair.config.name, cache_salt="own")
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(complete(router.url, question, model=pair.config.name)))
    asking.start()
    asyncio.run(_first_landing(pair))
    prefill.process.send_signal(signal.SIGTERM)
    asking.join(WAIT_S)
    assert prefill.process.wait(WAIT_S) == 0
    scd = answers[0]["usage"]["scd"]
    assert answers[0]["choices"][0]["text"] == own["choices"][0]["text"]
    assert (scd["fallback"], scd["matched_tokens"]) == (None, 896)


def test_decode_worker_finishes_its_stream(slow: tuple[TinyPair, dict[str, Child]]) -> None:
    """Runs after the test above, so without a prefill worker."""
    pair, children = slow
    decode, router = children["decode"], children["router"]
    body = {"model": pair.config.name, "prompt": text_of(1, 200), "max_tokens": 300, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    own = complete(decode.url, body["prompt"], model=body["model"], max_tokens=300, ignore_eos=True, cache_salt="own")
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        first = next(lines)
        decode.process.send_signal(signal.SIGTERM)
        until_refusing(decode)
        refused = httpx.post(f"{decode.url}/v1/completions", json=body, timeout=WAIT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert decode.process.poll() is None, "it left a client alone"
        text = streamed_text(iter([first, *lines]))
    assert text == own["choices"][0]["text"]
    assert decode.process.wait(WAIT_S) == 0


def test_second_signal_ends_it_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", NEVER_DRAINED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == -signal.SIGTERM


def test_router_leaves_a_draining_prefill_worker(tokenizer: Any) -> None:
    with prefill_worker(tokenizer) as leaving, prefill_worker(tokenizer) as staying, decode_worker(tokenizer) as decode:
        config = pair_config([leaving, staying], [decode], router=LEAVES_FOR_LONG)
        with routed(Route(config, TERMS, tokenizer)) as (client, _):
            leaving.engine.producer.drain(timeout_s=0)
            answer = ask(client, completion(prompt()))
            assert answer["usage"]["scd"]["fallback"] is None
            assert client.get("/ready").json()["workers"]["pair"] == {"prefill": 1, "decode": 1}
            assert (len(leaving.engine.submitted), len(staying.engine.submitted)) == (0, 1)


def test_router_leaves_a_draining_decode_worker(tokenizer: Any) -> None:
    body = b'{"error": {"message": "leaving", "type": "server_error", "param": null, "code": "draining"}}'
    refusal = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
    with (
        prefill_worker(tokenizer) as prefill,
        decode_worker(tokenizer) as leaving,
        decode_worker(tokenizer) as staying,
        raw_server(refusal) as port,
    ):
        leaving.engine.consumer.drain(timeout_s=0)
        config = pair_config([prefill], [Served(None, port, leaving.control_port), staying], router=LEAVES_FOR_LONG)
        with routed(Route(config, TERMS, tokenizer)) as (client, _):
            answer = ask(client, completion(prompt()))
            assert answer["usage"]["scd"]["fallback"] is None
            assert client.get("/ready").json()["workers"]["pair"] == {"prefill": 1, "decode": 1}
            # the prefill worker was not blamed, nor asked in vain
            assert len(prefill.engine.submitted) == 1
            assert 'scd_fallback_total{reason="consumer_draining"} 1.0' in client.get("/metrics").text


async def _first_landing(pair: TinyPair) -> None:
    """Return once codes of the transfer in progress have landed."""
    decode = pair.config.servers.decode
    client = ControlClient(f"{decode.host}:{decode.control_port}", pair.config.control)

    async def landed() -> None:
        while not (await client.status()).counters.get("landed", 0):
            await asyncio.sleep(0.002)

    try:
        await asyncio.wait_for(landed(), WAIT_S)
    finally:
        await client.close()
