"""Brings one prompt's codes from a prefill to a decode worker: decide, expect, prefill, landed.

    1. decision     `decision.decide` on what the router guesses; "local" ends here, and so does a prompt mostly cached
    2. expect       the decode worker makes room and says what it has; the decision is made again on that, and a prefix
                    that is there already, or is not worth sending, ends here
    3. prefill      the prefill worker runs the very token ids, one token of answer; its connector pushes the codes
    4. landed       the decode worker has verified all of them

3 and 4 are watched together: codes that failed end the wait for the prefill, a prefill that failed ends the wait for codes.
Where a prefill worker is down or busy, another one is tried, within the time that `bring` was given and at most
`max_retries` times; each try is a transfer of its own. Whatever goes wrong, nothing is raised: the decode worker prefills
by itself, and `Handover.fallback` says why. Only cancellation (the client left) passes through, and cancels the prefill. A
transfer that is given up is cancelled at the decode worker too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from scd_trt import kv_cache
from scd_trt.serving.decision import Decision, DecisionInputs, decide
from scd_trt.serving.handover import Handover, cached_tokens
from scd_trt.serving.measurements import Measurements
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.rotation import MAX_WORKERS, Rotation, Worker
from scd_trt.serving.routes import Route
from scd_trt.serving.trace_context import TraceContext
from scd_trt.serving.worker_clients import TRANSFER_HEADER, PrefillClient
from scd_trt.transfer.connection import ControlError, UnreachableError
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.messages import MAX_KEYS, TransferReport

logger = logging.getLogger(__name__)

_PREFILL_IS_DOWN = {
    "prefill_unreachable",
    "prefill_died",
    "prefill_timeout",
    "producer_unreachable",
    "producer_gone",
    "draining",
}
_TRY_ANOTHER = (_PREFILL_IS_DOWN | {"prefill_busy"}) - {"prefill_timeout"}
EXPECT_TIMEOUT_S = 5.0
# Codes can land a moment before the prefill's answer arrives. Waiting for it keeps its connection usable; a prefill
# worker that hangs after its codes have landed costs no more than this.
PREFILL_GRACE_S = 0.25


@dataclass(frozen=True)
class Prompted:
    """The prompts of one request, cut into blocks.

    Attributes:
        keys: of the blocks that may travel; empty where there are several prompts.
    """

    prompts: Sequence[Sequence[int]]
    salt: str
    keys: Sequence[bytes]
    trace: TraceContext

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))


@dataclass
class _DecodeControl:
    """The control channel of one decode worker.

    Attributes:
        terms_agreed: once per connection: it has loaded the translator whose fingerprint is in our keys.
    """

    client: ControlClient
    terms_agreed: bool = False


@dataclass
class _Try:
    """One way over which codes are to be brought."""

    handover: Handover
    prompted: Prompted
    decode: Worker
    deadline_s: float
    excluded: set[str] = field(default_factory=set)

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()


class Courier:
    """Brings codes to the decode workers of one pair. For one event loop.

    Args:
        prefill: the prefill workers; the decode worker is chosen by the caller.
        client: for requests to the prefill workers; not closed here.
    """

    def __init__(
        self,
        route: Route,
        *,
        prefill: Rotation,
        decode: Rotation,
        client: httpx.AsyncClient,
        metrics: ServerMetrics,
    ) -> None:
        self._route = route
        self._terms = route.terms
        self._router = route.config.servers.router
        self._tokens_per_block = route.config.engine.tokens_per_block
        self._prefill = prefill
        self._decode = decode
        self._metrics = metrics
        self._measurements = Measurements(ttl_s=self._router.decision.measurement_ttl_s)
        self._controls: dict[str, _DecodeControl] = {}
        self._beside: set[asyncio.Task[None]] = set()
        self._client = PrefillClient(client, model=route.model)
        metrics.add_translator(route.terms.fingerprint)

    def prompted(self, prompts: Sequence[Sequence[int]], salt: str, trace: TraceContext) -> Prompted:
        """Cut prompts into blocks; slow for long ones, so not for an event loop."""
        keys = self._keys(prompts[0], salt) if len(prompts) == 1 else []
        return Prompted(prompts, salt, keys, trace)

    async def bring(self, handover: Handover, prompted: Prompted, decode: Worker, *, timeout_s: float) -> None:
        """Try to have the codes of a prompt at a decode worker; fills `handover`. Never raises but for cancellation."""
        way = _Try(handover, prompted, decode, time.monotonic() + timeout_s)
        for num_tries in range(1 + self._router.max_retries):
            if num_tries:
                handover.begin_again()
                self._metrics.count_retry("prefill")
            worker = self._prefill.pick(prompted.keys, now_s=time.monotonic(), exclude=way.excluded)
            await self._bring_from(worker, way)
            if worker is None or handover.fallback not in _TRY_ANOTHER or way.left_s() <= 0:
                return
            way.excluded.add(worker.url)
            if self._prefill.pick(prompted.keys, now_s=time.monotonic(), exclude=way.excluded) is None:
                return

    async def close(self) -> None:
        """Wait for what is still being told to the decode workers, and close their channels."""
        while self._beside:
            await asyncio.gather(*self._beside)
        for control in self._controls.values():
            await control.client.close()

    async def settle(
        self, handover: Handover, prompted: Prompted, decode: Worker, *, usage: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """After the decode worker's answer: fetch the report, count everything, learn rates; returns `usage.scd`.

        Args:
            usage: of the answer, None where it was not told.
        """
        if handover.is_expected:
            handover.report = await self._report(handover.transfer_id, decode)
        if handover.guarded_blocks:
            num_kept = handover.granted_blocks - handover.guarded_blocks
            self._metrics.count_guarded(num_kept=num_kept, num_refused=handover.guarded_blocks)
        if handover.is_partly_guarded:
            handover.fallback = None
        elif handover.fallback is None and handover.is_unmatched(usage, self._tokens_per_block):
            handover.fallback = "not_matched"
        if handover.fallback is not None:
            self._metrics.count_fallback(handover.fallback)
        if handover.choice != "local":
            self._metrics.count_transfer(handover.sample(self._terms, self._tokens_per_block))
        self._learn(handover, decode, usage)
        self._remember(handover, prompted, decode, usage)
        return handover.as_usage(self._terms, self._tokens_per_block)

    def settle_soon(self, handover: Handover, prompted: Prompted, decode: Worker) -> None:
        """The same beside the request, where nobody waits for the account. Ends with the deadlines of the control channel."""

        async def settle() -> None:
            await self.settle(handover, prompted, decode, usage=None)

        self._run_beside(settle())

    async def _bring_from(self, worker: Worker | None, way: _Try) -> None:
        """One try; the prefill worker is None where none is in rotation."""
        handover = way.handover
        decision = handover.decision = self._decide(worker, way)
        logger.debug("transfer %s: %s", handover.transfer_id, decision)
        if worker is None or decision.reason not in ("cheaper", "unmeasured", "stored"):
            self._stay(handover, decision)
            self._metrics.count_decision(decision)
            return
        handover.choice = "send"
        self._metrics.transfer_began()
        try:
            with worker.busy():
                handover.fallback = await self._send(worker, way)
        except asyncio.CancelledError:
            self._give_up(handover, way.decode)
            raise
        finally:
            self._metrics.transfer_ended()
            self._metrics.count_decision(handover.decision)
        if handover.fallback is not None or handover.choice != "send":
            self._give_up(handover, way.decode)
        if handover.fallback in _PREFILL_IS_DOWN:
            self._prefill.failed(worker, now_s=time.monotonic())
        elif handover.choice == "send" and handover.fallback in (None, "guarded"):
            self._prefill.succeeded(worker)

    def _stay(self, handover: Handover, decision: Decision) -> None:
        """Nothing is sent."""
        handover.choice = decision.choice if decision.choice != "send" else "local"
        if handover.choice == "local":
            handover.fallback = decision.reason if decision.choice == "local" else "prefill_down"

    def _decide(self, worker: Worker | None, way: _Try, *, stored_blocks: int = 0) -> Decision:
        """Decide on what is known; `stored_blocks` are codes that the decode worker says it has."""
        prompted, tokens_per_block, now_s = way.prompted, self._tokens_per_block, time.monotonic()
        num_blocks = kv_cache.num_sent_blocks(prompted.num_tokens, tokens_per_block)
        guessed = self._decode.index.depths(prompted.keys).get(way.decode.url, 0)
        have = max(stored_blocks, guessed)
        prefill_url = None if worker is None else worker.url
        at_prefill = 0 if prefill_url is None else self._prefill.index.depths(prompted.keys).get(prefill_url, 0)
        sent_tokens = tokens_per_block * (num_blocks - (stored_blocks if way.handover.is_expected else have))
        inputs = DecisionInputs(
            num_prompts=len(prompted.prompts),
            prompt_tokens=prompted.num_tokens,
            sent_tokens=sent_tokens,
            sent_bytes=sent_tokens * self._terms.bytes_per_token,
            is_prefill_alive=worker is not None,
            rates=self._measurements.rates(prefill_url, way.decode.url, now_s=now_s),
            stored_tokens=have * tokens_per_block,
            stored_code_tokens=stored_blocks * tokens_per_block,
            prefill_cached_tokens=at_prefill * tokens_per_block,
            consumer_speed=self._route.consumer_speed,
        )
        return decide(inputs, self._router.decision)

    async def _send(self, worker: Worker, way: _Try) -> str | None:
        handover, keys = way.handover, way.prompted.keys
        if len(keys) > MAX_KEYS:
            return "too_long"
        control = self._control(way.decode)
        try:
            reason = await self._agree_terms(control) or await self._expect(control, worker, way)
        except UnreachableError as error:
            logger.warning("transfer %s: %s", handover.transfer_id, error)
            control.terms_agreed = handover.is_expected = False
            return "control_unreachable"
        except ControlError as error:
            logger.warning("transfer %s: %s", handover.transfer_id, error)
            return "control_error"
        if reason is not None or handover.choice != "send":
            return reason
        return await self._prefill_and_land(worker, way)

    def _keys(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        scope = kv_cache.scope(fingerprint=self._terms.fingerprint, salt=salt)
        keys = kv_cache.block_keys(prompt, tokens_per_block=self._tokens_per_block, scope=scope)
        return keys[: kv_cache.num_sent_blocks(len(prompt), self._tokens_per_block)]

    def _control(self, decode: Worker) -> _DecodeControl:
        address = decode.endpoint.control
        if address not in self._controls:
            self._close_left_behind()
            self._controls[address] = _DecodeControl(ControlClient(address, self._route.config.control))
        return self._controls[address]

    def _close_left_behind(self) -> None:
        """Where workers come and go, the channels of those that went are closed before there are too many."""
        if len(self._controls) < MAX_WORKERS:
            return
        present = {worker.endpoint.control for worker in self._decode.workers}
        for address in self._controls.keys() - present:
            self._run_beside(self._controls.pop(address).client.close())

    async def _agree_terms(self, control: _DecodeControl) -> str | None:
        if control.terms_agreed:
            return None
        status = await control.client.status()
        if status.fingerprint != self._terms.fingerprint:
            logger.error(
                "decode worker %s has translator %s, this router %s; restart one of them with the other's artifact",
                control.client.address,
                status.fingerprint,
                self._terms.fingerprint,
            )
            return "fingerprint_mismatch"
        self._metrics.set_transport(status.lane)
        control.terms_agreed = True
        return None

    async def _expect(self, control: _DecodeControl, worker: Worker, way: _Try) -> str | None:
        """Have room made, and decide again on what is there; why nothing will come, or None."""
        handover, keys = way.handover, list(way.prompted.keys)
        begin_s = time.perf_counter()
        # from here on a report exists, even where the answer is lost
        handover.is_expected = True
        expected = await control.client.expect(
            handover.transfer_id,
            keys,
            producer=worker.endpoint.control,
            timeout_s=min(EXPECT_TIMEOUT_S, max(0.0, way.left_s())),
        )
        handover.stages_s["expect"] = time.perf_counter() - begin_s
        handover.stored_blocks, handover.granted_blocks = expected.num_stored, expected.num_granted
        if expected.num_stored < len(keys) and expected.num_granted == 0:
            logger.warning("transfer %s: not granted: %s %s", handover.transfer_id, expected.reason, expected.text)
            return expected.reason or "not_granted"
        decision = handover.decision = self._decide(worker, way, stored_blocks=expected.num_stored)
        if decision.choice != "send":
            self._stay(handover, decision)
        return handover.fallback

    async def _prefill_and_land(self, worker: Worker, way: _Try) -> str | None:
        handover, start_s = way.handover, time.perf_counter()
        handover.prefill_url = worker.url
        prefill = asyncio.create_task(self._run_prefill(worker, way))
        landing = asyncio.create_task(self._landing(way))
        try:
            await asyncio.wait((prefill, landing), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and (reason := prefill.result()) is not None:
                return reason
            if not landing.done():
                begin_s = time.perf_counter()
                await asyncio.wait((landing,), timeout=self._router.landing_timeout_s)
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

    async def _run_prefill(self, worker: Worker, way: _Try) -> str | None:
        """Run the prompt on the prefill worker; why it failed, or None."""
        handover, prompted = way.handover, way.prompted
        result = await self._client.run(
            worker.url,
            prompted.prompts[0],
            salt=prompted.salt,
            headers=prompted.trace.next_hop() | {TRANSFER_HEADER: handover.transfer_id},
            timeout_s=max(0.001, min(self._router.prefill_timeout_s, way.left_s())),
        )
        if result.reason is None:
            handover.stages_s["prefill"] = result.seconds
            handover.prefill_computed_tokens = handover.prompt_tokens - result.cached_tokens
        return result.reason

    async def _landing(self, way: _Try) -> str | None:
        """Wait until the codes are at the decode worker; why they are not, or None."""
        timeout_s = self._router.prefill_timeout_s + self._router.landing_timeout_s
        try:
            waited = await self._control(way.decode).client.wait(way.handover.transfer_id, timeout_s=timeout_s)
        except ControlError as error:
            logger.warning("transfer %s: %s", way.handover.transfer_id, error)
            return "control_unreachable" if isinstance(error, UnreachableError) else "control_error"
        if waited.state == "landed":
            return None
        return waited.reason or "landing_timeout"

    def _give_up(self, handover: Handover, decode: Worker) -> None:
        """Tell the decode worker that nobody waits any more, so that its memory is free before the lease ends.

        Runs beside the request: the client is not made to wait for it.
        """
        if handover.is_expected and handover.granted_blocks:
            self._run_beside(self._cancel(handover.transfer_id, decode))

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _cancel(self, transfer_id: str, decode: Worker) -> None:
        try:
            await self._control(decode).client.cancel(transfer_id)
        except ControlError as error:
            logger.debug("transfer %s: not cancelled: %s", transfer_id, error)

    async def _report(self, transfer_id: str, decode: Worker) -> TransferReport | None:
        try:
            return await self._control(decode).client.report(transfer_id)
        except ControlError as error:
            logger.warning("transfer %s: no report: %s", transfer_id, error)
            return None

    def _learn(self, handover: Handover, decode: Worker, usage: Mapping[str, Any] | None) -> None:
        now_s, report, measured = time.monotonic(), handover.report, self._measurements
        prefill_url, arrived = handover.prefill_url, handover.fallback is None and report is not None
        if arrived and report is not None and report.transfer_ms is not None and prefill_url is not None:
            seconds = report.transfer_ms / 1000
            measured.note_transfer(prefill_url, decode.url, report.bytes_received, seconds, now_s=now_s)
        if arrived and report is not None and report.decode_ms and report.matched_tokens:
            measured.note_reconstruction(decode.url, report.matched_tokens, report.decode_ms / 1000, now_s=now_s)
        if prefill_url is not None and "prefill" in handover.stages_s:
            computed = handover.prefill_computed_tokens
            measured.note_prefill(prefill_url, computed, handover.stages_s["prefill"], now_s=now_s)
        if handover.fallback is not None and usage is not None and handover.own_prefill_s is not None:
            computed = handover.prompt_tokens - cached_tokens(usage)
            if computed >= self._tokens_per_block:  # fewer take hardly longer than none
                measured.note_local(decode.url, computed, handover.own_prefill_s, now_s=now_s)
        self._metrics.show_rates(measured.rates(prefill_url, decode.url, now_s=now_s))

    def _remember(
        self, handover: Handover, prompted: Prompted, decode: Worker, usage: Mapping[str, Any] | None
    ) -> None:
        """Note who has seen this prompt, for the next choice of workers and the next guess."""
        if handover.prefill_url is not None and "prefill" in handover.stages_s:
            self._prefill.index.note(prompted.keys, handover.prefill_url)
        if usage is None or handover.decision is None:
            return
        guessed_tokens = handover.decision.inputs.stored_tokens
        if cached_tokens(usage) + self._tokens_per_block < guessed_tokens:
            # it has forgotten; a guess that stays wrong would keep codes away from it for ever
            self._decode.index.drop(prompted.keys, decode.url)
        else:
            self._decode.index.note(prompted.keys, decode.url)
