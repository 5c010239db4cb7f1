"""Send or prefill locally: the cost model against sums worked by hand, and rates that are learned and forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scd_trt.config import DecisionSettings
from scd_trt.serving.decision import (
    Decision,
    DecisionInputs,
    Measurements,
    PrefillHealth,
    Rates,
    decide,
)

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


def test_the_producers_speed_stands_for_the_consumers() -> None:
    assert choose(rates={"local_tokens_per_s": None, "prefill_tokens_per_s": 250.0}).local_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("inputs", "settings", "reason"),
    [
        ({"sent_tokens": 0}, {}, "too_short"),
        ({"sent_tokens": 99}, {"min_sent_tokens": 100}, "too_short"),
        ({"is_prefill_alive": False}, {}, "prefill_down"),
        ({"num_prompts": 2}, {}, "several_prompts"),
    ],
)
def test_local_whatever_the_rates(inputs: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    decision = choose(settings, **inputs)
    assert (decision.choice, decision.reason) == ("local", reason)


def test_rates_are_averaged_and_forgotten() -> None:
    measured = Measurements(ttl_s=10.0)
    assert measured.rates(0.0) == Rates()
    measured.note_transfer(1000, 1.0, now_s=0.0)
    assert measured.rates(0.0).link_bytes_per_s == pytest.approx(1000.0)
    measured.note_transfer(2000, 1.0, now_s=5.0)
    assert measured.rates(15.0).link_bytes_per_s == pytest.approx(1300.0)  # 0.7 * 1000 + 0.3 * 2000
    assert measured.rates(15.1).link_bytes_per_s is None
    measured.note_transfer(500, 1.0, now_s=20.0)
    assert measured.rates(20.0).link_bytes_per_s == pytest.approx(500.0)  # nothing is left of the old average


def test_every_rate_has_its_own_average() -> None:
    measured = Measurements(ttl_s=10.0)
    measured.note_prefill(100, 2.0, now_s=1.0)
    measured.note_local(100, 4.0, now_s=1.0)
    measured.note_reconstruction(100, 5.0, now_s=1.0)
    rates = measured.rates(1.0)
    assert (rates.prefill_tokens_per_s, rates.local_tokens_per_s) == (50.0, 25.0)
    assert (rates.reconstruct_s_per_token, rates.link_bytes_per_s) == (0.05, None)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (5, 0.0), (5, -1.0)])
def test_a_sample_of_nothing_is_ignored(num_bytes: int, seconds: float) -> None:
    measured = Measurements(ttl_s=10.0)
    measured.note_transfer(num_bytes, seconds, now_s=1.0)
    assert measured.rates(1.0).link_bytes_per_s is None


def test_a_failed_prefill_is_left_alone_and_tried_again() -> None:
    health = PrefillHealth(retry_s=2.0)
    assert health.is_alive(0.0)
    health.failed(10.0)
    assert not health.is_alive(11.9)
    assert health.is_alive(12.0)
    health.failed(12.0)
    health.succeeded()
    assert health.is_alive(12.0)
