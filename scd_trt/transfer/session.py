"""Signatures first (bodies follow): what the connector and the router call.  PRELIMINARY, being filled in.

Layout, ids, reasons:  scd_trt.transfer.wire.CodeLayout(tokens_per_block, bytes_per_token: tuple[int, ...]); transfer ids are 32 hex
characters (`wire.new_transfer_id()`); block indices are always *absolute block indices of the prompt*.
Router side: `scd_trt.transfer.control.ControlClient(address "host:port", ControlConfig)`, async:
    await client.expect(transfer_id, block_keys, producer="host:port") -> Expected(num_stored, num_granted, reason: str | None)
    await client.wait(transfer_id, timeout_s=...) -> Waited(state: "landed"|"failed"|"pending", reason: str | None)   # pending = timed out
    await client.report(transfer_id) -> TransferReport (msgspec.Struct; .to_dict())
    await client.trace(transfer_id) -> list[TraceEvent];  await client.status() -> Status;  await client.close()
  all raise ControlError (ScdError) quickly when the peer cannot be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scd_trt.config import ControlConfig, TransportConfig
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.wire import CodeLayout

if TYPE_CHECKING:
    import torch

Codes = "npt.NDArray[np.uint8] | torch.Tensor"


class Push:
    """One planned push: the blocks `blocks` of a prompt, for every group, to one consumer."""

    transfer_id: str
    blocks: range  # absolute block indices the consumer wants: range(first, end); the ones before it are already there

    def send(self, group: int, first_block: int, codes: Codes) -> None:
        """Queue codes uint8 [num_blocks * tokens_per_block, bytes_per_token[group]] of blocks first_block.. (absolute). Copies; returns
        at once (waits for send-buffer room at most 1 s in total per push, then the push fails). A no-op on a failed push."""

    def finish(self, *, encode_ms: float) -> None:
        """No more sends will follow. Non-blocking."""

    def abort(self, reason: str) -> None:
        """Give up (FallbackReason value). Non-blocking, idempotent."""

    @property
    def reason(self) -> str | None:
        """Why the push failed, or None so far. Sticky."""


class Producer:
    """Prefill side."""

    trace: TraceLog
    address: str  # "host:port" really bound (port 0 in the config = any free)

    def __init__(
        self,
        config: TransportConfig,
        *,
        control: ControlConfig,
        fingerprint: str,
        layout: CodeLayout,
        store: CodeStore | None = None,
        trace: TraceLog | None = None,
    ) -> None: ...

    def plan(self, block_keys: Sequence[bytes]) -> Push | None:
        """The pending grant whose keys are a prefix of (or equal to) the prompt's, longest first; consumes it. Microseconds, no I/O."""

    def close(self) -> None: ...


class PinnedBlocks:
    """Landed blocks kept in memory until `release()` (also a context manager). Safe to read from any thread."""

    num_blocks: int

    def codes(self, group: int) -> npt.NDArray[np.uint8]:
        """Fresh writable array uint8 [num_blocks * tokens_per_block, bytes_per_token[group]] (torch.from_numpy works)."""

    def release(self) -> None: ...


class Consumer:
    """Decode side."""

    trace: TraceLog
    address: str
    store: CodeStore

    def __init__(
        self,
        config: TransportConfig,
        *,
        control: ControlConfig,
        fingerprint: str,
        layout: CodeLayout,
        store: CodeStore,
        trace: TraceLog | None = None,
    ) -> None: ...

    def match(self, block_keys: Sequence[bytes]) -> int:
        """Landed and verified contiguous prefix, in blocks. Microseconds."""

    def pin(self, block_keys: Sequence[bytes]) -> PinnedBlocks:
        """Match and pin the contiguous landed prefix in one step (num_blocks may be 0). Use this at get_num_new_matched_tokens so that
        what was promised cannot be evicted before it is loaded."""

    def pinned(self, block_keys: Sequence[bytes]) -> PinnedBlocks:
        """`with consumer.pinned(keys) as blocks:` -- the same as pin()."""

    def note(
        self,
        block_keys: Sequence[bytes],
        *,
        matched_tokens: int | None = None,
        decode_ms: float | None = None,
        reason: str | None = None,
    ) -> None:
        """What the connector knows of a request, joined to the transfer by its last block key (oldest transfer not noted yet)."""

    def close(self) -> None: ...
