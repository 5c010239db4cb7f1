"""Settings of TensorRT-LLM under which a connector would stop the server later, or corrupt text: refused by name at start.

Owns `REFUSALS`, the table, and `check_engine`, which TensorRT-LLM's own arguments (`llm_args`) go through when it builds the
connector: what is raised then stops the server with a message; what goes wrong later stops it without one. The same settings
are in `deploy.requirements`, which judges files before a server is started; here the values in effect are judged, defaults
included, and nothing that merely costs speed.

A setting that `llm_args` does not have is not judged: versions differ in what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from scd_trt.config import ScdError

Role = Literal["prefill", "decode"]


class EngineSettingsError(ScdError):
    """TensorRT-LLM is set up in a way that the connector cannot work in; the message names each setting."""


@dataclass(frozen=True)
class Refusal:
    """A setting that must not have certain values.

    Attributes:
        setting: dotted, as in TensorRT-LLM's YAML.
        is_wrong: judges the value in effect.
        cure: what to write instead.
        why: what would happen, as a clause.
    """

    setting: str
    is_wrong: Callable[[Any], bool]
    cure: str
    why: str
    roles: tuple[Role, ...] = ("prefill", "decode")


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _positive(value: Any) -> bool:
    return value is not None and int(value) > 0


def _several(value: Any) -> bool:
    return isinstance(value, Iterable) and len(set(value)) > 1


def _given(value: Any) -> bool:
    return value is not None


def _other_policy(value: Any) -> bool:
    name = str(getattr(value, "value", value)).rpartition(".")[2]
    return value is not None and name != "GUARANTEED_NO_EVICT"


def _quantised(value: Any) -> bool:
    return str(value).lower() not in ("auto", "none", "bfloat16", "float16", "float32")


REFUSALS: tuple[Refusal, ...] = (
    Refusal("pipeline_parallel_size", _more_than_one, "1", "a rank would get codes of layers that it does not run"),
    Refusal("context_parallel_size", _more_than_one, "1", "tokens of one block would lie on several ranks"),
    Refusal("max_beam_width", _more_than_one, "1", "beams share and copy blocks after codes were written into them"),
    Refusal(
        "enable_attention_dp",
        bool,
        "false",
        "every rank would have requests and a cache of its own, but only rank 0 a session",
    ),
    Refusal(
        "speculative_config",
        _given,
        "null",
        "draft tokens take up blocks that no codes describe, and hooks fire for them",
    ),
    Refusal(
        "scheduler_config.capacity_scheduler_policy",
        _other_policy,
        "GUARANTEED_NO_EVICT",
        "a request that is paused loses the blocks that codes were decoded into",
    ),
    Refusal(
        "kv_cache_config.enable_partial_reuse",
        bool,
        "false",
        "a prompt would begin in the middle of a block, on a copy of another prompt's tokens",
    ),
    Refusal(
        "kv_cache_config.host_cache_size",
        _positive,
        "0",
        "blocks would move out of the pool that the connector reads and writes",
    ),
    Refusal(
        "kv_cache_config.max_attention_window",
        _several,
        "one window for all layers, or nothing",
        "there would be several pools, and blocks outside a window are dropped",
    ),
    Refusal(
        "kv_cache_config.dtype",
        _quantised,
        "auto, bfloat16 or float16",
        "keys and values would be written without the scales that a quantised pool (fp8, nvfp4) is read with",
    ),
    Refusal(
        "kv_cache_config.enable_block_reuse",
        bool,
        "false",
        "decoded cache would enter the radix tree as if it were exact, and serve prompts that were not meant to have it",
        roles=("decode",),
    ),
    Refusal(
        "disable_overlap_scheduler",
        lambda value: value is False,
        "true",
        "the next iteration would be planned before the codes of this one have left their blocks",
        roles=("prefill",),
    ),
    Refusal(
        "torch_compile_config.enable_piecewise_cuda_graph", bool, "false", "a replayed graph calls no connector hook"
    ),
    Refusal(
        "prefill_cuda_graph_backend",
        lambda value: value not in (None, "disabled"),
        "disabled",
        "a replayed graph calls no connector hook",
    ),
    Refusal(
        "enable_lora",
        bool,
        "false",
        "an adapter changes the cache, but codes are named by tokens alone; merge it instead",
    ),
    Refusal("lora_config", _given, "null", "codes are named by tokens alone; merge the adapter into the model"),
    Refusal("sparse_attention_config", _given, "null", "the cache would hold other things than all keys and values"),
)


def check_engine(llm_args: Any, role: Role) -> None:
    """Judge TensorRT-LLM's arguments.

    Raises:
        EngineSettingsError: with every setting that is wrong, its value, the right one and the reason.
    """
    wrong = [
        f"{refusal.setting} is {value!r}: set {refusal.cure}; otherwise {refusal.why}"
        for refusal in REFUSALS
        for value in _values(llm_args, refusal.setting)
        if role in refusal.roles and refusal.is_wrong(value)
    ]
    if wrong:
        raise EngineSettingsError("TensorRT-LLM is set up in a way that SCD cannot work in:\n  " + "\n  ".join(wrong))


def check_same(llm_args: Any, setting: str, ours: int, *, source: str) -> None:
    """A number that TensorRT-LLM and the pair must agree on.

    Raises:
        EngineSettingsError: they do not.
    """
    for value in _values(llm_args, setting):
        if value is not None and int(value) != ours:
            raise EngineSettingsError(f"{setting} is {value} here and {ours} in {source}; they must be equal")


def _values(llm_args: Any, setting: str) -> list[Any]:
    """The value in effect, or nothing where this version does not have the setting."""
    value = llm_args
    for name in setting.split("."):
        if value is None or not hasattr(value, name):
            return []
        value = getattr(value, name)
    return [value]
