"""One server process: build it from a pair file, serve until SIGTERM, take it down in order.

Owns the wiring and nothing else. Order of construction: model, translator, checks that they belong together, session,
engine, HTTP server; a mistake ends the process before a port is open. Order on SIGTERM or SIGINT: the HTTP server stops
taking requests and lets those in progress end, then engine, then session.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import uvicorn
from fastapi import FastAPI

from scd_trt import translator as translators
from scd_trt.config import ModelConfig, PairConfig, ScdError
from scd_trt.model_spec import ModelSpec
from scd_trt.models import LoadedModel, load_model, load_tokenizer, materialize
from scd_trt.serving.api import create_app
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_runtime import ConnectorRuntime, Role
from scd_trt.serving.cpu_engine import CpuEngine
from scd_trt.serving.handover import REASONS, CodeTerms
from scd_trt.serving.launcher import check_port_free
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.router import create_router
from scd_trt.translator import Translator

logger = logging.getLogger(__name__)

STALLED_STEP_S = 120.0
"""An engine whose last step is older than this counts as stuck."""

DRAIN_S = 10
"""Longest wait for requests in progress at SIGTERM."""


@dataclass
class Worker:
    """A prefill or decode worker without its HTTP server: what tests drive in process."""

    app: FastAPI
    engine: CpuEngine
    runtime: ConnectorRuntime

    def close(self) -> None:
        """End the engine, then the session."""
        self.engine.close()
        self.runtime.close()


def build_worker(config: PairConfig, role: Role) -> Worker:
    """Load model and translator of a role, check that they fit, open the session and start the engine.

    Raises:
        ScdError: whatever does not fit, said by the part that noticed.
    """
    translator = translators.load(config.translator_path())
    loaded = _load(config.producer if role == "prefill" else config.consumer)
    check_fits(translator, loaded.spec, role)
    runtime = ConnectorRuntime.open_with(translator, config, role)
    try:
        connector = ScdConnectorScheduler(runtime), ScdConnectorWorker(runtime)
        engine = CpuEngine(loaded, config.engine, connector=connector)
    except ScdError:
        runtime.close()
        raise
    metrics = ServerMetrics()
    metrics.set_translator(translator.manifest.fingerprint)
    metrics.set_transport(runtime.lane)
    metrics.watch_code_store(lambda: runtime.store.statistics().num_bytes)
    runtime.on_cut = lambda kept, refused: metrics.count_guarded(num_kept=kept, num_refused=refused)
    app = create_app(
        engine,
        model_id=config.name,
        metrics=metrics,
        is_healthy=lambda: engine.stats().last_step_age_s < STALLED_STEP_S,
    )
    return Worker(app, engine, runtime)


def check_fits(translator: Translator, spec: ModelSpec, role: Role) -> None:
    """Raise `TranslatorError` unless the translator was fitted for the model that this role runs."""
    if role == "prefill":
        translator.check_producer(spec)
    else:
        translator.check_consumer(spec)


def run_worker(config: PairConfig, role: Role) -> None:
    """Serve a role until SIGTERM."""
    settings = config.servers.prefill if role == "prefill" else config.servers.decode
    check_port_free(f"servers.{role}.port", settings.host, settings.port)
    torch.set_num_threads(config.engine.num_threads)
    worker = build_worker(config, role)
    logger.info("%s worker of %s: control channel on port %d", role, config.name, settings.control_port)
    try:
        _serve(worker.app, settings.host, settings.port)
    finally:
        worker.close()


def run_router(config: PairConfig) -> None:
    """Serve the router until SIGTERM."""
    settings = config.servers.router
    check_port_free("servers.router.port", settings.host, settings.port)
    manifest = translators.load_manifest(config.translator_path())
    terms = CodeTerms(manifest.fingerprint, sum(manifest.bytes_per_token), manifest.dense_bytes_per_token)
    consumer = materialize(config.consumer.model, adapter=config.consumer.adapter)
    metrics = ServerMetrics(fallback_reasons=REASONS)
    app = create_router(
        config, tokenizer=load_tokenizer(consumer), terms=terms, metrics=metrics, settings=settings.decision
    )
    _serve(app, settings.host, settings.port)


def _load(section: ModelConfig) -> LoadedModel:
    return load_model(materialize(section.model, adapter=section.adapter), dtype=section.dtype)


def _serve(app: FastAPI, host: str, port: int) -> None:
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=DRAIN_S)
