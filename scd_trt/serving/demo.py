"""The whole system in one command: distil a pair, serve it, ask real questions, compare with the consumer's own prefill.

Owns: the questions, the three ways each is asked, and the table's rows. Each question goes to the router (codes), to the
decode worker under a cache salt of its own (the consumer prefills by itself: the baseline), and to the prefill worker
(the producer's own answer, to show that the models differ). The last question is about the first one's text, so its
prefix is in the decode worker's code store already and no codes travel.

Times are of one client on one machine, where both models share the cores: they show where time goes, not what a cluster
would gain.
"""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scd_trt.config import PairConfig, ScdError, cache_root
from scd_trt.distill.pipeline import Progress, distill
from scd_trt.evaluate.tasks import Question, f1, prompt, questions
from scd_trt.serving.launcher import Child, LaunchError, serving_group
from scd_trt.translator import Translator

MAX_TOKENS = 24
SEED = 3


class DemoError(ScdError):
    """A server of the demo gave no answer."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        text: what the model said.
        first_token_ms: from sending the request to the first piece of text.
        usage: the OpenAI usage object, with `scd` where the router answered.
    """

    text: str
    first_token_ms: float
    usage: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DemoRow:
    """One question and what each server said to it."""

    question: str
    expected: str
    served: Answer
    own_prefill: Answer
    producer: Answer

    def as_json(self) -> dict[str, Any]:
        """The row as plain data, with the scores of the three answers."""
        accepted = [self.expected]
        scores = {name: f1(getattr(self, name).text, accepted) for name in ("served", "own_prefill", "producer")}
        return asdict(self) | {"f1": scores}


def ensure_translator(config: PairConfig, *, progress: Progress) -> Translator:
    """The pair's translator; distilled now unless an artifact of the same settings exists."""
    return distill(config, progress=progress)


def log_directory(config: PairConfig) -> Path:
    """Where the servers of a group write their logs unless told otherwise."""
    return cache_root() / "logs" / config.name


def curl_line(config: PairConfig) -> str:
    """A shell line that asks the running router something."""
    router = config.servers.router
    body = {
        "model": config.name,
        "max_tokens": 48,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Who are you?"}],
    }
    arguments = ["curl", "-s", f"http://{router.host}:{router.port}/v1/chat/completions"]
    return shlex.join([*arguments, "-H", "Content-Type: application/json", "-d", json.dumps(body)])


def await_interrupt(children: dict[str, Child]) -> None:
    """Block until Ctrl-C or SIGTERM.

    Raises:
        LaunchError: a server ended by itself.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(0.5):
        for child in children.values():
            if child.process.poll() is not None:
                raise LaunchError(child.describe_end())


def run_demo(pair_file: Path, config: PairConfig, *, logs: Path, progress: Progress) -> list[DemoRow]:
    """Serve the pair and ask the demo's questions.

    Raises:
        DemoError, LaunchError: a server did not start or did not answer.
    """
    asked = demo_questions()
    progress.stage("start prefill, decode and router", 3)
    with serving_group(pair_file, config, log_directory=logs, waiting=lambda _: progress.advance()) as children:
        progress.stage("ask real questions", len(asked))
        return list(_rows(asked, children, config, progress))


def demo_questions() -> list[Question]:
    """Three held-out NarrativeQA questions on two texts; the last is about the first one's text."""
    found = questions("narrativeqa", split="test", seed=SEED)
    texts = list(dict.fromkeys(question.digest for question in found if len(question.context) < 5000))
    first = [question for question in found if question.digest == texts[0]]
    second = [question for question in found if question.digest == texts[1]]
    return [first[0], second[0], first[1]]


def _rows(
    asked: list[Question], children: dict[str, Child], config: PairConfig, progress: Progress
) -> Iterator[DemoRow]:
    for index, question in enumerate(asked):
        messages = list(prompt(question).messages)
        yield DemoRow(
            question=question.question,
            expected=question.answers[0],
            served=_ask(children["router"].url, config.name, messages),
            # a salt of its own for each: nothing is reused, so the worker computes the whole prompt
            own_prefill=_ask(children["decode"].url, config.name, messages, cache_salt=f"own-{index}"),
            producer=_ask(children["prefill"].url, config.name, messages, cache_salt=f"own-{index}"),
        )
        progress.advance()


def _ask(url: str, model: str, messages: list[dict[str, str]], **extra: Any) -> Answer:
    body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, **extra}
    body["stream_options"] = {"include_usage": True}
    start, first = time.perf_counter(), 0.0
    text: list[str] = []
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300.0) as response:
        if response.status_code != httpx.codes.OK:
            raise DemoError(f"{url} answered {response.status_code}: {response.read().decode(errors='replace')[:500]}")
        for chunk in _events(response):
            usage = chunk.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))
            if piece and not text:
                first = time.perf_counter()
            text += [piece] if piece else []
    return Answer("".join(text), 1000 * (first - start), usage)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if line.startswith("data: ") and data != "[DONE]":
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise DemoError(f"{response.url}: {chunk['error']}")
            yield chunk
