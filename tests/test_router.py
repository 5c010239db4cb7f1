"""The router between real HTTP workers, with the real control channel and transfer: codes arrive, or the reason is told.

The engines are scripted; the prefill one pushes codes when it runs a prompt, the decode one reports what has landed, as
the connectors do. Everything else is what ships.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_servers import WAIT_S, free_port, serve
from routed_workers import (
    ANSWER,
    NAME,
    TERMS,
    TOKENS_PER_BLOCK,
    Group,
    ask,
    chat,
    completion,
    events,
    group_of_two,
    prompt,
    raw_server,
)
from tiny_models import save_tiny_tokenizer

from scd_trt.config import PairConfig
from scd_trt.models import load_tokenizer
from scd_trt.serving.api import create_app
from scd_trt.serving.handover import REASONS, CodeTerms
from scd_trt.serving.metrics import ServerMetrics


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group_of_two(load_tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))) as group:
        yield group


@pytest.fixture
def group(workers: Group) -> Group:
    """The workers, well and unused."""
    workers.prefill.reset()
    workers.decode.reset()
    return workers


# ---- codes arrive ---------------------------------------------------------------------------------------------------


def test_codes_cross_and_usage_tells_what_they_cost(group: Group) -> None:
    text = prompt()
    num_tokens = len(group.tokenizer.encode(text))
    num_sent = (num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    with group.router() as (client, metrics):
        usage = ask(client, completion(text))["usage"]
    scd = usage["scd"]
    stages = scd.pop("ms")
    assert scd.pop("transfer_id")
    assert scd == {
        "decision": "send",
        "decision_reason": "unmeasured",
        "decision_inputs": {
            "sent_tokens": num_sent,
            "sent_bytes": num_sent * 11,
            "stored_tokens": 0,
            "prefill_cached_tokens": 0,
            "link_bytes_per_s": None,
            "prefill_tokens_per_s": None,
            "local_tokens_per_s": None,
            "reconstruct_s_per_token": None,
            "send_s": None,
            "local_s": None,
            "local_source": None,
        },
        "fallback": None,
        "prompt_tokens": num_tokens,
        "matched_tokens": num_sent,
        "stored_blocks": 0,
        "guarded_blocks": 0,
        "bytes_sent": num_sent * 11,
        "dense_bytes": num_sent * 44,
        "ratio": 4.0,
    }
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_sent
    assert set(stages) == {"expect", "prefill", "encode", "transfer", "wait", "decode_codes", "first_token"}
    assert (stages["encode"], stages["decode_codes"]) == (2.5, 1.5)
    assert 0 < stages["prefill"] < stages["first_token"]
    exposed = metrics.render()[0].decode()
    assert 'scd_transfers_total{outcome="landed"} 1.0' in exposed
    assert f'scd_kv_bytes_total{{kind="sent"}} {num_sent * 11:.1f}' in exposed
    assert "scd_compression_ratio 4.0" in exposed
    assert "scd_inflight_transfers 0.0" in exposed
    assert 'scd_transport_info{lane="loopback"} 1.0' in exposed


def test_both_workers_get_the_same_tokens(group: Group) -> None:
    with group.router() as (client, _):
        response = client.post("/v1/chat/completions", json=chat(prompt(), cache_salt="tenant", max_tokens=20))
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    assert response.json()["usage"]["scd"]["fallback"] is None
    (prefill_prompt, sampling, prefill_salt), (decode_prompt, _, decode_salt) = (
        group.prefill.submitted[0],
        group.decode.submitted[0],
    )
    assert prefill_prompt == decode_prompt
    assert (prefill_salt, decode_salt, sampling.max_tokens) == ("tenant", "tenant", 1)


def test_a_prefix_in_the_store_is_not_sent_again(group: Group) -> None:
    body = completion(prompt())
    with group.router() as (client, metrics):
        first, second = (ask(client, body)["usage"]["scd"] for _ in range(2))
    assert (first["decision"], second["decision"]) == ("send", "stored")
    assert (second["bytes_sent"], second["stored_blocks"]) == (0, first["matched_tokens"] // TOKENS_PER_BLOCK)
    assert second["matched_tokens"] == first["matched_tokens"]
    assert len(group.prefill.submitted) == 1
    assert 'scd_transfers_total{outcome="stored"} 1.0' in metrics.render()[0].decode()


def test_another_salt_does_not_share_codes(group: Group) -> None:
    text = prompt()
    with group.router() as (client, _):
        decisions = [ask(client, completion(text, cache_salt=salt))["usage"]["scd"]["decision"] for salt in ("a", "b")]
    assert decisions == ["send", "send"]


def test_stream_carries_the_account_in_its_usage_chunk(group: Group) -> None:
    body = completion(prompt(), stream=True, stream_options={"include_usage": True})
    with group.router() as (client, _):
        response = client.post("/v1/completions", json=body)
    *chunks, usage, done = events(response.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    assert done == "[DONE]"
    scd = usage["usage"]["scd"]
    assert (scd["fallback"], scd["decision"]) == (None, "send")
    assert scd["ms"]["first_token"] > 0
    assert response.headers["x-scd-transfer-id"] == scd["transfer_id"]


def test_stream_without_usage_passes_unchanged(group: Group) -> None:
    body = completion(prompt(), stream=True)
    with group.router() as (client, metrics):
        routed = client.post("/v1/completions", json=body)
        direct = httpx.post(f"http://127.0.0.1:{group.decode_served.port}/v1/completions", json=body)
    assert routed.headers["x-scd-transfer-id"]
    ids = [events(response.text)[0]["id"] for response in (routed, direct)]
    times = [f'"created":{events(response.text)[0]["created"]}' for response in (routed, direct)]
    assert routed.text == direct.text.replace(ids[1], ids[0]).replace(times[1], times[0])
    assert 'scd_transfers_total{outcome="landed"} 1.0' in metrics.render()[0].decode()


def test_stream_is_not_held_back(group: Group) -> None:
    group.decode.gate, group.decode.gate_at = threading.Event(), 1
    with (
        group.router() as (client, _),
        client.stream("POST", "/v1/completions", json=completion(prompt(), stream=True)) as response,
    ):
        parts = response.iter_text()
        assert '"text":"T"' in next(parts)  # while the rest of the answer does not exist yet
        group.decode.gate.set()
        assert "[DONE]" in "".join(parts)


def test_the_openai_client_works_through_the_router(group: Group) -> None:
    with group.router() as (client, _), openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as api:
        assert [model.id for model in api.models.list()] == [NAME]
        messages: Any = [{"role": "user", "content": prompt()}]
        whole = api.chat.completions.create(model=NAME, messages=messages, max_tokens=20)
        with api.chat.completions.create(model=NAME, messages=messages, max_tokens=20, stream=True) as stream:
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="n=2"):
            api.chat.completions.create(model=NAME, messages=messages, n=2)
    assert whole.choices[0].message.content == streamed == ANSWER
    assert whole.usage is not None
    assert whole.usage.model_extra is not None
    assert whole.usage.model_extra["scd"]["decision"] == "send"


# ---- codes do not arrive --------------------------------------------------------------------------------------------


def fallback(group: Group, config: PairConfig | None = None, *, terms: CodeTerms = TERMS) -> str:
    """Ask once, check that the answer is right, stream it too, and return the reason that both tell."""
    with group.router(config, terms=terms) as (client, metrics):
        whole = ask(client, completion(prompt()))["usage"]["scd"]
        body = chat(prompt(), stream=True, stream_options={"include_usage": True}, max_tokens=20)
        *chunks, usage, _ = events(client.post("/v1/chat/completions", json=body).text)
        exposed = metrics.render()[0].decode()
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
    reason: str = whole["fallback"]
    assert reason in REASONS
    assert usage["usage"]["scd"]["fallback"] == reason
    assert f'scd_fallback_total{{reason="{reason}"}} 2.0' in exposed
    assert "scd_inflight_transfers 0.0" in exposed
    return reason


def test_prefill_engine_fails(group: Group) -> None:
    group.prefill.fail_with, group.prefill.fail_at = MemoryError("no room"), 0
    group.prefill.pushes = False
    assert fallback(group) == "prefill_error"


def test_prefill_is_busy(group: Group) -> None:
    group.prefill.max_requests = 0
    assert fallback(group) == "prefill_busy"


def test_prefill_refuses_the_prompt(group: Group) -> None:
    group.prefill.max_prompt_tokens = 4
    assert fallback(group) == "prefill_refused"


def test_prefill_hangs(group: Group) -> None:
    group.prefill.gate, group.prefill.gate_at, group.prefill.pushes = threading.Event(), 0, False
    assert fallback(group, group.config(router={"prefill_timeout_s": 0.3})) == "prefill_timeout"
    assert group.prefill.cancelled.wait(WAIT_S)
    group.prefill.gate.set()


def test_prefill_does_not_listen(group: Group) -> None:
    assert fallback(group, group.config(prefill=free_port())) == "prefill_unreachable"


def test_prefill_dies_during_the_request(group: Group) -> None:
    with raw_server(None) as port:
        assert fallback(group, group.config(prefill=port)) == "prefill_died"


def test_prefill_answers_without_sending(group: Group) -> None:
    group.prefill.pushes = False
    assert fallback(group) == "landing_timeout"


def test_prefill_hangs_after_its_codes_have_landed(group: Group) -> None:
    group.prefill.gate, group.prefill.gate_at = threading.Event(), 0
    with group.router() as (client, _):
        assert ask(client, completion(prompt()))["usage"]["scd"]["fallback"] is None
    assert group.prefill.cancelled.wait(WAIT_S)
    group.prefill.gate.set()


def test_decode_cannot_reach_the_producer(group: Group) -> None:
    assert fallback(group, group.config(prefill_control=free_port())) == "producer_unreachable"
    assert group.prefill.submitted == []


def test_control_channel_of_decode_is_dead(group: Group) -> None:
    assert fallback(group, group.config(decode_control=free_port())) == "control_unreachable"


def test_translator_differs(group: Group) -> None:
    assert fallback(group, terms=CodeTerms("e" * 32, 11, 44)) == "fingerprint_mismatch"
    assert group.prefill.submitted == []


def test_short_and_several_prompts_are_left_to_decode(group: Group) -> None:
    with group.router() as (client, _):
        short = ask(client, completion("Hi"))["usage"]["scd"]
        several = ask(client, completion("", prompt=[prompt(), prompt()]))["usage"]["scd"]
    assert (short["decision"], short["fallback"]) == ("local", "too_short")
    assert (several["decision"], several["fallback"]) == ("local", "several_prompts")
    assert group.prefill.submitted == []


def test_codes_that_the_engine_does_not_take_are_told(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = group.decode.consumer
    assert consumer is not None
    monkeypatch.setattr(consumer, "match", lambda keys: 0)
    with group.router() as (client, _):
        assert ask(client, completion(prompt()))["usage"]["scd"]["fallback"] == "not_matched"


def test_a_prefill_that_failed_is_left_alone_for_a_while(group: Group) -> None:
    with group.router(group.config(prefill=free_port(), router={"decision": {"prefill_retry_s": 60.0}})) as (client, _):
        reasons = [ask(client, completion(prompt()))["usage"]["scd"]["fallback"] for _ in range(2)]
    assert reasons == ["prefill_unreachable", "prefill_down"]


def test_transfers_that_nobody_waits_for_are_ended(group: Group) -> None:
    group.prefill.pushes = False
    consumer = group.decode.consumer
    assert consumer is not None
    before = consumer.statistics().get("failed_aborted", 0)
    with group.router() as (client, _):
        ask(client, completion(prompt()))
    assert consumer.statistics()["failed_aborted"] == before + 1  # leaving the router waits for it


# ---- decode fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_decode_does_not_listen(group: Group, stream: bool) -> None:
    with group.router(group.config(decode=free_port())) as (client, _):
        response = client.post("/v1/completions", json=completion(prompt(), stream=stream))
        health = client.get("/health")
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "decode_unavailable"
    assert response.headers["x-scd-transfer-id"]
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")


@pytest.mark.parametrize("stream", [False, True])
def test_decode_refusals_pass_unchanged(group: Group, stream: bool) -> None:
    group.decode.max_requests = 0
    with group.router() as (client, _):
        busy = client.post("/v1/completions", json=completion(prompt(), stream=stream))
        group.decode.max_requests, group.decode.max_prompt_tokens = 1 << 30, 4
        too_long = client.post("/v1/completions", json=completion(prompt(), stream=stream))
    assert (busy.status_code, busy.headers["retry-after"], busy.json()["error"]["code"]) == (503, "1", "engine_busy")
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert busy.headers["x-scd-transfer-id"]


def test_decode_is_silent(group: Group) -> None:
    group.decode.gate, group.decode.gate_at = threading.Event(), 0
    with group.router(group.config(router={"request_timeout_s": 2.0})) as (client, _):
        response = client.post("/v1/completions", json=completion(prompt()))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "decode_unavailable")
    assert group.decode.cancelled.wait(WAIT_S)
    group.decode.gate.set()


def test_decode_dies_within_a_stream(group: Group) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    with raw_server(head + b"a\r\ndata: {}\n\n\r\n") as port, group.router(group.config(decode=port)) as (client, _):
        response = client.post("/v1/completions", json=completion(prompt(), stream=True))
    first, error = events(response.text)
    assert first == {}
    assert error["error"]["code"] == "decode_unavailable"


@pytest.mark.parametrize("body", [b"nonsense", b"{}", b"[]"])
def test_decode_answers_nonsense(group: Group, body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with raw_server(head + body) as port, group.router(group.config(decode=port)) as (client, _):
        response = client.post("/v1/completions", json=completion(prompt()))
    assert (response.status_code, response.json()["error"]["code"]) == (502, "decode_unavailable")


# ---- clients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_client_that_leaves_cancels_the_worker_that_works_for_it(group: Group, stage: str, stream: bool) -> None:
    engine = group.prefill if stage == "prefill" else group.decode
    engine.gate, engine.gate_at, group.prefill.pushes = threading.Event(), 0, stage == "decode"
    with group.router() as (client, metrics):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=completion(prompt(), stream=stream), timeout=0.5)
        assert engine.cancelled.wait(WAIT_S)
        engine.gate.set()
    assert 'scd_requests_total{endpoint="completions",status="499"} 1.0' in metrics.render()[0].decode()
    assert "scd_inflight_transfers 0.0" in metrics.render()[0].decode()
    assert (stage == "decode") == bool(group.decode.submitted)


def test_client_that_leaves_within_a_stream_cancels_decode(group: Group) -> None:
    group.decode.gate, group.decode.gate_at = threading.Event(), 2
    with group.router() as (client, _):
        with client.stream("POST", "/v1/completions", json=completion(prompt(), stream=True)) as response:
            assert next(response.iter_bytes())
        assert group.decode.cancelled.wait(WAIT_S)
        group.decode.gate.set()


@pytest.mark.parametrize("given", ["a trace", "nothing", "nonsense"])
def test_every_hop_gets_a_span_of_the_clients_trace(group: Group, given: str) -> None:
    seen: list[dict[str, str]] = []

    async def recording(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await apps[scope["server"][1]](scope, receive, send)

    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    trace = {"a trace": f"00-{trace_id}-{span_id}-01", "nothing": None, "nonsense": f"00-{trace_id}-{'0' * 16}-01"}[
        given
    ]
    apps: dict[int, Any] = {}
    with serve(recording) as prefill_url, serve(recording) as decode_url:
        ports = {name: int(url.rsplit(":", 1)[1]) for name, url in (("prefill", prefill_url), ("decode", decode_url))}
        apps[ports["prefill"]] = create_app(group.prefill, model_id=NAME, metrics=ServerMetrics())
        apps[ports["decode"]] = create_app(group.decode, model_id=NAME, metrics=ServerMetrics())
        with group.router(group.config(**ports)) as (client, _):
            headers = {"authorization": "Bearer secret", "tracestate": "vendor=1"}
            headers |= {"traceparent": trace} if trace else {}
            response = client.post("/v1/completions", json=completion(prompt()), headers=headers)
    spans = [headers["traceparent"].split("-") for headers in seen]
    assert len(spans) == 2
    assert len({trace_id, *(span[1] for span in spans)}) == (1 if given == "a trace" else 2)
    assert len({span_id, *(span[2] for span in spans)}) == 3
    assert {span[3] for span in spans} == {"01" if given == "a trace" else "00"}
    for headers in seen:
        assert headers["x-scd-transfer-id"] == response.headers["x-scd-transfer-id"]
        assert headers.get("tracestate") == ("vendor=1" if given == "a trace" else None)
        assert "authorization" not in headers


def test_refusals_need_no_worker(group: Group) -> None:
    config = group.config(decode=free_port(), router={"max_request_bytes": 300})
    with group.router(config) as (client, _):
        large = client.post("/v1/completions", json=completion("x" * 400))
        unknown = client.post("/v1/completions", json=completion("x", model="other"))
        tools = client.post("/v1/chat/completions", json=chat("x", tools=[{}]))
    assert [response.status_code for response in (large, unknown, tools)] == [413, 404, 400]
    assert tools.json()["error"]["param"] == "tools"


def test_health_needs_decode_only(group: Group) -> None:
    with group.router() as (client, _):
        assert client.get("/health").json() == {"status": "ok", "decode": True, "prefill": True}
    with group.router(group.config(prefill=free_port())) as (client, _):
        response = client.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/metrics"])
def test_information(group: Group, path: str) -> None:
    with group.router() as (client, _):
        assert client.get(path).status_code == 200
