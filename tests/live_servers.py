"""Real HTTP servers on free loopback ports, and an engine that says what a test wrote down, for tests of the endpoints."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from scd_trt.serving.cpu_engine import EngineBusyError, PromptTooLongError
from scd_trt.serving.generation import Generation, TokenEvent
from scd_trt.serving.sampling import SamplingParams

WAIT_S = 10.0


class _Server(uvicorn.Server):
    """Tells when it listens, or that it failed to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def serve(app: Any, port: int = 0) -> Iterator[str]:
    """Run an application in a thread; yields its URL. Leaving closes all its connections."""
    # asyncio sets TCP_NODELAY on sockets that say they are TCP only; `socket.create_server` does not, and answers take 40 ms
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1, access_log=False)
    server = _Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert server.ready.wait(WAIT_S), "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class ScriptedEngine:
    """Answers with the tokens of `script`; as strict as the real engine about what it accepts.

    Attributes:
        script: token ids; -1 ends with the reason "stop" (as end of sequence 2), the end of the list with "length".
        gate: where given, tokens from `gate_at` on wait for it.
        submitted: prompt, sampling and salt of every request.
        cancelled: set when a generation was cancelled.
    """

    tokenizer: Any
    script: Sequence[int] = ()
    max_prompt_tokens: int = 200
    fail_with: Exception | None = None
    fail_at: int | None = None
    gate: threading.Event | None = None
    gate_at: int = 1
    submitted: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    max_requests: int = 1 << 30
    logprob: float = -0.5

    def submit(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, cache_salt: str = "") -> Generation:
        if len(self.submitted) >= self.max_requests:
            raise EngineBusyError("full")
        if len(prompt_token_ids) > self.max_prompt_tokens:
            raise PromptTooLongError(f"{len(prompt_token_ids)} tokens")
        self.submitted.append((list(prompt_token_ids), sampling, cache_salt))
        generation = Generation(len(self.submitted), len(prompt_token_ids), self.cancelled.set)
        generation.cached_tokens = 3
        threading.Thread(target=self._run, args=(generation, sampling), daemon=True).start()
        return generation

    def _run(self, generation: Generation, sampling: SamplingParams) -> None:
        tokens = list(self.script)[: sampling.max_tokens]
        for index, token in enumerate(tokens):
            if self.gate is not None and index >= self.gate_at:
                self.gate.wait(WAIT_S)
            if index == self.fail_at and self.fail_with is not None:
                generation.fail(self.fail_with)
                return
            is_last = index == len(tokens) - 1
            reason = "stop" if token == -1 else "length" if is_last else None
            top = tuple((token + 1 + rank, -2.0 - rank) for rank in range(sampling.num_logprobs or 0))
            generation.put(TokenEvent(2 if token == -1 else token, self.logprob, top, reason))
            if token == -1:
                return
