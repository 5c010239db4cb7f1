"""Request rewriting inside TensorRT-LLM's own disaggregated service: a subclass that changes only the two requests.

`serve/openai_disagg_service.py` (OpenAIDisaggregatedService, context first) sends a context request, reads the handle of
its cache transceiver out of the answer, and sends a generation request with that handle. With connectors there is no
handle: the first is a plain request for one token, the second the client's own, and whatever the first one answers, the
second is sent. Read in stored sources of 2026, which differ in further keyword arguments; never run.

What it does not do: nobody grants the transfer here, as the router does (`courier.Courier`), so until a grant is asked for
between choosing the two workers and the first request, the decode worker uses what its store has and prefills the rest.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_host import missing_for_api

from scd_trt.serving.decision import prefill_changes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(missing_for_api()), reason=missing_for_api()),
    # TensorRT-LLM and what it imports warn of their own deprecations
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]


def rewriting_service() -> type[Any]:
    """The subclass; a function, because its parent cannot be imported everywhere."""
    from tensorrt_llm.serve.openai_disagg_service import OpenAIDisaggregatedService

    class CodesInsteadOfCache(OpenAIDisaggregatedService):  # type: ignore[misc]
        def _get_ctx_request(self, request: Any, disagg_request_id: Any, **_: Any) -> Any:
            known = type(request).model_fields
            changes = {name: value for name, value in prefill_changes().items() if name in known}
            return request.model_copy(update=changes | {"disaggregated_params": None})

        def _get_gen_request(self, request: Any, ctx_response: Any, disagg_request_id: Any, *_: Any, **__: Any) -> Any:
            return request.model_copy(update={"disaggregated_params": None})

        async def _verify_ctx_response(self, ctx_response: Any) -> Any:
            return ctx_response

        def _need_gen(self, response: Any) -> bool:
            # one token may well be the last one by the producer's lights; the answer is the consumer's all the same
            return True

    return CodesInsteadOfCache


class _Client:
    """Keeps what is sent, and answers as a context worker whose only token ended the text."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send_request(self, request: Any, *_: Any, **__: Any) -> Any:
        self.sent.append(request)
        choice = SimpleNamespace(finish_reason="stop", disaggregated_params=None)
        return SimpleNamespace(choices=[choice], usage=None, prompt_token_ids=None)


class _Workers:
    async def get_next_server(self, *_: Any, **__: Any) -> tuple[str, dict[str, Any]]:
        return "127.0.0.1:8001", {}

    async def finish_request(self, *_: Any, **__: Any) -> None:
        return


@pytest.mark.parametrize("stream", [False, True])
def test_the_two_requests_are_plain_ones(stream: bool) -> None:
    from tensorrt_llm.llmapi.disagg_utils import DisaggServerConfig
    from tensorrt_llm.serve.openai_protocol import CompletionRequest

    context, generation = _Client(), _Client()
    service = rewriting_service()(
        DisaggServerConfig(server_configs=[]), _Workers(), _Workers(), client_factory=lambda *_: None
    )
    service._ctx_client, service._gen_client = context, generation
    request = CompletionRequest(model="pair", prompt=[1, 2, 3], max_tokens=7, temperature=0.5, stream=stream)
    asyncio.run(service.openai_completion(request))
    (first,), (second,) = context.sent, generation.sent
    assert (first.prompt, first.max_tokens, first.temperature, first.stream) == ([1, 2, 3], 1, 0, False)
    assert (second.prompt, second.max_tokens, second.temperature, second.stream) == ([1, 2, 3], 7, 0.5, stream)
    assert first.disaggregated_params is second.disaggregated_params is None
