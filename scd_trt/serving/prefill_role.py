"""The connector on the prefill server: while a prompt runs, its KV leaves as codes, layer group by layer group.

Shapes: T tokens, H kv heads, D head size, B tokens per block, M hidden size, C code bytes per token of a group.

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

- with tensor parallelism all of that is rank 0's. The other ranks hand over their heads of the blocks that the metadata
  name (`PrefillStep.blocks`), layer by layer, whatever became of the push meanwhile: a collective has no exceptions.

The pool is read between a layer's run and the end of the forward pass only. A failed push (its peer is gone, say) is no
error here: the work on it stops. Nor is a forward pass without hooks (a replayed CUDA graph), or a block that the engine
does not have: that push ends as `not_encoded`, the engine goes on.
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
from scd_trt.serving.block_growth import BlockGrowth, new_blocks
from scd_trt.serving.connector_api import ConnectorRequest, RequestData, SchedulerOutput
from scd_trt.serving.connector_runtime import ConnectorOrderError, ConnectorRuntime, request_salt
from scd_trt.serving.ranks import join_heads
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
        blocks: that are full after this iteration and were not before; in the first one, also those that the engine had.
    """

    request_id: int
    transfer_id: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    start: int
    stop: int
    first_row: int
    blocks: range


@dataclass(frozen=True)
class PrefillMetadata:
    """One iteration, from scheduler to workers.

    Attributes:
        iteration: ascending; metadata that are presented again are known by it.
        fingerprint: of rank 0's translator.
        ended: requests that ended since the last iteration.
    """

    iteration: int
    fingerprint: str
    steps: tuple[PrefillStep, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass
class _Prompt:
    """A prompt whose codes are wanted, as the scheduler tracks it."""

    push: Push
    keys: tuple[bytes, ...]
    next_block: int
    block_ids: list[int] = field(default_factory=list)


class PrefillScheduler:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        self._runtime = runtime
        self._producer = runtime.require_producer()
        self._salts: dict[int, str] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._ended: list[int] = []
        self._num_iterations = 0
        self._growth = BlockGrowth(runtime.tokens_per_block)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded here; remembers the salt, which later calls do not show."""
        self._salts[request.request_id] = request_salt(request)
        return 0, False

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None:
        """Nothing to do: block ids arrive with the iteration."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PrefillMetadata:
        """Plan pushes for new prompts; say what this iteration computes of those that have one."""
        missing = self._growth.check(scheduler_output)
        if missing is not None:
            self._runtime.disable(missing)
        for data in scheduler_output.new_requests:
            self._plan(data)
        steps: list[PrefillStep] = []
        num_rows = 0
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            prompt = self._prompts.get(data.request_id)
            if prompt is not None and prompt.push.transfer_id in self._runtime.unfinished_pushes:
                steps += self._steps(prompt, data, num_rows)
            num_rows += data.num_scheduled_tokens
        ended, self._ended = tuple(self._ended), []
        self._num_iterations += 1
        return PrefillMetadata(self._num_iterations, self._runtime.fingerprint, tuple(steps), ended)

    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool:
        """Never keeps blocks. A push that is not finished by now (request cancelled or failed) is aborted."""
        self._salts.pop(request.request_id, None)
        self.request_reset(request)
        return False

    def request_reset(self, request: ConnectorRequest) -> None:
        """The request lost its blocks and may start over; an unfinished push of them is aborted."""
        self._growth.forget(request.request_id)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self._ended.append(request.request_id)
            push = self._runtime.unfinished_pushes.pop(prompt.push.transfer_id, None)
            if push is not None:
                push.abort("aborted")

    def cancel_load(self, request: ConnectorRequest, start: int, end: int) -> None:
        """Nothing to do: nothing is ever promised."""

    def _plan(self, data: RequestData) -> None:
        keys = self._runtime.sent_block_keys(data.new_tokens, self._salts.get(data.request_id, ""))
        push = self._producer.plan(keys) if keys and self._runtime.disabled is None else None
        if push is not None:
            self._runtime.unfinished_pushes[push.transfer_id] = push
            self._prompts[data.request_id] = _Prompt(push, tuple(keys), push.blocks.start)

    def _steps(self, prompt: _Prompt, data: RequestData, first_row: int) -> list[PrefillStep]:
        """The prompt's step, or none where the engine lacks one of its blocks."""
        prompt.block_ids.extend(new_blocks(data))
        stop = data.computed_position + data.num_scheduled_tokens
        stop_block = min(prompt.push.blocks.stop, stop // self._runtime.tokens_per_block)
        blocks = range(prompt.next_block, max(prompt.next_block, stop_block))
        prompt.next_block = blocks.stop
        held = prompt.block_ids[blocks.start : blocks.stop]
        # -1 stands for a block that the engine dropped; as an index it would read the pool's last one
        if len(held) < len(blocks) or min(held, default=0) < 0:
            logger.warning("request %d: the engine holds %s for its blocks %s", data.request_id, held, blocks)
            del self._runtime.unfinished_pushes[prompt.push.transfer_id]
            prompt.push.finish()
            return []
        return [
            PrefillStep(
                request_id=data.request_id,
                transfer_id=prompt.push.transfer_id,
                keys=prompt.keys,
                block_ids=tuple(prompt.block_ids),
                start=data.computed_position,
                stop=stop,
                first_row=first_row,
                blocks=blocks,
            )
        ]


class PrefillWorker:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        if runtime.follows is None:
            runtime.require_producer()
        self._runtime = runtime
        self._ranks = runtime.ranks
        self._encoder = Encoder(runtime.translator)
        self._is_guarded = runtime.is_guarded
        self._patch_layers = frozenset(runtime.translator.manifest.patch_layers)
        self._groups_ready_at = groups_ready_at(runtime.translator.manifest)
        self._pushes: dict[int, _PushProgress] = {}
        self._active: list[_PushProgress] = []
        self._steps: tuple[PrefillStep, ...] = ()
        self._gathered: dict[
            tuple[int, int], tuple[int, Tensor]
        ] = {}  # (request, layer) -> first token, rows of all heads
        self._iteration = 0
        self._view: Tensor | None = None

    @property
    def needs_attention_input(self) -> bool:
        """True with Patch layers."""
        return bool(self._patch_layers)

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Take the pool."""
        self._view = self._runtime.view_pool(kv_cache_tensor)

    def start_load_kv(self, metadata: PrefillMetadata) -> None:
        """Begin the iteration: send what the store has of new prompts, drop prompts that ended."""
        self._active, self._steps = [], ()
        if metadata.iteration <= self._iteration:
            return
        self._runtime.check_metadata(metadata.fingerprint)
        self._iteration, self._steps = metadata.iteration, metadata.steps
        for request_id in metadata.ended:
            self._pushes.pop(request_id, None)
        for step in metadata.steps if self._runtime.follows is None else ():
            progress = self._pushes.get(step.request_id) or self._begin(step)
            if progress.next_block < step.blocks.start:
                # a forward pass broke off: what it should have put into those blocks is not there
                progress.is_cut = True
                self._finish(progress)
            # a failed push or a finished one needs nothing
            if progress.push.reason is None and not progress.is_done:
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
            self._gather(group)
            for progress in self._active:
                self._encode(progress, group)
            self._gathered.clear()

    def wait_for_save(self) -> None:
        """All reading of the pool is done by now; account for the iteration."""
        active, self._active = self._active, []
        for progress in active:
            self._store(progress)
            progress.advance()
            if progress.is_done:
                self._finish(progress)

    def _begin(self, step: PrefillStep) -> _PushProgress:
        push = self._runtime.unfinished_pushes[step.transfer_id]
        progress = _PushProgress(push, self._runtime.tokens_per_block, step)
        self._pushes[step.request_id] = progress
        self._send_stored(progress)
        if self._patch_layers and progress.next_token < step.start:
            progress.is_cut = True
        if progress.is_done:
            self._finish(progress)
        return progress

    def _gather(self, group: int) -> None:
        """Put the heads of all ranks together, of everything that this group may be encoded from."""
        if self._ranks.size == 1:
            return
        num_heads = self._runtime.spec.num_kv_heads
        for layer in self._runtime.translator.manifest.source_layers(group):
            for step in self._steps:
                if step.blocks:
                    start, stop = (
                        block * self._runtime.tokens_per_block for block in (step.blocks.start, step.blocks.stop)
                    )
                    rows_2THD = torch.stack(self._read(layer, step.block_ids, start, stop))
                    parts = self._ranks.all_gather(rows_2THD)
                    if self._runtime.follows is None:
                        self._gathered[step.request_id, layer] = start, join_heads(parts, num_heads)

    def _read(self, layer: int, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's heads, in host memory, where the encoder works."""
        if self._view is None:
            raise ConnectorOrderError("save_kv_layer was called before register_kv_caches")
        k_THD, v_THD = gather_tokens(self._view, layer, block_ids, start, stop)
        return k_THD.cpu(), v_THD.cpu()

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
        if blocks and progress.push.reason is None and not progress.is_cut:
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
        start, stop = progress.next_token, progress.ready_blocks.stop * progress.tokens_per_block
        if self._ranks.size == 1:
            k_THD, v_THD = self._read(layer, progress.step.block_ids, start, stop)
        else:
            first, rows_2THD = self._gathered[progress.step.request_id, layer]
            k_THD, v_THD = rows_2THD[:, start - first : stop - first]
        x_TM = progress.held_rows(layer) if layer in self._patch_layers else None
        return LayerInput(k_THD, v_THD, x_TM)

    def _store(self, progress: _PushProgress) -> None:
        blocks = progress.ready_blocks
        if not blocks or progress.push.reason is not None:
            return
        if len(progress.codes) != self._runtime.layout.num_groups:
            logger.error(
                "request %d: %d of %d layer groups were shown to the connector in a forward pass, so its codes are not sent; "
                "does a CUDA graph replay prefills?",
                *(progress.step.request_id, len(progress.codes), self._runtime.layout.num_groups),
            )
            progress.is_cut = True
            return
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
        codes: of the present iteration's blocks, one tensor for each group so far.
        is_cut: the rest cannot be encoded.
    """

    def __init__(self, push: Push, tokens_per_block: int, step: PrefillStep) -> None:
        self.push = push
        self.tokens_per_block = tokens_per_block
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
        self.next_block = max(self.next_block, self.ready_blocks.stop)
        self.codes = []
        for layer, (start, rows_TM) in list(self._held.items()):
            # a copy: a slice would keep the rows of the whole chunk alive
            rest_TM = rows_TM[max(self.next_token - start, 0) :].clone()
            self._held[layer] = self.step.stop - len(rest_TM), rest_TM
        if self.is_done:
            self._held.clear()
