"""Three real processes, NIXL between them, HTTP in front: what a client gets is what the consumer itself would say."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from serving_pairs import TinyPair, complete, served, write_pair

from scd_trt.models import load_model
from scd_trt.serving.launcher import Child
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.trace import TraceEvent
from scd_trt.translator import load_manifest

pytestmark = pytest.mark.timeout(240)


def text_of(seed: int, length: int) -> str:
    """Text that no other seed shares a prefix with; the tiny tokenizer makes one token of a character."""
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefghijklmnop qrstuvwxyz.") for _ in range(length))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyPair, dict[str, Child]]]:
    """Policy `exact`, A = B."""
    pair = write_pair(tmp_path_factory.mktemp("exact"), policy="exact", same_model=True)
    with served(pair) as children:
        yield pair, children


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyPair, dict[str, Child]]]:
    """Policy `paper`, A != B, with a Patch layer; many small chunks, so that a transfer takes a while."""
    pair = write_pair(tmp_path_factory.mktemp("paper"), policy="paper", engine={"max_num_tokens": 32})
    with served(pair) as children:
        yield pair, children


def test_exact_codes_give_the_text_of_the_model_itself(exact: tuple[TinyPair, dict[str, Child]]) -> None:
    pair, children = exact
    loaded = load_model(pair.consumer)
    for seed in range(20):
        prompt = text_of(seed, 40 + 9 * seed)
        answer = complete(children["router"].url, prompt, model=pair.config.name, max_tokens=24)
        ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
        expected = loaded.model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        scd = answer["usage"]["scd"]
        assert answer["choices"][0]["text"] == loaded.tokenizer.decode(expected, skip_special_tokens=True)
        assert (scd["fallback"], scd["matched_tokens"]) == (None, (ids.shape[1] - 1) // 8 * 8)
        assert scd["bytes_sent"] == scd["dense_bytes"] > 0


def test_codes_are_fewer_bytes_and_the_second_time_none_travel(paper: tuple[TinyPair, dict[str, Child]]) -> None:
    pair, children = paper
    prompt = text_of(100, 300)
    first, second = (complete(children["router"].url, prompt, model=pair.config.name) for _ in range(2))
    assert first["usage"]["scd"]["fallback"] is None
    assert 0 < first["usage"]["scd"]["bytes_sent"] < first["usage"]["scd"]["dense_bytes"]
    assert set(first["usage"]["scd"]["ms"]) >= {"expect", "prefill", "encode", "transfer", "wait", "decode_codes"}
    assert second["usage"]["scd"]["bytes_sent"] == 0
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_metrics_tell_translator_transport_and_store(paper: tuple[TinyPair, dict[str, Child]]) -> None:
    pair, children = paper
    complete(children["router"].url, text_of(105, 100), model=pair.config.name)
    fingerprint = load_manifest(pair.config.translator_path()).fingerprint
    for role in ("prefill", "decode"):
        lines = httpx.get(f"{children[role].url}/metrics").text.splitlines()
        assert f'scd_translator_info{{fingerprint="{fingerprint}"}} 1.0' in lines
        assert any(line.startswith('scd_transport_info{lane="ucx') for line in lines)
        stored = next(float(line.split()[1]) for line in lines if line.startswith("scd_code_store_bytes "))
        assert stored > 0


def test_an_unmodified_openai_client_chats_and_streams(paper: tuple[TinyPair, dict[str, Child]]) -> None:
    pair, children = paper
    client = OpenAI(base_url=f"{children['router'].url}/v1", api_key="unused", max_retries=0)
    messages: Any = [{"role": "user", "content": text_of(101, 120)}]
    whole = client.chat.completions.create(model=pair.config.name, messages=messages, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model=pair.config.name,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    last = chunks[-1].usage
    assert last is not None
    assert last.model_extra is not None
    assert last.model_extra["scd"]["matched_tokens"] > 0


def test_codes_are_in_flight_while_prefill_still_computes(paper: tuple[TinyPair, dict[str, Child]]) -> None:
    pair, children = paper
    # where the decode process gets no CPU, codes land late now and then; were they held back, they would always
    attempts = [_groups_landed_early(pair, children, seed) for seed in (102, 105, 106)]
    assert {0, 1, 2} in attempts, "codes of every layer landed before the last ones were encoded"


def _groups_landed_early(pair: TinyPair, children: dict[str, Child], seed: int) -> set[int]:
    """Groups of which a part had landed when the last codes of a prompt were encoded."""
    answer = complete(children["router"].url, text_of(seed, 600), model=pair.config.name)
    transfer_id = answer["usage"]["scd"]["transfer_id"]
    sent = asyncio.run(_trace(pair, "prefill", transfer_id))
    landed = asyncio.run(_trace(pair, "decode", transfer_id))
    encoded = [event for event in sent if event.name == "encoded"]
    assert {event.group for event in encoded} == {0, 1, 2}
    last_encoded = max(event.time_s for event in encoded)
    return {event.group for event in landed if event.name == "landed" and event.time_s < last_encoded}


def test_killed_prefill_costs_no_answer(tmp_path: Path) -> None:
    # exact codes: whatever had landed before the kill may be used, and must not change the text
    pair = write_pair(tmp_path, policy="exact", same_model=True, engine={"max_num_tokens": 8})
    with served(pair) as children:
        prompt = text_of(103, 800)
        own = complete(children["decode"].url, prompt, model=pair.config.name, cache_salt="own")
        answers: list[dict[str, Any]] = []
        asking = threading.Thread(
            target=lambda: answers.append(complete(children["router"].url, prompt, model=pair.config.name))
        )
        asking.start()
        asyncio.run(_first_landing(pair))
        os.kill(children["prefill"].process.pid, signal.SIGKILL)
        asking.join(60)
        assert answers[0]["choices"][0]["text"] == own["choices"][0]["text"]
        assert answers[0]["usage"]["scd"]["fallback"] in {"prefill_died", "prefill_unreachable", "producer_gone"}
        began_s = time.monotonic()
        following = complete(children["router"].url, text_of(104, 60), model=pair.config.name)
        assert time.monotonic() - began_s < 2.0, "a dead prefill worker must not hold up the next request"
        assert following["usage"]["scd"]["fallback"] is not None
        assert httpx.get(f"{children['router'].url}/health").json()["status"] == "degraded"


async def _trace(pair: TinyPair, role: str, transfer_id: str) -> list[TraceEvent]:
    client = _control(pair, role)
    try:
        return await client.trace(transfer_id)
    finally:
        await client.close()


async def _first_landing(pair: TinyPair) -> None:
    """Return once codes of the transfer in progress have landed."""
    client = _control(pair, "decode")

    async def landed() -> None:
        while not (await client.status()).counters.get("landed", 0):
            await asyncio.sleep(0.002)

    try:
        await asyncio.wait_for(landed(), 30)
    finally:
        await client.close()


def _control(pair: TinyPair, role: str) -> ControlClient:
    worker = getattr(pair.config.servers, role)
    return ControlClient(f"{worker.host}:{worker.control_port}", pair.config.control)
