"""The load of the soak test: a seeded mixture of requests, of which a part is cancelled, and a verdict on each answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from scd_trt.config import EngineConfig
from scd_trt.models import LoadedModel
from scd_trt.serving.cpu_engine import CpuEngine, SamplingParams
from scd_trt.serving.handover import REASONS

NUM_PROMPTS = 40
CANCELLED_SHARE = 0.2
TIMEOUT_S = 60.0
TOKENS_PER_BLOCK = 8
# A worker may be gone or stand still; the router then says so.
PROPER_STATUSES = (502, 503, 504)
# Two ways of computing one prompt (chunks, reused blocks) differ by rounding, about 1e-5: a choice as clear as this is the
# same in both.
CLEAR_MARGIN = 1e-2


@dataclass(frozen=True)
class Question:
    """A prompt and what the consumer's own engine answers to it."""

    prompt: str
    max_tokens: int
    answer: str


@dataclass
class Tally:
    """What became of the requests."""

    num_requests: int = 0
    num_right: int = 0
    num_cancelled: int = 0
    num_with_codes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "right": self.num_right,
            "cancelled": self.num_cancelled,
            "with_codes": self.num_with_codes,
            "errors": dict(self.errors),
            "fallbacks": dict(self.fallbacks),
        }


class _WrongError(AssertionError):
    """An answer that is neither right nor a proper error."""


def questions(loaded: LoadedModel, seed: int) -> list[Question]:
    """Prompts of mixed sizes whose greedy answers do not hang on rounding."""
    chosen = random.Random(seed)
    engine = CpuEngine(loaded, EngineConfig(tokens_per_block=TOKENS_PER_BLOCK, num_blocks=256, max_num_tokens=64))
    found: list[Question] = []
    try:
        while len(found) < NUM_PROMPTS:
            length = chosen.choice((5, 20, 60, 150, 300, 600))
            prompt = "".join(chosen.choices("abcdefghijklmnop qrstuvwxyz.", k=length + chosen.randrange(8)))
            answer = _own_answer(engine, loaded, prompt, max_tokens := chosen.choice((1, 4, 16, 40)))
            if answer is not None:
                found.append(Question(prompt, max_tokens, answer))
    finally:
        engine.close()
    return found


def _own_answer(engine: CpuEngine, loaded: LoadedModel, prompt: str, max_tokens: int) -> str | None:
    """None where two tokens were about equally likely."""
    ids = loaded.tokenizer(prompt)["input_ids"]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, num_logprobs=2)
    events = list(engine.submit(ids, sampling))
    if any(first[1] - second[1] < CLEAR_MARGIN for first, second in (event.top_logprobs for event in events)):
        return None
    text: str = loaded.tokenizer.decode([event.token_id for event in events], skip_special_tokens=True)
    return text


class Load:
    """Sends requests one after the other from each of several clients, until told to end."""

    def __init__(self, url: str, model: str, asked: Sequence[Question], *, seed: int) -> None:
        self.tally = Tally()
        self._url, self._model, self._asked, self._seed = url, model, asked, seed

    async def run(self, num_clients: int, goes_on: Callable[[int], bool]) -> None:
        """`goes_on` is asked before each request, with its number."""

        async def client() -> None:
            limits = httpx.Limits(keepalive_expiry=2.0)
            async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
                while goes_on(self.tally.num_requests):
                    self.tally.num_requests += 1
                    await self._one(http, self.tally.num_requests)

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        chosen = random.Random(f"{self._seed}-{number}")
        question = chosen.choice(self._asked)
        body = {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            # a salt of its own makes codes travel; a shared one finds them stored
            "cache_salt": str(number) if chosen.random() < 0.6 else str(chosen.randrange(3)),
        }
        asks = self._stream if chosen.random() < 0.5 else self._whole
        leaves = chosen.random() < CANCELLED_SHARE
        patience_s = chosen.uniform(0.0, 0.5) if leaves else None
        try:
            await asyncio.wait_for(asks(http, body, question), patience_s)
        except asyncio.TimeoutError:
            self.tally.num_cancelled += 1
        except (_WrongError, httpx.HTTPError) as error:
            self.tally.failures.append(f"request {number}: {type(error).__name__} {error}")

    async def _whole(self, http: httpx.AsyncClient, body: dict[str, Any], question: Question) -> None:
        response = await http.post("/v1/completions", json=body)
        if response.status_code != 200:
            self._count_error(response.status_code, response.json())
            return
        answer = response.json()
        self._check(answer["choices"][0]["text"], answer["usage"], question)

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, Any], question: Question) -> None:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._count_error(response.status_code, response.json())
                return
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        self._check_stream(lines, question)

    def _check_stream(self, lines: list[str], question: Question) -> None:
        *events, last = lines
        if last == "[DONE]":
            chunks = [json.loads(event) for event in events]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            self._check(text, chunks[-1]["usage"], question)
            return
        chunks = [json.loads(event) for event in events]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        if not question.answer.startswith(text):
            raise _WrongError(f"{text!r} is no beginning of {question.answer!r}")
        self._count_error("stream", json.loads(last))

    def _check(self, text: str, usage: dict[str, Any], question: Question) -> None:
        if text != question.answer:
            raise _WrongError(f"{text!r} instead of {question.answer!r}: {usage}")
        self.tally.num_right += 1
        scd, cached = usage["scd"], usage["prompt_tokens_details"]["cached_tokens"]
        if scd["fallback"] is not None:
            self.tally.fallbacks[scd["fallback"]] += 1
            if scd["fallback"] not in REASONS:
                raise _WrongError(f"unknown reason: {usage}")
        elif cached < TOKENS_PER_BLOCK:
            raise _WrongError(f"prefilled by itself without saying why: {usage}")
        elif scd["matched_tokens"]:
            self.tally.num_with_codes += 1

    def _count_error(self, status: int | str, body: dict[str, Any]) -> None:
        if status != "stream" and status not in PROPER_STATUSES:
            raise _WrongError(f"status {status}: {body}")
        self.tally.errors[f"{status} {body['error']['code']}"] += 1
