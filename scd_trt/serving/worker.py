"""One server process: build it from a pair file, serve until SIGTERM, take it down in order.

Owns the wiring and nothing else. Order of construction: model, translator, checks that they belong together, session,
engine, HTTP server; a mistake ends the process before a port is open. Order on SIGTERM or SIGINT: the worker drains (health
says 503, grants and requests are refused but for transfers under way, those end), then HTTP server, engine, session. The
process exits with status 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import torch
import uvicorn
from fastapi import FastAPI

from scd_trt import translator as translators
from scd_trt.config import ModelConfig, RouterConfig, ScdError, ServedPair, WorkerConfig
from scd_trt.model_spec import ModelSpec
from scd_trt.models import LoadedModel, load_model, materialize
from scd_trt.serving.api import create_app
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_runtime import ConnectorRuntime, Role
from scd_trt.serving.cpu_engine import CpuEngine
from scd_trt.serving.draining import Admission, AdmissionLayer, DrainingServer
from scd_trt.serving.handover import REASONS
from scd_trt.serving.launcher import check_port_free
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.router import create_router
from scd_trt.serving.routes import route_of
from scd_trt.transfer.session import Consumer, Producer
from scd_trt.translator import Translator

logger = logging.getLogger(__name__)

STALLED_STEP_S = 120.0
"""An engine whose last step is older than this counts as stuck."""

DRAIN_S = 25.0
"""Longest wait for transfers and requests under way at SIGTERM; those that are left then are cancelled. Process managers
commonly wait for 30 s before they kill."""

LAST_CALL_S = 0.5
"""A router sends a request as soon as its codes have landed, and asks for the report as soon as the answer is there."""

HTTP_STOP_S = 1
"""Longest wait of the HTTP server for its last connections, once all is drained."""


@dataclass
class Worker:
    """A prefill or decode worker without its HTTP server: what tests drive in process."""

    app: FastAPI
    engine: CpuEngine
    runtime: ConnectorRuntime
    admission: Admission

    async def drain(self) -> None:
        """Take nothing new, and wait until what is under way is over, at most `DRAIN_S`."""
        deadline_s = time.monotonic() + DRAIN_S
        self.admission.close()
        session = _session(self.runtime)
        is_over = await asyncio.to_thread(session.drain, timeout_s=DRAIN_S)
        is_quiet = await self.admission.quiet(for_s=LAST_CALL_S, timeout_s=deadline_s - time.monotonic())
        if not (is_over and is_quiet):
            logger.warning("%s worker: not drained after %g s; what is left is cancelled", self.runtime.role, DRAIN_S)

    def close(self) -> None:
        """End the engine, then the session."""
        self.engine.close()
        self.runtime.close()


def build_worker(config: ServedPair, role: Role) -> Worker:
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
    metrics.watch_engine(
        lambda: engine.stats().running, lambda: engine.stats().waiting, lambda: engine.stats().blocks_free
    )
    runtime.on_cut = lambda kept, refused: metrics.count_guarded(num_kept=kept, num_refused=refused)
    admission = Admission(_session(runtime).holds, metrics=metrics)
    app = create_app(
        engine,
        model_id=config.name,
        metrics=metrics,
        is_healthy=lambda: not admission.is_draining and engine.stats().last_step_age_s < STALLED_STEP_S,
    )
    app.add_middleware(AdmissionLayer, admission=admission)
    return Worker(app, engine, runtime, admission)


def check_fits(translator: Translator, spec: ModelSpec, role: Role) -> None:
    """Raise `TranslatorError` unless the translator was fitted for the model that this role runs."""
    if role == "prefill":
        translator.check_producer(spec)
    else:
        translator.check_consumer(spec)


def run_worker(config: ServedPair, role: Role) -> None:
    """Serve a role until SIGTERM."""
    settings = config.servers.prefill if role == "prefill" else config.servers.decode
    check_port_free(f"servers.{role}.port", settings.host, settings.port)
    torch.set_num_threads(config.engine.num_threads)
    worker = build_worker(config, role)
    logger.info("%s worker of %s: control channel on port %d", role, config.name, settings.control_port)
    try:
        server = _server_config(worker.app, settings, stop_s=HTTP_STOP_S)
        DrainingServer(server, worker.drain).run()
    finally:
        worker.close()


def run_router(config: ServedPair, *more: ServedPair) -> None:
    """Serve the router of one or more pairs until SIGTERM; address and limits of the process are the first pair's."""
    settings = config.servers.router
    check_port_free("servers.router.port", settings.host, settings.port)
    routes = [route_of(each) for each in (config, *more)]
    app = create_router(routes, metrics=ServerMetrics(fallback_reasons=REASONS))
    # Its workers are behind it, so it has nothing to hand over: the server itself waits for the requests under way.
    DrainingServer(_server_config(app, settings, stop_s=int(DRAIN_S)), _nothing).run()


def _session(runtime: ConnectorRuntime) -> Producer | Consumer:
    return runtime.require_producer() if runtime.role == "prefill" else runtime.require_consumer()


async def _nothing() -> None:
    """A drain without anything to wait for."""


def _load(section: ModelConfig) -> LoadedModel:
    return load_model(materialize(section.model, adapter=section.adapter), dtype=section.dtype)


def _server_config(app: FastAPI, address: WorkerConfig | RouterConfig, *, stop_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app, host=address.host, port=address.port, log_level="warning", timeout_graceful_shutdown=stop_s
    )
