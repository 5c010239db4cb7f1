"""Brings one prompt's codes from the prefill to the decode worker: decide, expect, prefill, landed.

    1. decision     `decision.decide`; "local" ends here
    2. expect       the decode worker makes room; a prefix that it has already ends here ("stored")
    3. prefill      the prefill worker runs the very token ids, one token of answer; its connector pushes the codes
    4. landed       the decode worker has verified all of them

3 and 4 are watched together: codes that failed end the wait for the prefill, a prefill that failed ends the wait for codes.
Whatever goes wrong, nothing is raised: the decode worker prefills by itself, and `Handover.fallback` says why. Only
cancellation (the client left) passes through, and cancels the prefill. A transfer that is given up is cancelled at the
decode worker too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from scd_trt import kv_cache
from scd_trt.config import DecisionSettings, PairConfig
from scd_trt.serving.decision import Decision, DecisionInputs, Measurements, PrefillHealth, decide
from scd_trt.serving.handover import CodeTerms, Handover, cached_tokens
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.worker_clients import PrefillClient, worker_url
from scd_trt.transfer.connection import ControlError, UnreachableError
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.messages import MAX_KEYS, TransferReport

logger = logging.getLogger(__name__)

_PREFILL_IS_DOWN = {"prefill_unreachable", "prefill_died", "prefill_timeout", "producer_unreachable", "producer_gone"}
EXPECT_TIMEOUT_S = 5.0
# Codes can land a moment before the prefill's answer arrives. Waiting for it keeps its connection usable; a prefill
# worker that hangs after its codes have landed costs no more than this.
PREFILL_GRACE_S = 0.25


class Courier:
    """Brings codes to the decode worker. One per router, for one event loop.

    Args:
        client: for requests to the prefill worker; not closed here.
        control: of the decode worker; not closed here.
    """

    def __init__(
        self,
        config: PairConfig,
        *,
        terms: CodeTerms,
        settings: DecisionSettings,
        client: httpx.AsyncClient,
        control: ControlClient,
        metrics: ServerMetrics,
    ) -> None:
        self._config = config
        self._terms = terms
        self._settings = settings
        self._control = control
        self._metrics = metrics
        self._health = PrefillHealth(settings.prefill_retry_s)
        self._measurements = Measurements(ttl_s=settings.measurement_ttl_s)
        self._terms_agreed = False
        self._cancelling: set[asyncio.Task[None]] = set()
        prefill, timeout_s = config.servers.prefill, config.servers.router.prefill_timeout_s
        url = worker_url(prefill.host, prefill.port)
        self._prefill = PrefillClient(client, url, model=config.name, timeout_s=timeout_s)
        self._producer = f"{prefill.host}:{prefill.control_port}"
        metrics.set_translator(terms.fingerprint)

    async def bring(
        self, handover: Handover, prompts: Sequence[Sequence[int]], *, salt: str, headers: Mapping[str, str]
    ) -> None:
        """Try to have the codes of a prompt at the decode worker; fills `handover`. Never raises but for cancellation."""
        decision = handover.decision = self._decide(prompts)
        logger.debug("transfer %s: %s", handover.transfer_id, decision)
        if decision.choice == "local":
            handover.fallback = decision.reason
            return
        handover.choice = "send"
        self._metrics.transfer_began()
        try:
            handover.fallback = await self._send(handover, prompts[0], salt, headers)
        except asyncio.CancelledError:
            self._give_up(handover)
            raise
        finally:
            self._metrics.transfer_ended()
        if handover.fallback is not None:
            self._give_up(handover)
        if handover.fallback in _PREFILL_IS_DOWN:
            self._health.failed(time.monotonic())
        elif handover.choice == "send" and handover.fallback in (None, "guarded"):
            self._health.succeeded()

    async def close(self) -> None:
        """Wait for what is still being told to the decode worker."""
        await asyncio.gather(*self._cancelling)

    async def settle(self, handover: Handover, *, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """After the decode worker's answer: fetch the report, count everything, learn rates; returns `usage.scd`.

        Args:
            usage: of the answer, None where it was not told.
        """
        if handover.choice != "local":
            handover.report = await self._report(handover.transfer_id)
        tokens_per_block = self._config.engine.tokens_per_block
        if handover.guarded_blocks:
            num_kept = handover.granted_blocks - handover.guarded_blocks
            self._metrics.count_guarded(num_kept=num_kept, num_refused=handover.guarded_blocks)
        if handover.is_partly_guarded:
            handover.fallback = None
        elif handover.fallback is None and handover.is_unmatched(usage, tokens_per_block):
            handover.fallback = "not_matched"
        if handover.fallback is not None:
            self._metrics.count_fallback(handover.fallback)
        if handover.choice != "local":
            self._metrics.count_transfer(handover.sample(self._terms, tokens_per_block))
        self._learn(handover, usage)
        return handover.as_usage(self._terms, tokens_per_block)

    def _decide(self, prompts: Sequence[Sequence[int]]) -> Decision:
        tokens_per_block, now_s = self._config.engine.tokens_per_block, time.monotonic()
        prompt_tokens = sum(map(len, prompts))
        sent_tokens = tokens_per_block * kv_cache.num_sent_blocks(prompt_tokens, tokens_per_block)
        inputs = DecisionInputs(
            num_prompts=len(prompts),
            prompt_tokens=prompt_tokens,
            sent_tokens=sent_tokens,
            sent_bytes=sent_tokens * self._terms.bytes_per_token,
            is_prefill_alive=self._health.is_alive(now_s),
            rates=self._measurements.rates(now_s),
        )
        return decide(inputs, self._settings)

    async def _send(
        self, handover: Handover, prompt: Sequence[int], salt: str, headers: Mapping[str, str]
    ) -> str | None:
        keys = await asyncio.to_thread(self._keys, prompt, salt)
        if len(keys) > MAX_KEYS:
            return "too_long"
        try:
            reason = await self._agree_terms() or await self._expect(handover, keys)
        except UnreachableError as error:
            logger.warning("transfer %s: %s", handover.transfer_id, error)
            self._terms_agreed = False
            return "control_unreachable"
        except ControlError as error:
            logger.warning("transfer %s: %s", handover.transfer_id, error)
            return "control_error"
        if reason is not None or handover.choice == "stored":
            return reason
        return await self._prefill_and_land(handover, prompt, salt, headers)

    def _keys(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        tokens_per_block = self._config.engine.tokens_per_block
        scope = kv_cache.scope(fingerprint=self._terms.fingerprint, salt=salt)
        keys = kv_cache.block_keys(prompt, tokens_per_block=tokens_per_block, scope=scope)
        return keys[: kv_cache.num_sent_blocks(len(prompt), tokens_per_block)]

    async def _agree_terms(self) -> str | None:
        """Once per connection: the decode worker must have loaded the translator whose fingerprint is in our keys."""
        if self._terms_agreed:
            return None
        status = await self._control.status()
        if status.fingerprint != self._terms.fingerprint:
            logger.error(
                "decode worker %s has translator %s, this router %s; restart one of them with the other's artifact",
                self._control.address,
                status.fingerprint,
                self._terms.fingerprint,
            )
            return "fingerprint_mismatch"
        self._metrics.set_transport(status.lane)
        self._terms_agreed = True
        return None

    async def _expect(self, handover: Handover, keys: list[bytes]) -> str | None:
        begin_s = time.perf_counter()
        expected = await self._control.expect(
            handover.transfer_id, keys, producer=self._producer, timeout_s=EXPECT_TIMEOUT_S
        )
        handover.stages_s["expect"] = time.perf_counter() - begin_s
        handover.stored_blocks, handover.granted_blocks = expected.num_stored, expected.num_granted
        if expected.num_stored >= len(keys):
            handover.choice = "stored"
            return None
        if expected.num_granted == 0:
            logger.warning("transfer %s: not granted: %s %s", handover.transfer_id, expected.reason, expected.text)
            return expected.reason or "not_granted"
        return None

    async def _prefill_and_land(
        self, handover: Handover, prompt: Sequence[int], salt: str, headers: Mapping[str, str]
    ) -> str | None:
        start_s = time.perf_counter()
        prefill = asyncio.create_task(self._run_prefill(handover, prompt, salt, headers))
        landing = asyncio.create_task(self._landing(handover))
        try:
            await asyncio.wait((prefill, landing), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and (reason := prefill.result()) is not None:
                return reason
            if not landing.done():
                begin_s = time.perf_counter()
                await asyncio.wait((landing,), timeout=self._config.servers.router.landing_timeout_s)
                handover.stages_s["wait"] = time.perf_counter() - begin_s
            if not landing.done():
                return "landing_timeout"
            if landing.result() is None:
                landed_s = time.perf_counter() - start_s
                handover.stages_s.setdefault("wait", 0.0)
                await asyncio.wait((prefill,), timeout=PREFILL_GRACE_S)
                if not prefill.done():
                    # all that this request needed of it is there; its one token is not
                    handover.stages_s["prefill"] = landed_s
                    handover.prefill_computed_tokens = handover.prompt_tokens
            return landing.result()
        finally:
            prefill.cancel()
            landing.cancel()
            await asyncio.gather(prefill, landing, return_exceptions=True)

    async def _run_prefill(
        self, handover: Handover, prompt: Sequence[int], salt: str, headers: Mapping[str, str]
    ) -> str | None:
        """Run the prompt on the prefill worker; why it failed, or None."""
        result = await self._prefill.run(prompt, salt=salt, headers=headers)
        if result.reason is None:
            handover.stages_s["prefill"] = result.seconds
            handover.prefill_computed_tokens = handover.prompt_tokens - result.cached_tokens
        return result.reason

    async def _landing(self, handover: Handover) -> str | None:
        """Wait until the codes are at the decode worker; why they are not, or None."""
        router = self._config.servers.router
        try:
            waited = await self._control.wait(
                handover.transfer_id, timeout_s=router.prefill_timeout_s + router.landing_timeout_s
            )
        except ControlError as error:
            logger.warning("transfer %s: %s", handover.transfer_id, error)
            return "control_unreachable" if isinstance(error, UnreachableError) else "control_error"
        if waited.state == "landed":
            return None
        return waited.reason or "landing_timeout"

    def _give_up(self, handover: Handover) -> None:
        """Tell the decode worker that nobody waits any more, so that its memory is free before the lease ends.

        Runs beside the request: the client is not made to wait for it.
        """
        if handover.granted_blocks:
            task = asyncio.create_task(self._cancel(handover.transfer_id))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def _cancel(self, transfer_id: str) -> None:
        try:
            await self._control.cancel(transfer_id)
        except ControlError as error:
            logger.debug("transfer %s: not cancelled: %s", transfer_id, error)

    async def _report(self, transfer_id: str) -> TransferReport | None:
        try:
            return await self._control.report(transfer_id)
        except ControlError as error:
            logger.warning("transfer %s: no report: %s", transfer_id, error)
            return None

    def _learn(self, handover: Handover, usage: Mapping[str, Any] | None) -> None:
        now_s, report = time.monotonic(), handover.report
        if handover.fallback is None and report is not None and report.transfer_ms is not None:
            self._measurements.note_transfer(report.bytes_received, report.transfer_ms / 1000, now_s=now_s)
        if handover.fallback is None and report is not None and report.decode_ms and report.matched_tokens:
            self._measurements.note_reconstruction(report.matched_tokens, report.decode_ms / 1000, now_s=now_s)
        if handover.choice == "send" and "prefill" in handover.stages_s:
            computed = handover.prefill_computed_tokens
            self._measurements.note_prefill(computed, handover.stages_s["prefill"], now_s=now_s)
        if handover.choice == "local" and usage is not None and "first_token" in handover.stages_s:
            computed = handover.prompt_tokens - cached_tokens(usage)
            self._measurements.note_local(computed, handover.stages_s["first_token"], now_s=now_s)
