"""Several workers of a role, several pairs: who is asked, who is tried next, what is known of it afterwards."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from live_servers import WAIT_S, free_port, serve
from routed_workers import (
    ANSWER,
    TERMS,
    TOKENS_PER_BLOCK,
    Served,
    ask,
    completion,
    decode_worker,
    events,
    pair_config,
    prefill_worker,
    prompt,
    raw_server,
    routed,
)
from tiny_models import save_tiny_tokenizer

from scd_trt.models import load_tokenizer
from scd_trt.serving.api import create_app
from scd_trt.serving.handover import CodeTerms
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.router import create_router
from scd_trt.serving.routes import Route, RouteError

TAIL = "x" * TOKENS_PER_BLOCK
OTHER_TERMS = CodeTerms("e" * 32, 11, 44)


class Fleet:
    """Two workers of each role."""

    def __init__(self, tokenizer: Any, prefill: list[Served], decode: list[Served]) -> None:
        self.tokenizer = tokenizer
        self.prefill = prefill
        self.decode = decode

    @contextmanager
    def router(
        self,
        *,
        prefill: list[Served] | None = None,
        decode: list[Served] | None = None,
        speed: float | None = None,
        **settings: Any,
    ) -> Iterator[tuple[httpx.Client, ServerMetrics]]:
        config = pair_config(prefill or self.prefill[:1], decode or self.decode, router=settings)
        with routed(Route(config, TERMS, self.tokenizer, speed)) as found:
            yield found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def workers(tokenizer: Any) -> Iterator[Fleet]:
    with ExitStack() as stack:
        prefill = [stack.enter_context(prefill_worker(tokenizer)) for _ in range(2)]
        decode = [stack.enter_context(decode_worker(tokenizer)) for _ in range(2)]
        yield Fleet(tokenizer, prefill, decode)


@pytest.fixture
def fleet(workers: Fleet) -> Fleet:
    """The workers, well and unused."""
    for served in workers.prefill + workers.decode:
        served.engine.reset()
    return workers


def scd_of(client: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    usage: dict[str, Any] = ask(client, completion(text, **fields))["usage"]["scd"]
    return usage


def counts(workers: list[Served]) -> list[int]:
    return [len(served.engine.submitted) for served in workers]


def at(port: int) -> Served:
    """A worker whose endpoint listens elsewhere; its control channel is dead."""
    return Served(None, port, free_port())


def shown(metrics: ServerMetrics) -> str:
    return metrics.render()[0].decode()


def until(what: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    """Wait for something that tells nobody when it happens."""
    limit_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < limit_s, "it did not happen in time"
        time.sleep(0.01)


# ---- who is asked ---------------------------------------------------------------------------------------------------


def test_round_robin_alternates(fleet: Fleet) -> None:
    with fleet.router(prefill=fleet.prefill, policy="round_robin") as (client, _):
        for _ in range(4):
            assert scd_of(client, prompt())["fallback"] is None
    assert counts(fleet.decode) == counts(fleet.prefill) == [2, 2]


def test_least_loaded_avoids_the_worker_that_is_busy(fleet: Fleet) -> None:
    with fleet.router(policy="least_loaded") as (client, _):
        busy = fleet.decode[0].engine
        busy.gate, busy.gate_at = threading.Event(), 1
        with client.stream("POST", "/v1/completions", json=completion(prompt(), stream=True)) as response:
            parts = response.iter_bytes()  # kept: an iterator that is dropped closes the connection
            assert next(parts)
            for _ in range(3):
                scd_of(client, prompt())
            busy.gate.set()
    assert counts(fleet.decode) == [1, 3]


def test_prefix_affinity_keeps_a_prompt_where_it_was(fleet: Fleet) -> None:
    texts = [prompt(), prompt()]
    with fleet.router(policy="prefix_affinity") as (client, _):
        first = [scd_of(client, text) for text in texts]
        again = [scd_of(client, text + TAIL) for text in texts + texts]
    assert counts(fleet.decode) == [3, 3]
    assert [scd["decision"] for scd in first] == ["send", "send"]
    # every block but the new last one is there
    assert {scd["stored_blocks"] for scd in again[:2]} == {first[0]["matched_tokens"] // TOKENS_PER_BLOCK}
    assert {scd["decision"] for scd in again[2:]} == {"stored"}


def test_only_what_is_not_there_is_sent(fleet: Fleet) -> None:
    text = prompt()
    with fleet.router(decode=fleet.decode[:1]) as (client, _):
        first, more = scd_of(client, text), scd_of(client, text + TAIL)
    assert more["stored_blocks"] * TOKENS_PER_BLOCK == first["matched_tokens"]
    assert more["bytes_sent"] == TOKENS_PER_BLOCK * 11
    assert more["decision_inputs"]["sent_bytes"] == TOKENS_PER_BLOCK * 11
    assert more["matched_tokens"] == first["matched_tokens"] + TOKENS_PER_BLOCK


# ---- conditional disaggregation -------------------------------------------------------------------------------------


def test_short_and_mostly_cached_prompts_go_to_decode_only(fleet: Fleet) -> None:
    text, consumer = prompt(), fleet.decode[0].engine.consumer
    expected = consumer.statistics().get("expected", 0)
    with fleet.router(decode=fleet.decode[:1], decision={"max_local_prefill_tokens": 16}) as (client, metrics):
        short, first = scd_of(client, "a prompt of few"), scd_of(client, text)
        asked = counts(fleet.prefill[:1])
        more = scd_of(client, text + TAIL)
    assert (short["decision"], short["decision_reason"], short["fallback"]) == ("local", "too_short", "too_short")
    assert (first["decision"], first["fallback"]) == ("send", None)
    assert (more["decision"], more["decision_reason"], more["fallback"]) == ("stored", "mostly_stored", None)
    assert more["bytes_sent"] == 0
    assert asked == counts(fleet.prefill[:1]) == [1]
    assert consumer.statistics()["expected"] == expected + 1  # decode was asked to make room once
    assert 'scd_decisions_total{choice="stored",reason="mostly_stored"} 1.0' in shown(metrics)


def test_a_guess_that_proves_wrong_is_not_made_twice(fleet: Fleet) -> None:
    text = prompt()
    decode = fleet.decode[0].engine
    # what the first, wrong guess measures of this machine must not decide the second
    decision = {"max_local_prefill_tokens": 16, "max_ratio": 1e9}
    with fleet.router(decode=fleet.decode[:1], decision=decision) as (client, _):
        assert scd_of(client, text)["decision"] == "send"
        store = decode.consumer.store
        store.put(b"other" + b"\0" * 11, bytes(store.config.capacity_bytes))  # everything else leaves for it
        first, second = (scd_of(client, text + TAIL) for _ in range(2))
    # whoever prefills by itself says why, also where the router was wrong
    assert (first["decision"], first["decision_reason"], first["fallback"]) == (
        "stored",
        "mostly_stored",
        "not_matched",
    )
    assert (second["decision"], second["fallback"]) == ("send", None)


# ---- workers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_worker_that_breaks_off_before_the_first_byte_is_replaced(fleet: Fleet, stream: bool) -> None:
    with (
        raw_server(None) as port,
        fleet.router(decode=[at(port), fleet.decode[1]], policy="round_robin") as (client, metrics),
    ):
        response = client.post("/v1/completions", json=completion(prompt(), stream=stream))
    assert response.status_code == 200
    text = (
        "".join(chunk["choices"][0]["text"] for chunk in events(response.text)[:-1])
        if stream
        else response.json()["choices"][0]["text"]
    )
    assert text == ANSWER
    assert counts(fleet.decode) == [0, 1]
    assert 'scd_retries_total{role="decode"} 1.0' in shown(metrics)
    if not stream:
        # the second try brought the codes to the worker that answered
        assert response.json()["usage"]["scd"]["fallback"] is None
        assert response.headers["x-scd-transfer-id"] == response.json()["usage"]["scd"]["transfer_id"]


def test_nothing_is_tried_again_once_the_client_has_a_byte(fleet: Fleet) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    with (
        raw_server(head + b"a\r\ndata: {}\n\n\r\n") as port,
        fleet.router(decode=[at(port), fleet.decode[1]], policy="round_robin") as (client, metrics),
    ):
        response = client.post("/v1/completions", json=completion(prompt(), stream=True))
    first, error = events(response.text)
    assert (first, error["error"]["code"]) == ({}, "decode_unavailable")
    assert counts(fleet.decode) == [0, 0]
    assert 'scd_retries_total{role="decode"} 1.0' not in shown(metrics)


def test_a_busy_decode_worker_is_replaced_and_two_are_told(fleet: Fleet) -> None:
    fleet.decode[0].engine.max_requests = 0
    with fleet.router(policy="round_robin") as (client, _):
        scd_of(client, prompt())
        fleet.decode[1].engine.max_requests = 0
        response = client.post("/v1/completions", json=completion(prompt()))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "engine_busy"


def test_a_request_that_is_wrong_is_tried_once(fleet: Fleet) -> None:
    for served in fleet.decode:
        served.engine.max_prompt_tokens = 4
    with fleet.router() as (client, metrics):
        response = client.post("/v1/completions", json=completion(prompt()))
    assert response.status_code == 400
    assert "scd_retries_total{" not in shown(metrics)


def test_no_retries_where_none_are_wanted(fleet: Fleet) -> None:
    with (
        raw_server(None) as port,
        fleet.router(decode=[at(port), fleet.decode[1]], policy="round_robin", max_retries=0) as (client, _),
    ):
        assert client.post("/v1/completions", json=completion(prompt())).status_code == 502
    assert counts(fleet.decode) == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_one_deadline_for_all_tries(fleet: Fleet, stream: bool) -> None:
    for served in fleet.decode:
        served.engine.gate, served.engine.gate_at = threading.Event(), 0
    with fleet.router(request_timeout_s=1.5, max_retries=5) as (client, _):
        begin_s = time.monotonic()
        response = client.post("/v1/completions", json=completion(prompt(), stream=stream))
        taken_s = time.monotonic() - begin_s
        assert any(served.engine.cancelled.wait(WAIT_S) for served in fleet.decode)
        for served in fleet.decode:
            served.engine.gate.set()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "decode_unavailable")
    # two deadlines would take 3 s; the rest is for a busy machine
    assert 1.5 <= taken_s < 2.9


@contextmanager
def dribble(head: bytes) -> Iterator[int]:
    """A decode worker that is never silent and never done."""

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            try:
                connection.sendall(head)
                while not over.wait(0.05):
                    connection.sendall(b"1\r\n \r\n")
            except OSError:
                pass  # the router has closed the connection

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        over.set()
        thread.join(WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_holds_for_a_worker_that_dribbles(fleet: Fleet, stream: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    with dribble(head) as port, fleet.router(decode=[at(port)], request_timeout_s=0.6) as (client, _):
        response = client.post("/v1/completions", json=completion("short", stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "decode_unavailable")


def test_a_prefill_worker_that_is_down_is_replaced(fleet: Fleet) -> None:
    down = Served(None, free_port(), fleet.prefill[0].control_port)
    with fleet.router(prefill=[down, fleet.prefill[1]], policy="round_robin") as (client, metrics):
        scd = scd_of(client, prompt())
    assert (scd["decision"], scd["fallback"]) == ("send", None)
    assert counts(fleet.prefill) == [0, 1]
    assert 'scd_retries_total{role="prefill"} 1.0' in shown(metrics)
    assert "scd_inflight_transfers 0.0" in shown(metrics)


def test_when_all_prefill_workers_are_busy_decode_prefills(fleet: Fleet) -> None:
    for served in fleet.prefill:
        served.engine.max_requests = 0
    with fleet.router(prefill=fleet.prefill) as (client, metrics):
        assert scd_of(client, prompt())["fallback"] == "prefill_busy"
    assert 'scd_fallback_total{reason="prefill_busy"} 1.0' in shown(metrics)


def test_a_decode_worker_leaves_rotation_and_comes_back(fleet: Fleet) -> None:
    engine = fleet.decode[0].engine
    app = create_app(engine, model_id="pair", metrics=ServerMetrics())
    port = free_port()
    first = Served(engine, port, fleet.decode[0].control_port)
    with fleet.router(decode=[first, fleet.decode[1]], policy="round_robin", health_interval_s=0.05) as (client, _):

        def num_up() -> int:
            number: int = client.get("/ready").json()["workers"]["pair"]["decode"]
            return number

        until(lambda: num_up() == 1)
        for _ in range(3):
            assert scd_of(client, prompt())["fallback"] is None
        assert counts(fleet.decode) == [0, 3]
        with serve(app, port):
            until(lambda: num_up() == 2)
            for _ in range(2):
                assert scd_of(client, prompt())["fallback"] is None
            assert counts(fleet.decode) == [1, 4]
        until(lambda: num_up() == 1)


def test_health_and_readiness_per_role(fleet: Fleet) -> None:
    nobody = at(free_port())
    with fleet.router(prefill=[nobody, fleet.prefill[0]], decode=[nobody, fleet.decode[0]]) as (client, metrics):
        assert client.get("/health").json() == {"status": "ok", "decode": True, "prefill": True}
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()["workers"]) == (200, {"pair": {"decode": 1, "prefill": 1}})
        assert 'scd_workers{role="decode",state="up"} 1.0' in shown(metrics)
        assert 'scd_workers{role="decode",state="down"} 1.0' in shown(metrics)
    with fleet.router(prefill=[nobody]) as (client, _):
        assert (client.get("/health").status_code, client.get("/health").json()["status"]) == (200, "degraded")
        assert client.get("/ready").status_code == 503  # it can answer, but no codes can come
    with fleet.router(decode=[nobody]) as (client, _):
        assert client.get("/health").status_code == 503
        assert client.get("/ready").json()["ready"] is False


# ---- decisions are made on what was measured, and told --------------------------------------------------------------


def test_measured_rates_are_told_in_usage_and_metrics(fleet: Fleet) -> None:
    with fleet.router(decode=fleet.decode[:1]) as (client, metrics):
        first, second = scd_of(client, prompt()), scd_of(client, prompt())
    assert first["decision_reason"] == "unmeasured"
    inputs = second["decision_inputs"]
    assert inputs["link_bytes_per_s"] > 0
    assert inputs["prefill_tokens_per_s"] > 0
    assert inputs["reconstruct_s_per_token"] == pytest.approx(1.5e-3 / first["matched_tokens"], rel=1e-3)
    assert inputs["send_s"] is not None
    # the consumer has not prefilled: its speed is not the producer's
    assert (inputs["local_tokens_per_s"], inputs["local_source"], inputs["local_s"]) == (None, None, None)
    assert second["decision_reason"] == "unmeasured"
    exposed = shown(metrics)
    assert 'scd_decisions_total{choice="send",reason="unmeasured"} 2.0' in exposed
    assert 'scd_measured_rate{rate="link_bytes_per_s"}' in exposed
    assert 'scd_measured_rate{rate="local_tokens_per_s"}' not in exposed


def test_equal_shapes_let_the_producers_speed_stand(fleet: Fleet) -> None:
    with fleet.router(decode=fleet.decode[:1], speed=1.0) as (client, _):
        scd_of(client, prompt())
        inputs = scd_of(client, prompt())["decision_inputs"]
    assert (inputs["local_tokens_per_s"], inputs["local_source"]) == (None, "assumed")
    assert inputs["local_s"] > 0


def test_a_fallback_measures_the_consumer(fleet: Fleet) -> None:
    prefill = fleet.prefill[0].engine
    with fleet.router(decode=fleet.decode[:1]) as (client, metrics):
        prefill.max_requests = 0
        assert scd_of(client, prompt())["fallback"] == "prefill_busy"
        prefill.max_requests = 1 << 30
        inputs = scd_of(client, prompt())["decision_inputs"]
    assert inputs["local_tokens_per_s"] > 0
    assert 'scd_measured_rate{rate="local_tokens_per_s"}' in shown(metrics)


def test_a_link_that_is_too_slow_is_not_used_and_the_reason_is_told(fleet: Fleet) -> None:
    # a local prefill may cost nothing at all: everything that was measured is dearer
    with fleet.router(decode=fleet.decode[:1], speed=1.0, decision={"max_ratio": 1e-9}) as (client, metrics):
        scd_of(client, prompt())
        second = scd_of(client, prompt())
    assert (second["decision"], second["fallback"]) == ("local", "too_costly")
    assert second["decision_inputs"]["send_s"] > 0
    assert counts(fleet.prefill[:1]) == [1]
    assert 'scd_decisions_total{choice="local",reason="too_costly"} 1.0' in shown(metrics)
    assert 'scd_estimated_seconds_count{way="send"} 1.0' in shown(metrics)


# ---- several pairs --------------------------------------------------------------------------------------------------


def test_the_model_chooses_the_pair(fleet: Fleet) -> None:
    with ExitStack() as stack:
        prefill = stack.enter_context(prefill_worker(fleet.tokenizer, name="coder", terms=OTHER_TERMS))
        decode = stack.enter_context(decode_worker(fleet.tokenizer, name="coder", terms=OTHER_TERMS))
        routes = [
            Route(pair_config(fleet.prefill[:1], fleet.decode[:1]), TERMS, fleet.tokenizer),
            Route(pair_config([prefill], [decode], name="coder"), OTHER_TERMS, fleet.tokenizer),
        ]
        client, metrics = stack.enter_context(routed(*routes))
        text = prompt()
        chat_scd, coder_scd = scd_of(client, text), scd_of(client, text, model="coder")
        assert (chat_scd["fallback"], coder_scd["fallback"]) == (None, None)
        assert coder_scd["bytes_sent"] > 0  # codes of one pair are none of the other's
        assert counts([fleet.prefill[0], fleet.decode[0], prefill, decode]) == [1, 1, 1, 1]
        unknown = client.post("/v1/completions", json=completion(text, model="coder2"))
        assert unknown.status_code == 404
        assert "this server has 'pair', 'coder'" in unknown.json()["error"]["message"]
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["pair", "coder"]
        assert client.get("/v1/models/coder").json()["id"] == "coder"
        assert client.get("/v1/models/other").status_code == 404
        assert set(client.get("/ready").json()["workers"]) == {"pair", "coder"}
        for terms in (TERMS, OTHER_TERMS):
            assert f'scd_translator_info{{fingerprint="{terms.fingerprint}"}} 1.0' in shown(metrics)


def test_two_pairs_of_one_name_are_refused(fleet: Fleet) -> None:
    route = Route(pair_config(fleet.prefill, fleet.decode), TERMS, fleet.tokenizer)
    with pytest.raises(RouteError, match="'pair'"):
        create_router([route, route], metrics=ServerMetrics())


# ---- back-pressure --------------------------------------------------------------------------------------------------


@contextmanager
def endless_stream() -> Iterator[tuple[int, threading.Event, list[int]]]:
    """A decode worker that writes events for ever; tells when its socket has taken nothing for half a second."""
    stuck, written = threading.Event(), [0]
    event = b"data: " + b"x" * 4000 + b"\n\n"
    chunk = b"%x\r\n%s\r\n" % (len(event), event)

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            connection.settimeout(0.5)
            try:
                while written[0] < 1 << 28:
                    connection.sendall(chunk)
                    written[0] += len(chunk)
            except TimeoutError:
                stuck.set()
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1]), stuck, written
        thread.join(WAIT_S)


def test_a_slow_client_slows_the_worker_down(fleet: Fleet) -> None:
    with endless_stream() as (port, stuck, written), fleet.router(decode=[at(port)]) as (client, _):
        with client.stream("POST", "/v1/completions", json=completion("short", stream=True)) as response:
            parts = response.iter_raw(1)
            assert next(parts)
            assert stuck.wait(30), f"the worker could write {written[0]} bytes that nobody read"
        # what the sockets of two hops hold, some MB each at most; a router that reads ahead would take all 256 MB
        assert written[0] < 1 << 25
