"""The connector on the prefill server: while a prompt runs, its KV leaves as codes, layer group by layer group.

Shapes: T tokens, B tokens per block, M hidden size, C code bytes per token of a group.

Scheduler: for each new prompt that some decode server expects (`Producer.plan`), it tells the worker, iteration by iteration,
which tokens are computed into which blocks. It never promises tokens.

Worker, for each such prompt:
- blocks whose codes the store has are sent at the first iteration, before anything is computed;
- after the last source layer of a group has run (and of the groups before it, which leave first), the blocks that this
  iteration filled are gathered, encoded and queued for sending, which does not wait for the network: codes of layer l travel
  while layer l + 1 computes;
- a block that a chunk boundary cuts is encoded when it is full; of Patch layers the attention input of its first part is
  kept until then, at most B - 1 rows for each such layer;
- where the pair is guarded (`method.guard: cut`), the encoder prices each block in each group; at the first block beyond the
  limit the prompt is cut: no group of it or of later blocks is sent from then on, and a block of which a group is missing
  is never published. Blocks before the cut stay. Nothing that was refused enters the store;
- blocks that came from the engine's own prefix cache, and whose codes the store has forgotten, are encoded from the pool.
  A Patch layer's input is not in the pool: there the push ends, and its reason becomes `not_encoded`.

The pool is read between a layer's run and the end of the forward pass only. A failed push (its peer is gone, say) is no
error here: the work on it stops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scd_trt.codec import Encoder, LayerInput, num_blocks_within
from scd_trt.kv_cache import gather_tokens
from scd_trt.serving.connector_api import ConnectorRequest, RequestData, SchedulerOutput
from scd_trt.serving.connector_runtime import ConnectorOrderError, ConnectorRuntime, request_salt
from scd_trt.transfer.session import Push
from scd_trt.transfer.store import StoreFullError
from scd_trt.translator import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefillStep:
    """What one iteration computes of a prompt whose codes are wanted.

    Attributes:
        keys: of the blocks that travel, from the prompt's start.
        block_ids: pool blocks of the sequence so far.
        start, stop: tokens that this iteration computes.
        first_row: where they begin among the rows of the iteration (all its requests, in the scheduler's order).
    """

    request_id: int
    transfer_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    start: int
    stop: int
    first_row: int


@dataclass(frozen=True)
class PrefillMetadata:
    """One iteration, from scheduler to worker: its steps, and requests that ended since the last one."""

    steps: tuple[PrefillStep, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass
class _Prompt:
    """A prompt whose codes are wanted, as the scheduler tracks it."""

    transfer_id: str
    keys: tuple[bytes, ...]
    block_ids: list[int] = field(default_factory=list)


class PrefillScheduler:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        self._runtime = runtime
        self._producer = runtime.require_producer()
        self._salts: dict[int, str] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._ended: list[int] = []

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded here; remembers the salt, which later calls do not show."""
        self._salts[request.request_id] = request_salt(request)
        return 0, False

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None:
        """Nothing to do: block ids arrive with the iteration."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PrefillMetadata:
        """Plan pushes for new prompts; say what this iteration computes of those that have one."""
        for data in scheduler_output.new_requests:
            self._plan(data)
        steps: list[PrefillStep] = []
        num_rows = 0
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            prompt = self._prompts.get(data.request_id)
            if prompt is not None and prompt.transfer_id in self._runtime.unfinished_pushes:
                steps.append(self._step(prompt, data, num_rows))
            num_rows += data.num_scheduled_tokens
        ended, self._ended = tuple(self._ended), []
        return PrefillMetadata(tuple(steps), ended)

    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool:
        """Never keeps blocks. A push that is not finished by now (request cancelled or failed) is aborted."""
        self._salts.pop(request.request_id, None)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self._ended.append(request.request_id)
            push = self._runtime.unfinished_pushes.pop(prompt.transfer_id, None)
            if push is not None:
                push.abort("aborted")
        return False

    def _plan(self, data: RequestData) -> None:
        keys = self._runtime.sent_block_keys(data.new_tokens, self._salts.get(data.request_id, ""))
        push = self._producer.plan(keys) if keys else None
        if push is not None:
            self._runtime.unfinished_pushes[push.transfer_id] = push
            self._prompts[data.request_id] = _Prompt(push.transfer_id, tuple(keys))

    def _step(self, prompt: _Prompt, data: RequestData, first_row: int) -> PrefillStep:
        prompt.block_ids.extend(data.new_block_ids)
        return PrefillStep(
            request_id=data.request_id,
            transfer_id=prompt.transfer_id,
            keys=prompt.keys,
            block_ids=tuple(prompt.block_ids),
            start=data.computed_position,
            stop=data.computed_position + data.num_scheduled_tokens,
            first_row=first_row,
        )


class PrefillWorker:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        runtime.require_producer()
        self._runtime = runtime
        self._encoder = Encoder(runtime.translator)
        self._is_guarded = runtime.is_guarded
        self._patch_layers = frozenset(runtime.translator.manifest.patch_layers)
        self._groups_ready_at = groups_ready_at(runtime.translator.manifest)
        self._pushes: dict[int, _PushProgress] = {}
        self._active: list[_PushProgress] = []
        self._view: Tensor | None = None

    @property
    def needs_attention_input(self) -> bool:
        """True with Patch layers."""
        return bool(self._patch_layers)

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Take the pool."""
        spec = self._runtime.translator.manifest.producer
        self._view = self._runtime.kv_layout(spec, kv_cache_tensor).view(kv_cache_tensor)

    def start_load_kv(self, metadata: PrefillMetadata) -> None:
        """Begin the iteration: send what the store has of new prompts, drop prompts that ended."""
        for request_id in metadata.ended:
            self._pushes.pop(request_id, None)
        self._active = []
        for step in metadata.steps:
            progress = self._pushes.get(step.request_id) or self._begin(step)
            # a step that was seen before, a failed push or a finished one needs nothing
            if progress.num_computed < step.stop and progress.push.reason is None and not progress.is_done:
                progress.step = step
                self._active.append(progress)

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Nothing to do: a prefill server loads nothing."""

    def save_attention_input(self, layer_idx: int, x_TM: Tensor) -> None:
        """Take the normalised attention input of all rows of the iteration, before the layer's `save_kv_layer`."""
        if layer_idx in self._patch_layers:
            for progress in self._active:
                first = progress.step.first_row
                progress.hold(layer_idx, x_TM[first : first + progress.step.stop - progress.step.start])

    def save_kv_layer(self, layer_idx: int) -> None:
        """Encode and send what this iteration filled, if the layer is the last that a group waits for."""
        for group in self._groups_ready_at.get(layer_idx, ()):
            for progress in self._active:
                self._encode(progress, group)

    def wait_for_save(self) -> None:
        """All reading of the pool is done by now; account for the iteration.

        Raises:
            ConnectorOrderError: blocks were filled, but not every layer was shown to `save_kv_layer`.
        """
        active, self._active = self._active, []
        for progress in active:
            self._store(progress)
            progress.advance()
            if progress.is_done:
                self._finish(progress)

    def _begin(self, step: PrefillStep) -> _PushProgress:
        push = self._runtime.unfinished_pushes[step.transfer_id]
        progress = _PushProgress(push, self._runtime.tokens_per_block, num_computed=step.start, step=step)
        self._pushes[step.request_id] = progress
        self._send_stored(progress)
        if self._patch_layers and progress.next_token < step.start:
            progress.is_cut = True
        if progress.is_done:
            self._finish(progress)
        return progress

    def _send_stored(self, progress: _PushProgress) -> None:
        blocks = progress.push.blocks
        layout = self._runtime.layout
        with self._runtime.store.pinned(progress.step.keys[blocks.start : blocks.stop]) as payloads:
            entries_N = np.frombuffer(b"".join(payloads), dtype=np.uint8).reshape(len(payloads), layout.block_bytes)
            for group in range(layout.num_groups if payloads else 0):
                codes_TC = entries_N[:, layout.entry_span(group)].reshape(-1, layout.bytes_per_token[group])
                progress.push.send(group, blocks.start, codes_TC)
        progress.next_block += len(payloads)

    def _encode(self, progress: _PushProgress, group: int) -> None:
        blocks = progress.ready_blocks
        if blocks and progress.push.reason is None:
            began_s = time.perf_counter()
            sources = self._runtime.translator.manifest.source_layers(group)
            inputs = [self._layer_input(progress, layer) for layer in sources]
            positions_T = torch.arange(progress.next_token, blocks.stop * progress.tokens_per_block)
            codes_TC = self._codes(progress, group, inputs, positions_T)
            progress.codes.append(codes_TC)
            progress.encode_s += time.perf_counter() - began_s
            if progress.is_done:
                self._finish(progress)
            else:
                progress.push.send(group, blocks.start, codes_TC)

    def _codes(self, progress: _PushProgress, group: int, inputs: Sequence[LayerInput], positions_T: Tensor) -> Tensor:
        """Codes of the blocks that are ready, less those that the guard refuses."""
        seq_len = progress.step.stop
        if not self._is_guarded:
            return self._encoder.encode(group, inputs, positions_T, seq_len=seq_len)
        encoded = self._encoder.encode_guarded(group, inputs, positions_T, seq_len=seq_len)
        num_within = num_blocks_within(encoded.novelty_T, progress.tokens_per_block)
        progress.refuse_from(progress.next_block + num_within)
        return encoded.codes_TC[: len(progress.ready_blocks) * progress.tokens_per_block]

    def _layer_input(self, progress: _PushProgress, layer: int) -> LayerInput:
        if self._view is None:
            raise ConnectorOrderError("save_kv_layer was called before register_kv_caches")
        start, stop = progress.next_token, progress.ready_blocks.stop * progress.tokens_per_block
        k_THD, v_THD = gather_tokens(self._view, layer, progress.step.block_ids, start, stop)
        x_TM = progress.held_rows(layer) if layer in self._patch_layers else None
        return LayerInput(k_THD, v_THD, x_TM)

    def _store(self, progress: _PushProgress) -> None:
        blocks = progress.ready_blocks
        if not blocks or progress.push.reason is not None:
            return
        if len(progress.codes) != self._runtime.layout.num_groups:
            raise ConnectorOrderError(
                f"{len(progress.codes)} of {self._runtime.layout.num_groups} layer groups were saved in an iteration"
            )
        # a later group may have refused blocks that earlier ones had encoded
        num_tokens = len(blocks) * progress.tokens_per_block
        codes = [codes_TC[:num_tokens].reshape(len(blocks), -1) for codes_TC in progress.codes]
        entries_N = torch.cat(codes, dim=1).cpu().numpy()
        for block, entry in zip(blocks, entries_N, strict=True):
            try:
                self._runtime.store.put(progress.step.keys[block], entry.tobytes())
            except StoreFullError as error:
                # the store only saves encoding the same prompt again; it counts refusals itself
                logger.debug("codes of request %d are not kept: %s", progress.step.request_id, error)
                return

    def _finish(self, progress: _PushProgress) -> None:
        if self._runtime.unfinished_pushes.pop(progress.step.transfer_id, None) is None:
            return
        blocks, cut, encode_ms = progress.push.blocks, progress.stop_block, progress.encode_s * 1e3
        if cut < blocks.stop and progress.push.reason is None:
            logger.info("request %d: beyond calibration from block %d on", progress.step.request_id, cut)
            progress.push.cut(cut, encode_ms=encode_ms)
            self._runtime.on_cut(cut - blocks.start, blocks.stop - cut)
        else:
            progress.push.finish(encode_ms=encode_ms)


def groups_ready_at(manifest: Manifest) -> dict[int, list[int]]:
    """Groups that can be encoded once a producer layer has run: all their sources have, and no earlier group waits."""
    last, ready = 0, dict[int, list[int]]()
    for group in range(len(manifest.groups)):
        last = max(last, *manifest.source_layers(group))
        ready.setdefault(last, []).append(group)
    return ready


class _PushProgress:
    """How far one push has come, as the worker tracks it.

    Attributes:
        step: the iteration that runs now.
        next_block: first block of the prompt whose codes were not sent.
        stop_block: first block that will not be sent: the end of the push, or where the guard cuts the prompt.
        num_computed: tokens of the prompt that earlier iterations have put into the pool.
        codes: of the present iteration's blocks, one tensor for each group so far.
        is_cut: the rest cannot be encoded.
    """

    def __init__(self, push: Push, tokens_per_block: int, *, num_computed: int, step: PrefillStep) -> None:
        self.push = push
        self.tokens_per_block = tokens_per_block
        self.num_computed = num_computed
        self.step = step
        self.next_block, self.stop_block = push.blocks.start, push.blocks.stop
        self.codes: list[Tensor] = []
        self.encode_s = 0.0
        self.is_cut = False
        self._held: dict[int, tuple[int, Tensor]] = {}

    @property
    def next_token(self) -> int:
        """First token whose codes were not sent."""
        return self.next_block * self.tokens_per_block

    @property
    def is_done(self) -> bool:
        """Nothing is left to send, or nothing more can be."""
        return self.is_cut or self.next_block >= self.stop_block

    @property
    def ready_blocks(self) -> range:
        """Blocks that are full after this iteration and not sent yet."""
        stop = min(self.stop_block, self.step.stop // self.tokens_per_block)
        return range(self.next_block, max(stop, self.next_block))

    def refuse_from(self, block: int) -> None:
        """The guard refuses this block; one behind those that are ready is not refused."""
        if block < self.ready_blocks.stop:
            self.stop_block = block

    def hold(self, layer: int, x_TM: Tensor) -> None:
        """Add rows of this iteration to those kept of a block that is not full yet."""
        start, kept_TM = self._held.get(layer, (self.step.start, x_TM[:0]))
        self._held[layer] = start, torch.cat([kept_TM, x_TM])

    def held_rows(self, layer: int) -> Tensor:
        """Attention input of the tokens of `ready_blocks`.

        Raises:
            ConnectorOrderError: the engine did not give it in this iteration.
        """
        start, rows_TM = self._held.get(layer, (self.step.stop, None))
        offset = self.next_token - start
        num_tokens = len(self.ready_blocks) * self.tokens_per_block
        if rows_TM is None or offset < 0 or len(rows_TM) < offset + num_tokens:
            raise ConnectorOrderError(f"save_attention_input was not called for Patch layer {layer}")
        return rows_TM[offset : offset + num_tokens]

    def advance(self) -> None:
        """The iteration is over: forget its codes, keep only rows of the block that is not full yet."""
        self.num_computed = self.step.stop
        self.next_block = max(self.next_block, self.ready_blocks.stop)
        self.codes = []
        for layer, (start, rows_TM) in list(self._held.items()):
            # a copy: a slice would keep the rows of the whole chunk alive
            rest_TM = rows_TM[max(self.next_token - start, 0) :].clone()
            self._held[layer] = self.step.stop - len(rest_TM), rest_TM
        if self.is_done:
            self._held.clear()
