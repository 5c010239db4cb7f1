"""Prefill and decode workers for tests of the router: real HTTP servers, the real control channel and transfer, and engines
that say what a test wrote down. The prefill engine pushes codes when it runs a prompt, the decode engine reports what has
landed, as the connectors do.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from live_servers import WAIT_S, ScriptedEngine, serve

from scd_trt import kv_cache
from scd_trt.config import ControlConfig, PairConfig, StoreConfig, TransportConfig
from scd_trt.serving.api import create_app
from scd_trt.serving.generation import Generation
from scd_trt.serving.handover import REASONS, CodeTerms
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.router import create_router
from scd_trt.serving.routes import Route
from scd_trt.serving.sampling import SamplingParams
from scd_trt.transfer.session import Consumer, Producer, open_transport
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.wire import CodeLayout

NAME = "pair"
TOKENS_PER_BLOCK = 8
LAYOUT = CodeLayout(TOKENS_PER_BLOCK, (5, 6))
TERMS = CodeTerms(fingerprint="f" * 32, bytes_per_token=11, dense_bytes_per_token=44)
TRANSPORT = TransportConfig(backend="loopback", arena_bytes=1 << 20, send_buffer_bytes=1 << 20)
# patient: a busy machine can keep a thread waiting for a second
CONTROL = ControlConfig(heartbeat_s=0.5, peer_timeout_s=4.0)
ANSWER = "The answer."
numbers = itertools.count()


def sent_keys(prompt: Sequence[int], salt: str, *, fingerprint: str = TERMS.fingerprint) -> list[bytes]:
    scope = kv_cache.scope(fingerprint=fingerprint, salt=salt)
    keys = kv_cache.block_keys(prompt, tokens_per_block=TOKENS_PER_BLOCK, scope=scope)
    return keys[: kv_cache.num_sent_blocks(len(prompt), TOKENS_PER_BLOCK)]


@dataclass
class PrefillEngine(ScriptedEngine):
    """Pushes codes for every prompt that a grant waits for, unless `pushes` says no."""

    producer: Producer | None = None
    pushes: bool = True
    fingerprint: str = ""

    def reset(self) -> None:
        """Well and unused."""
        _reset(self, "A")
        self.pushes = True

    def submit(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, cache_salt: str = "") -> Generation:
        generation = super().submit(prompt_token_ids, sampling, cache_salt=cache_salt)
        assert self.producer is not None
        push = (
            self.producer.plan(sent_keys(prompt_token_ids, cache_salt, fingerprint=self.fingerprint))
            if self.pushes
            else None
        )
        if push is not None:
            rows = len(push.blocks) * TOKENS_PER_BLOCK
            for group, width in enumerate(LAYOUT.bytes_per_token):
                push.send(group, push.blocks.start, np.full((rows, width), 7, dtype=np.uint8))
            push.finish(encode_ms=2.5)
        return generation


@dataclass
class DecodeEngine(ScriptedEngine):
    """Reports the codes that have landed as matched."""

    consumer: Consumer | None = None
    fingerprint: str = ""

    def reset(self) -> None:
        """Well and unused."""
        _reset(self, ANSWER)

    def submit(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, cache_salt: str = "") -> Generation:
        generation = super().submit(prompt_token_ids, sampling, cache_salt=cache_salt)
        assert self.consumer is not None
        keys = sent_keys(prompt_token_ids, cache_salt, fingerprint=self.fingerprint)
        generation.cached_tokens = self.consumer.match(keys) * TOKENS_PER_BLOCK
        self.consumer.note(keys, matched_tokens=generation.cached_tokens, decode_ms=1.5)
        return generation


def _reset(engine: ScriptedEngine, text: str) -> None:
    engine.script = engine.tokenizer.encode(text, add_special_tokens=False)
    engine.fail_with = engine.fail_at = engine.gate = None
    engine.max_requests, engine.max_prompt_tokens = 1 << 30, 200
    engine.submitted.clear()
    engine.cancelled.clear()


@dataclass
class Served:
    """One worker that listens: its engine and its two ports."""

    engine: Any
    port: int
    control_port: int

    def as_config(self) -> dict[str, Any]:
        return {"port": self.port, "control_port": self.control_port}


@contextmanager
def prefill_worker(tokenizer: Any, *, name: str = NAME, terms: CodeTerms = TERMS, port: int = 0) -> Iterator[Served]:
    """A prefill worker of its own."""
    producer = Producer(open_transport(TRANSPORT), listen="127.0.0.1:0", **_session(terms))
    engine = PrefillEngine(tokenizer, producer=producer, fingerprint=terms.fingerprint)
    with _listening(engine, name, port, producer.address) as served:
        yield served
    producer.close()


@contextmanager
def decode_worker(tokenizer: Any, *, name: str = NAME, terms: CodeTerms = TERMS, port: int = 0) -> Iterator[Served]:
    """A decode worker of its own."""
    store = CodeStore(StoreConfig(capacity_bytes=1 << 20))
    consumer = Consumer(open_transport(TRANSPORT), listen="127.0.0.1:0", store=store, **_session(terms))
    engine = DecodeEngine(tokenizer, consumer=consumer, fingerprint=terms.fingerprint)
    with _listening(engine, name, port, consumer.address) as served:
        yield served
    consumer.close()


@contextmanager
def _listening(engine: Any, name: str, port: int, control: str) -> Iterator[Served]:
    engine.reset()
    with serve(create_app(engine, model_id=name, metrics=ServerMetrics()), port) as url:
        yield Served(engine, int(url.rsplit(":", 1)[1]), int(control.rsplit(":", 1)[1]))


def _session(terms: CodeTerms) -> dict[str, Any]:
    return {"config": TRANSPORT, "control": CONTROL, "fingerprint": terms.fingerprint, "layout": LAYOUT}


def pair_config(
    prefill: Sequence[Served], decode: Sequence[Served], *, name: str = NAME, router: dict[str, Any] | None = None
) -> PairConfig:
    """A pair with these workers. Health checks are rare and failed workers come back at once, unless `router` says so."""
    model, text = {"model": "unused"}, {"source": "unused"}
    settings: dict[str, Any] = {
        "landing_timeout_s": 0.3,
        "health_interval_s": 60.0,
        "prefill_workers": [each.as_config() for each in prefill],
        "decode_workers": [each.as_config() for each in decode],
    }
    settings |= router or {}
    settings["decision"] = {"prefill_retry_s": 1e-9} | settings.get("decision", {})
    return PairConfig.model_validate(
        {
            "name": name,
            "producer": model,
            "consumer": model,
            "calibration": text,
            "heldout": text,
            "engine": {"tokens_per_block": TOKENS_PER_BLOCK},
            "control": CONTROL.model_dump(),
            "servers": {"router": settings},
        }
    )


@contextmanager
def routed(*routes: Route) -> Iterator[tuple[httpx.Client, ServerMetrics]]:
    """A router of these pairs, and a client of it."""
    metrics = ServerMetrics(fallback_reasons=REASONS)
    with (
        serve(create_router(routes, metrics=metrics)) as url,
        httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client,
    ):
        yield client, metrics


@dataclass
class Group:
    """One worker of each role, and how to start a router in front of them."""

    tokenizer: Any
    prefill_served: Served
    decode_served: Served

    @property
    def prefill(self) -> PrefillEngine:
        engine: PrefillEngine = self.prefill_served.engine
        return engine

    @property
    def decode(self) -> DecodeEngine:
        engine: DecodeEngine = self.decode_served.engine
        return engine

    def config(self, *, router: dict[str, Any] | None = None, **ports: int) -> PairConfig:
        """The pair; `ports` (prefill, prefill_control, decode, decode_control) replace those of the workers."""
        prefill, decode = self.prefill_served, self.decode_served
        return pair_config(
            [Served(None, ports.get("prefill", prefill.port), ports.get("prefill_control", prefill.control_port))],
            [Served(None, ports.get("decode", decode.port), ports.get("decode_control", decode.control_port))],
            router=router,
        )

    @contextmanager
    def router(
        self, config: PairConfig | None = None, *, terms: CodeTerms = TERMS, speed: float | None = None
    ) -> Iterator[tuple[httpx.Client, ServerMetrics]]:
        with routed(Route(config or self.config(), terms, self.tokenizer, speed)) as found:
            yield found


@contextmanager
def group_of_two(tokenizer: Any) -> Iterator[Group]:
    """One prefill and one decode worker."""
    with ExitStack() as stack:
        prefill = stack.enter_context(prefill_worker(tokenizer))
        decode = stack.enter_context(decode_worker(tokenizer))
        yield Group(tokenizer, prefill, decode)


def prompt() -> str:
    """38 characters, so 38 tokens, or 39 with the beginning-of-text token; no other test has it."""
    return f"{next(numbers):06d} what is the answer to all?!"


def completion(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": text, "max_tokens": 20, "temperature": 0, **fields}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["choices"][0]["text"] == ANSWER
    assert response.headers["x-scd-transfer-id"] == answer["usage"]["scd"]["transfer_id"]
    return answer


def events(text: str) -> list[Any]:
    return [data if (data := part[6:]) == "[DONE]" else json.loads(data) for part in text.split("\n\n") if part]


@contextmanager
def raw_server(answer: bytes | None) -> Iterator[int]:
    """Reads something from every connection, then writes `answer` and closes, or resets the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    if answer is None:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    else:
                        connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
