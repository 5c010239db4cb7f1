"""Which prompts are cut in the event loop."""

import pytest

from scd_trt.serving.openai_schema import ChatRequest, CompletionRequest
from scd_trt.serving.prompts import MAX_QUICK_TOKENS, is_quick


@pytest.mark.parametrize("prompt", [[7] * MAX_QUICK_TOKENS, [[7], [8] * (MAX_QUICK_TOKENS - 1)]])
def test_a_few_thousand_token_ids_are_quick(prompt):
    assert is_quick(CompletionRequest(model="pair", prompt=prompt))


@pytest.mark.parametrize("prompt", ["text", ["text"], [7] * (MAX_QUICK_TOKENS + 1), [[7] * MAX_QUICK_TOKENS, [8]]])
def test_text_and_many_token_ids_are_not(prompt):
    assert not is_quick(CompletionRequest(model="pair", prompt=prompt))


def test_a_conversation_is_not():
    assert not is_quick(ChatRequest(model="pair", messages=[{"role": "user", "content": "text"}]))
