"""Metrics: names and units as dashboards expect them, labels bounded, processes apart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scd_trt.serving.metrics import HttpMetrics, ServerMetrics, TransferSample


def values(metrics: ServerMetrics) -> dict[str, float]:
    """Samples by their text, without time stamps."""
    text = metrics.render()[0].decode()
    return {
        f"{sample.name}{sample.labels or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_all_names_are_there_from_the_start() -> None:
    text = ServerMetrics().render()[0].decode()
    for name in (
        "scd_requests_total",
        "scd_request_seconds",
        "scd_first_token_seconds",
        "scd_tokens_total",
        "scd_kv_bytes_total",
        "scd_compression_ratio",
        "scd_encode_seconds",
        "scd_transfer_seconds",
        "scd_decode_seconds",
        "scd_transfers_total",
        "scd_fallback_total",
        "scd_code_store_bytes",
        "scd_engine_requests",
        "scd_engine_free_blocks",
        "scd_inflight_transfers",
        "scd_translator_info",
        "scd_transport_info",
    ):
        assert f"# TYPE {name} " in text


def test_a_transfer_is_counted_once_in_each_place() -> None:
    metrics = ServerMetrics()
    metrics.count_transfer(TransferSample("landed", sent_bytes=100, dense_bytes=400, encode_s=0.002, transfer_s=0.3))
    metrics.count_transfer(TransferSample("stored", sent_bytes=0, dense_bytes=0, decode_s=0.01))
    seen = values(metrics)
    assert seen["scd_kv_bytes_total{'kind': 'sent'}"] == 100
    assert seen["scd_kv_bytes_total{'kind': 'dense_equivalent'}"] == 400
    assert seen["scd_compression_ratio"] == 4.0  # a transfer that sent nothing leaves it
    assert seen["scd_transfers_total{'outcome': 'landed'}"] == seen["scd_transfers_total{'outcome': 'stored'}"] == 1
    assert (seen["scd_encode_seconds_count"], seen["scd_encode_seconds_sum"]) == (1, 0.002)
    assert (seen["scd_transfer_seconds_sum"], seen["scd_decode_seconds_sum"]) == (0.3, 0.01)


def test_labels_are_bounded() -> None:
    metrics = ServerMetrics(fallback_reasons=("timeout",))
    for reason in ("timeout", "made up", "also made up"):
        metrics.count_fallback(reason)
    metrics.count_request("/v1/completions", status=418, seconds=0.1)
    metrics.count_request("/secret/path", status=200, seconds=0.1)
    seen = values(metrics)
    assert seen["scd_fallback_total{'reason': 'timeout'}"] == 1
    assert seen["scd_fallback_total{'reason': 'other'}"] == 2
    assert seen["scd_requests_total{'endpoint': 'completions', 'status': 'other'}"] == 1
    assert seen["scd_requests_total{'endpoint': 'other', 'status': '200'}"] == 1


def test_gauges_ask_at_every_scrape() -> None:
    metrics, held = ServerMetrics(), [5.0]
    metrics.watch_code_store(lambda: held[0])
    metrics.watch_transfers(lambda: 2 * held[0])
    held[0] = 7.0
    assert values(metrics)["scd_code_store_bytes"] == 7.0
    assert values(metrics)["scd_inflight_transfers"] == 14.0


def test_info_has_one_series_at_a_time() -> None:
    metrics = ServerMetrics()
    for fingerprint in ("aa", "bb"):
        metrics.set_translator(fingerprint)
    metrics.set_transport("tcp")
    seen = values(metrics)
    assert [name for name in seen if name.startswith("scd_translator_info")] == [
        "scd_translator_info{'fingerprint': 'bb'}"
    ]
    assert seen["scd_transport_info{'lane': 'tcp'}"] == 1


def test_registries_are_apart() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    first.transfer_began()
    assert (values(first)["scd_inflight_transfers"], values(second)["scd_inflight_transfers"]) == (1.0, 0.0)
    first.transfer_ended()
    assert values(first)["scd_inflight_transfers"] == 0.0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([("http.response.start", 200), ("http.response.body", False)], "200"),
        ([("http.response.start", 200), ("http.response.body", True)], "499"),  # a stream that was cut
        ([("http.response.start", 503), ("http.response.body", False)], "503"),
        ([], "500"),
    ],
)
def test_http_layer_counts_how_an_answer_ended(sent: list[tuple[str, Any]], status: str) -> None:
    metrics = ServerMetrics()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for kind, value in sent:
            await send({"type": kind, "status" if kind.endswith("start") else "more_body": value})
        if not sent:
            raise RuntimeError("a bug")

    async def run() -> None:
        async def swallow(_: Any) -> None:
            return

        layer = HttpMetrics(app, metrics)
        await layer({"type": "http", "path": "/v1/completions"}, swallow, swallow)

    if sent:
        asyncio.run(run())
    else:
        with pytest.raises(RuntimeError, match="a bug"):
            asyncio.run(run())
    assert values(metrics)[f"scd_requests_total{{'endpoint': 'completions', 'status': '{status}'}}"] == 1
