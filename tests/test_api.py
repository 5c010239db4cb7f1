"""The OpenAI endpoints of a worker, over real HTTP: an unmodified `openai` client, exact bytes of streams, error bodies."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_servers import WAIT_S, ScriptedEngine, serve
from tiny_models import save_tiny_model, save_tiny_tokenizer

from scd_trt.config import EngineConfig
from scd_trt.models import load_model, load_tokenizer
from scd_trt.serving.api import create_app
from scd_trt.serving.choice_stream import ChoiceStream
from scd_trt.serving.cpu_engine import CpuEngine
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.openai_answer import Delta
from scd_trt.serving.openai_http import EventStream, first_event
from scd_trt.serving.sampling import SamplingParams
from scd_trt.serving.text_stream import TextStream

MODEL = "tiny"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[CpuEngine]:
    engine = CpuEngine(load_model(model_dir), EngineConfig(tokens_per_block=8, num_blocks=32))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(engine: CpuEngine) -> Iterator[str]:
    with serve(create_app(engine, model_id=MODEL, metrics=ServerMetrics())) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def refusing_url(tokenizer: Any) -> Iterator[str]:
    """A server for requests that never reach its engine."""
    with serve(create_app(scripted(tokenizer, "x"), model_id=MODEL, metrics=ServerMetrics())) as url:
        yield url


def scripted(tokenizer: Any, text: str, **fields: Any) -> ScriptedEngine:
    script = fields.pop("script", None) or tokenizer.encode(text, add_special_tokens=False)
    return ScriptedEngine(tokenizer, script, **fields)


def post(engine: ScriptedEngine, body: dict[str, Any], *, chat: bool = False, **options: Any) -> httpx.Response:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with serve(create_app(engine, model_id=MODEL, metrics=ServerMetrics(), **options)) as url:
        return httpx.post(url + path, json={"model": MODEL, "max_tokens": 50, **body}, timeout=WAIT_S)


def events(response: httpx.Response) -> list[Any]:
    """Events of a stream whose framing is exactly OpenAI's."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") for part in parts)
    return [data if (data := part[6:]) == "[DONE]" else json.loads(data) for part in parts]


# ---- an unmodified client over the real engine ----------------------------------------------------------------------


def test_client_completes(client: openai.OpenAI, engine: CpuEngine) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello there", max_tokens=5, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode("Hello there"))
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_client_gets_the_same_answer_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Say it"}]
    common: Any = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0.8, "seed": 7}
    whole = client.chat.completions.create(**common)
    with client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_token_ids_and_text_are_the_same_prompt(client: openai.OpenAI, engine: CpuEngine) -> None:
    ids = engine.tokenizer.encode("abc def")
    texts = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in ("abc def", ids, ["abc def"], [ids])
    ]
    assert len(set(texts)) == 1


def test_several_prompts_give_several_choices(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **common).choices[0].text for prompt in ("first", "second")]
    both = client.completions.create(prompt=["first", "second"], **common)
    assert [(choice.index, choice.text) for choice in both.choices] == list(enumerate(alone))
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=["first", "second"], stream=True, **common):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "prompt": "the same long prompt, asked twice", "max_tokens": 2, "temperature": 0}
    usages = [client.completions.create(extra_body={"cache_salt": "twice"}, **common).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]  # type: ignore[union-attr]
    assert cached == [0, 32]  # 33 tokens and the beginning-of-text token, in blocks of 8


def test_the_asynchronous_client_streams(url: str) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model=MODEL, prompt="hi", max_tokens=3, temperature=0, stream=True)
            return [chunk async for chunk in stream]

    assert asyncio.run(ask())[-1].choices[0].finish_reason is not None


def test_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as not_found:
        client.completions.create(model="gpt-4", prompt="x")
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="fit") as too_long:
        client.completions.create(model=MODEL, prompt="x" * 500)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")


# ---- exact shapes over a scripted engine ----------------------------------------------------------------------------


def test_stream_of_completion_has_exactly_these_events(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "héy")
    body = {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(post(engine, body))
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["h", "é", "y"]
    assert chunks[0] == {
        "id": chunks[0]["id"],
        "object": "text_completion",
        "created": chunks[0]["created"],
        "model": MODEL,
        "choices": [{"index": 0, "text": "h", "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": len(tokenizer.encode("p")),
        "completion_tokens": 4,
        "total_tokens": len(tokenizer.encode("p")) + 4,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_stream_of_chat_opens_with_the_role_and_closes_with_the_reason(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "", script=[*tokenizer.encode("ok", add_special_tokens=False), -1])
    *chunks, done = events(post(engine, {"messages": [{"role": "user", "content": "q"}], "stream": True}, chat=True))
    assert done == "[DONE]"
    assert [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "o"}, None),
        ({"content": "k"}, None),
        ({}, "stop"),
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_uses_the_template(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "x")
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = post(engine, {"messages": messages}, chat=True).json()
    expected = "<s><|turn|>system\nbe kind</s><|turn|>user\nab</s><|turn|>assistant\n"
    assert tokenizer.decode(engine.submitted[0][0]) == expected
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "x", "refusal": None}


def test_sampling_reaches_the_engine(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "x")
    body = {
        "prompt": [5, 6],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 11,
        "stop_token_ids": [8],
        "ignore_eos": True,
        "cache_salt": "tenant",
        "logprobs": 2,
        "user": "ignored",
    }
    assert post(engine, body).status_code == 200
    prompt, sampling, salt = engine.submitted[0]
    assert (prompt, salt) == ([5, 6], "tenant")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 4)
    assert (sampling.seed, sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == (11, (8,), True, 2)


def test_defaults_are_those_of_openai(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "x", max_prompt_tokens=199)
    post(engine, {"prompt": [5] * 10, "max_tokens": None, "temperature": None})
    post(engine, {"messages": [{"role": "user", "content": "q"}], "max_tokens": None}, chat=True)
    post(engine, {"messages": [{"role": "user", "content": "q"}], "max_completion_tokens": 6}, chat=True)
    completion, chat, limited = (sampling for _, sampling, _ in engine.submitted)
    assert (completion.max_tokens, completion.temperature, completion.top_p, completion.top_k) == (16, 1.0, 1.0, None)
    assert completion.num_logprobs is None
    assert chat.max_tokens == 200 - len(engine.submitted[1][0])  # as many as fit
    assert limited.max_tokens == 6


def test_stop_string_across_tokens_ends_text_and_generation(tokenizer: Any) -> None:
    gate = threading.Event()
    engine = scripted(tokenizer, "one STOP two", gate=gate, gate_at=8)
    answer = post(engine, {"prompt": "p", "stop": ["STOP", "never"], "logprobs": 0}).json()
    assert answer["choices"][0]["text"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["o", "n", "e", " "]
    assert answer["usage"]["completion_tokens"] == 8
    assert engine.cancelled.wait(WAIT_S)
    gate.set()


def test_stop_string_cancels_at_once_while_other_prompts_go_on(tokenizer: Any) -> None:
    gate = threading.Event()
    generation = scripted(tokenizer, "a.b", gate=gate, gate_at=2).submit([5], SamplingParams(max_tokens=3))
    choice = ChoiceStream(generation, TextStream(tokenizer, (".",)), token_text=None)

    async def run() -> bool:
        assert await choice.whole() == Delta("a", None, "stop")
        return generation.is_cancelled

    assert asyncio.run(run())
    gate.set()


def test_half_a_stop_string_is_text_after_all(tokenizer: Any) -> None:
    response = post(scripted(tokenizer, "no ST"), {"prompt": "p", "stop": "STOP", "stream": True})
    *chunks, _ = events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "no ST"
    assert chunks[-1]["choices"][0] == {"index": 0, "text": "ST", "logprobs": None, "finish_reason": "length"}


def test_logprobs_of_completions(tokenizer: Any) -> None:
    body = {"prompt": "p", "logprobs": 2}
    logprobs = post(scripted(tokenizer, "a€"), body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "a"
    assert logprobs["text_offset"] == [0, 1, 1, 1]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert list(logprobs["top_logprobs"][0].values()) == [-2.0, -3.0]


def test_logprobs_of_chat_join_to_the_text_in_streams_too(tokenizer: Any) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "logprobs": True, "top_logprobs": 1}
    whole = post(scripted(tokenizer, "hi!"), body, chat=True).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["h", "i", "!"]
    assert whole["content"][0]["bytes"] == [104]
    assert whole["content"][0]["logprob"] == -0.5
    assert len(whole["content"][0]["top_logprobs"]) == 1
    assert set(whole["content"][0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    streamed = events(post(scripted(tokenizer, "hi!"), body | {"stream": True, "stop": "?i"}, chat=True))
    entries = [
        entry for chunk in streamed[:-1] for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert entries == whole["content"]


def test_logprob_of_an_impossible_token_is_a_number(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "a", logprob=float("-inf"))
    logprobs = post(engine, {"prompt": "p", "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"echo": 0}, "echo"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"suffix": "s"}, "suffix"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 1 << 63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [288]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_bad_field_is_named(refusing_url: str, body: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "prompt": "p", "add_special_tokens": False, **body}
    response = httpx.post(f"{refusing_url}/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, None),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
def test_bad_chat_field_is_named(refusing_url: str, body: dict[str, Any], param: str | None) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "q"}], **body}
    response = httpx.post(f"{refusing_url}/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_neutral_values_of_refused_fields_pass(tokenizer: Any) -> None:
    body = {
        "prompt": "p",
        "n": 1,
        "echo": False,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "suffix": None,
        "unknown": 1,
    }
    assert post(scripted(tokenizer, "x"), body).status_code == 200


def test_broken_json_large_bodies_and_unknown_paths(tokenizer: Any) -> None:
    app = create_app(scripted(tokenizer, "x"), model_id=MODEL, metrics=ServerMetrics(), max_request_bytes=200)
    with serve(app) as url:
        broken = httpx.post(f"{url}/v1/completions", content=b"{")
        large = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x" * 300})
        unknown = httpx.get(f"{url}/v2")
        wrong_method = httpx.get(f"{url}/v1/completions")
    statuses = [response.status_code for response in (broken, large, unknown, wrong_method)]
    assert statuses == [400, 413, 404, 405]
    assert [response.json()["error"]["code"] for response in (broken, large)] == ["invalid_json", "request_too_large"]
    assert unknown.json()["error"]["message"]


def test_busy_engine_is_503_and_cancels_the_prompts_it_took(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "xy", max_requests=1, gate=threading.Event())
    response = post(engine, {"prompt": ["first", "second"]})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "engine_busy"
    assert engine.cancelled.wait(WAIT_S)


# A bug in the engine is logged with its trace by the server, on purpose.
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_500(tokenizer: Any, stream: bool) -> None:
    engine = scripted(tokenizer, "abc", fail_with=MemoryError("no room"), fail_at=0)
    response = post(engine, {"prompt": "p", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


def test_failure_within_a_stream_ends_it_with_an_error(tokenizer: Any) -> None:
    engine = scripted(tokenizer, "abc", fail_with=MemoryError("no room"), fail_at=2)
    app = create_app(engine, model_id=MODEL, metrics=ServerMetrics())
    with serve(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="p", stream=True)
        seen = []
        with pytest.raises(openai.APIError):
            seen.extend(chunk.choices[0].text for chunk in stream)
        raw = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "p", "stream": True})
    assert "[DONE]" not in raw.text
    assert events(raw)[-1]["error"]["type"] == "server_error"


# ---- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gate_at", [0, 1])
def test_client_that_leaves_cancels_its_generation(tokenizer: Any, stream: bool, gate_at: int) -> None:
    gate, metrics = threading.Event(), ServerMetrics()
    engine = scripted(tokenizer, "abc", gate=gate, gate_at=gate_at)
    with serve(create_app(engine, model_id=MODEL, metrics=metrics)) as url, httpx.Client() as client:
        body = {"model": MODEL, "prompt": "p", "stream": stream}
        if stream and gate_at == 1:
            with client.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as response:
                assert next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=body, timeout=0.3)
        assert engine.cancelled.wait(WAIT_S)
        gate.set()
    assert 'scd_requests_total{endpoint="completions",status="499"} 1.0' in metrics.render()[0].decode()


def test_a_client_that_leaves_before_its_body_is_there_is_no_error(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = ServerMetrics()
    app = create_app(scripted(tokenizer, "x"), model_id=MODEL, metrics=metrics)
    with serve(app) as url:
        where = httpx.URL(url)
        with socket.create_connection((where.host, where.port or 0)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    # leaving `serve` waits for the request
    assert 'scd_requests_total{endpoint="completions",status="499"} 1.0' in metrics.render()[0].decode()
    assert "Traceback" not in caplog.text


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_health_version_and_metrics(tokenizer: Any) -> None:
    metrics, healthy = ServerMetrics(), [True]
    app = create_app(scripted(tokenizer, "abc"), model_id=MODEL, metrics=metrics, is_healthy=lambda: healthy[0])
    with serve(app) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        healthy[0] = False
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/version").json()["version"]
        answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": [5, 6, 7, 8]})
        httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "p"})
        text = httpx.get(f"{url}/metrics").text
    assert float(answer.headers["x-scd-first-token-ms"]) > 0
    assert 'scd_requests_total{endpoint="completions",status="200"} 1.0' in text
    assert 'scd_requests_total{endpoint="completions",status="404"} 1.0' in text
    assert 'scd_tokens_total{kind="cached"} 3.0' in text
    assert 'scd_first_token_seconds_count{endpoint="completions"} 1.0' in text


def test_client_that_stops_reading_and_leaves_ends_the_stream() -> None:
    closed: list[bool] = []

    async def generate() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            closed.append(True)

    async def run() -> None:
        full = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                full.set()
                await asyncio.Event().wait()  # the socket's buffers are full for ever

        async def receive() -> dict[str, str]:
            await full.wait()
            return {"type": "http.disconnect"}

        events = generate()
        first = await first_event(events, lambda: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
        await EventStream(first, events)({"type": "http"}, receive, send)
        assert closed == [True]

    asyncio.run(run())
