"""Watches that an engine allocates a block for every token it computes, as long as a connector is attached.

An open report against one version of TensorRT-LLM says that with a connector it stops allocating blocks while it decodes
(1.3.0rc11, #13320); the tokens' keys and values are then written over somebody else's. The connector sees every request's
blocks and positions, so it can tell. It cannot cure it: `BlockGrowth.check` says what is missing, and the caller stops using
codes, loudly.
"""

from __future__ import annotations

from scd_trt.serving.connector_api import RequestData, SchedulerOutput


class BlockGrowth:
    """Counts the blocks of each request that began while it watched."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._num_blocks: dict[int, int] = {}

    def check(self, scheduler_output: SchedulerOutput) -> str | None:
        """Follow one iteration; what is wrong, or None."""
        for data in scheduler_output.new_requests:
            self._num_blocks[data.request_id] = 0
        found = [
            self._missing(data)
            for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests)
            # one that was paused comes back without the blocks that were told before
            if data.request_id in self._num_blocks
        ]
        return next(filter(None, found), None)

    def forget(self, request_id: int) -> None:
        """The request ended, or gave up its blocks."""
        self._num_blocks.pop(request_id, None)

    def _missing(self, data: RequestData) -> str | None:
        self._num_blocks[data.request_id] += len(new_blocks(data))
        num_tokens = data.computed_position + data.num_scheduled_tokens
        num_needed = -(-num_tokens // self._tokens_per_block)
        num_blocks = self._num_blocks[data.request_id]
        if num_blocks >= num_needed:
            return None
        return f"request {data.request_id} has {num_blocks} blocks for {num_tokens} tokens, which need {num_needed}"


def new_blocks(data: RequestData) -> list[int]:
    """Blocks that a request got since the last iteration; newer versions may name them by layer group only."""
    by_group: list[list[int]] = getattr(data, "new_block_ids_by_layer_group", [])
    if data.new_block_ids or len(by_group) != 1:
        return data.new_block_ids
    return by_group[0]
