"""Send or prefill locally: the cost model against sums worked by hand, and rates that are learned and forgotten."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scd_trt.config import DecisionSettings
from scd_trt.serving import decision as decision_module
from scd_trt.serving.decision import Decision, DecisionInputs, Rates, decide, prefill_changes, prefill_request
from scd_trt.serving.measurements import MAX_SUBJECTS, Measurements

# 1,000 tokens: 2 s of prefill on either worker; 8 MB of codes; 0.5 s to decode them.
RATES = Rates(
    link_bytes_per_s=4e6, prefill_tokens_per_s=500.0, local_tokens_per_s=500.0, reconstruct_s_per_token=0.5 / 992
)
INPUTS = DecisionInputs(
    num_prompts=1, prompt_tokens=1000, sent_tokens=992, sent_bytes=8_000_000, is_prefill_alive=True, rates=RATES
)


def choose(settings: dict[str, Any] | None = None, *, rates: dict[str, Any] | None = None, **inputs: Any) -> Decision:
    changed = replace(INPUTS, rates=replace(RATES, **(rates or {})), **inputs)
    return decide(changed, DecisionSettings(**(settings or {})))


def test_a_transfer_beside_the_prefill_costs_nothing() -> None:
    decision = choose()
    assert (decision.choice, decision.reason) == ("send", "cheaper")
    assert decision.send_s == pytest.approx(0.5)  # 2 s of transfer hide behind 2 s of prefill; only decoding is left
    assert decision.local_s == pytest.approx(2.0)
    assert decision.inputs.rates == RATES


def test_a_slow_link_loses() -> None:
    decision = choose(rates={"link_bytes_per_s": 2e6})
    assert (decision.choice, decision.reason) == ("local", "too_costly")
    assert decision.send_s == pytest.approx(2.5)  # 4 s - 2 s + 0.5 s


def test_max_ratio_is_the_threshold() -> None:
    slow = {"link_bytes_per_s": 2e6}
    assert choose({"max_ratio": 1.26}, rates=slow).choice == "send"
    assert choose({"max_ratio": 1.24}, rates=slow).choice == "local"


def test_latency_counts_the_prefill_too() -> None:
    assert choose({"objective": "latency"}).send_s == pytest.approx(2.5)
    assert choose({"objective": "latency"}).choice == "local"
    assert (
        choose({"objective": "latency"}, rates={"prefill_tokens_per_s": 5000.0, "link_bytes_per_s": 8e6}).choice
        == "send"
    )


@pytest.mark.parametrize("unknown", ["link_bytes_per_s", "prefill_tokens_per_s"])
def test_what_was_not_measured_is_tried(unknown: str) -> None:
    decision = choose(rates={unknown: None})
    assert (decision.choice, decision.reason, decision.send_s) == ("send", "unmeasured", None)


def test_the_producers_speed_is_not_the_consumers() -> None:
    slow_link: dict[str, Any] = {"local_tokens_per_s": None, "link_bytes_per_s": 1e3}
    decision = choose(rates=slow_link)
    assert (decision.choice, decision.reason) == ("send", "unmeasured")
    assert (decision.local_s, decision.local_source) == (None, None)
    assert decision.send_s is not None


def test_equal_work_lets_the_producers_speed_stand_and_says_so() -> None:
    unknown = {"local_tokens_per_s": None, "prefill_tokens_per_s": 250.0}
    decision = choose(rates=unknown, consumer_speed=0.5)
    assert (decision.local_s, decision.local_source) == (pytest.approx(8.0), "assumed")
    measured = choose(rates={"prefill_tokens_per_s": 250.0}, consumer_speed=0.5)
    assert (measured.local_s, measured.local_source) == (pytest.approx(2.0), "measured")


def test_what_the_decode_worker_has_is_neither_sent_nor_computed() -> None:
    # 600 of 1,000 tokens are there as codes: 392 travel, 400 would be computed, and all codes must be decoded
    some = {"sent_tokens": 392, "sent_bytes": 392 * 8000, "stored_tokens": 600, "stored_code_tokens": 600}
    decision = choose(rates={"link_bytes_per_s": 1e6}, **some)
    reconstruct_s = 0.5 / 992
    assert decision.send_s == pytest.approx(3.136 - 2.0 + 992 * reconstruct_s)
    assert decision.local_s == pytest.approx(0.8 + 600 * reconstruct_s)
    assert (decision.choice, decision.reason) == ("stored", "too_costly")


def test_what_the_prefill_worker_has_is_not_computed_there() -> None:
    latency = {"objective": "latency"}
    assert choose(latency, rates={"link_bytes_per_s": 8e6}, prefill_cached_tokens=500).send_s == pytest.approx(1.5)
    assert choose({}, rates={"link_bytes_per_s": 4e6}, prefill_cached_tokens=500).send_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("inputs", "settings", "reason"),
    [
        ({"sent_tokens": 0}, {}, "too_short"),
        ({"sent_tokens": 99}, {"min_sent_tokens": 100}, "too_short"),
        ({"is_prefill_alive": False}, {}, "prefill_down"),
        ({"num_prompts": 2}, {}, "several_prompts"),
        ({}, {"max_local_prefill_tokens": 1000}, "too_short"),
        ({"stored_tokens": 600, "is_prefill_alive": False}, {}, "prefill_down"),
    ],
)
def test_local_whatever_the_rates(inputs: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    decision = choose(settings, **inputs)
    assert (decision.choice, decision.reason) == ("local", reason)


@pytest.mark.parametrize(
    ("inputs", "settings", "reason"),
    [
        ({"sent_tokens": 0, "stored_tokens": 992}, {}, "stored"),
        ({"sent_tokens": 0, "stored_tokens": 992, "is_prefill_alive": False}, {}, "stored"),
        ({"sent_tokens": 96, "stored_tokens": 896}, {"max_local_prefill_tokens": 104}, "mostly_stored"),
    ],
)
def test_stored_whatever_the_rates(inputs: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    decision = choose(settings, **inputs)
    assert (decision.choice, decision.reason) == ("stored", reason)


def test_the_threshold_counts_what_decode_would_compute() -> None:
    settings = {"max_local_prefill_tokens": 103}
    assert choose(settings, sent_tokens=96, stored_tokens=896).reason == "cheaper"
    assert choose(settings, sent_tokens=95, stored_tokens=897).reason == "mostly_stored"


def test_a_prefill_request_is_one_token_that_nobody_reads() -> None:
    assert prefill_request((1, 2, 3), model="m", salt="") == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
    }
    assert prefill_request([1], model="m", salt="tenant")["cache_salt"] == "tenant"
    left_out = {name for name, value in prefill_changes().items() if value is None}
    assert left_out >= {"stream_options", "stop", "logprobs", "max_completion_tokens"}


def test_rates_are_averaged_and_forgotten() -> None:
    measured = Measurements(ttl_s=10.0)
    link = ("p", "d")
    assert measured.rates(*link, now_s=0.0) == Rates()
    measured.note_transfer(*link, 1000, 1.0, now_s=0.0)
    assert measured.rates(*link, now_s=0.0).link_bytes_per_s == pytest.approx(1000.0)
    measured.note_transfer(*link, 2000, 1.0, now_s=5.0)
    assert measured.rates(*link, now_s=15.0).link_bytes_per_s == pytest.approx(1300.0)  # 0.7 * 1000 + 0.3 * 2000
    assert measured.rates(*link, now_s=15.1).link_bytes_per_s is None
    measured.note_transfer(*link, 500, 1.0, now_s=20.0)
    assert measured.rates(*link, now_s=20.0).link_bytes_per_s == pytest.approx(500.0)  # nothing is left of the old


def test_a_long_prompt_weighs_more_than_a_short_one() -> None:
    measured = Measurements(ttl_s=10.0)
    measured.note_local("d", 10, 0.1, now_s=0.0)  # 100 tokens/s: mostly overhead
    measured.note_local("d", 10_000, 10.0, now_s=0.0)  # 1,000 tokens/s
    rate = measured.rates(None, "d", now_s=0.0).local_tokens_per_s
    assert rate == pytest.approx((0.7 * 10 + 0.3 * 10_000) / (0.7 * 0.1 + 0.3 * 10.0))
    assert rate > 970


def test_every_rate_has_its_own_average() -> None:
    measured = Measurements(ttl_s=10.0)
    measured.note_prefill("p", 100, 2.0, now_s=1.0)
    measured.note_local("d", 100, 4.0, now_s=1.0)
    measured.note_reconstruction("d", 100, 5.0, now_s=1.0)
    assert measured.rates("p", "d", now_s=1.0) == Rates(None, 50.0, 25.0, 0.05)


def test_every_worker_and_link_has_its_own_rates() -> None:
    measured = Measurements(ttl_s=10.0)
    measured.note_transfer("p", "d", 100, 1.0, now_s=1.0)
    measured.note_prefill("p", 100, 2.0, now_s=1.0)
    measured.note_local("d", 100, 4.0, now_s=1.0)
    assert measured.rates("other", "d", now_s=1.0) == Rates(local_tokens_per_s=25.0)
    assert measured.rates("p", "other", now_s=1.0) == Rates(prefill_tokens_per_s=50.0)


def test_memory_of_measurements_is_bounded() -> None:
    measured = Measurements(ttl_s=10.0)
    for number in range(MAX_SUBJECTS + 1):
        measured.note_prefill(str(number), 100, 2.0, now_s=1.0)
    assert measured.rates("0", "d", now_s=1.0).prefill_tokens_per_s is None
    assert measured.rates("1", "d", now_s=1.0).prefill_tokens_per_s == 50.0


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (5, 0.0), (5, -1.0)])
def test_a_sample_of_nothing_is_ignored(num_bytes: int, seconds: float) -> None:
    measured = Measurements(ttl_s=10.0)
    measured.note_transfer("p", "d", num_bytes, seconds, now_s=1.0)
    assert measured.rates("p", "d", now_s=1.0).link_bytes_per_s is None


def test_deciding_and_rewriting_need_nothing_of_the_router() -> None:
    tree = ast.parse(Path(decision_module.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"__future__", "collections.abc", "dataclasses", "typing", "scd_trt.config"}
