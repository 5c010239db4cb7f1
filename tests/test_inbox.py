"""Inbox: what was checked is what is published, even if a peer writes into its extent meanwhile."""

import numpy as np

from scd_trt.config import StoreConfig
from scd_trt.transfer.extents import ExtentAllocator
from scd_trt.transfer.inbox import Inbox, Incoming
from scd_trt.transfer.states import Landing
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.transport import Buffer, LoopbackHub, LoopbackReceiver
from scd_trt.transfer.wire import CodeLayout, Notification, new_transfer_id

LAYOUT = CodeLayout(4, (16,))
SESSION = b"s" * 16


class ScribblingLog(TraceLog):
    """Overwrites the arena at the moment between the digest check and the publication."""

    def __init__(self, arena):
        super().__init__()
        self.arena = arena

    def record(self, name, transfer_id, **details):
        super().record(name, transfer_id, **details)
        if name == "landed":
            self.arena.array[:] = 0xEE


def test_bytes_that_change_after_the_check_are_not_published():
    arena, store, changed = Buffer(4096), CodeStore(StoreConfig()), []
    inbox = Inbox(arena, layout=LAYOUT, store=store, trace=ScribblingLog(arena), on_change=changed.append)
    receiver = LoopbackReceiver(LoopbackHub(), "receiver", arena)
    key, payload = b"k" * 16, np.arange(LAYOUT.block_bytes, dtype=np.uint8)
    landing = Landing(num_groups=1, num_blocks=1, granted_s=0)
    incoming = Incoming(new_transfer_id(), [key], num_stored=0, landing=landing)
    extent = ExtentAllocator(arena.num_bytes).allocate(len(payload))
    inbox.open(SESSION, receiver)
    inbox.add(incoming, extent, session=SESSION, num_blocks=1)
    arena.array[extent.span] = payload
    note = Notification(SESSION, incoming.transfer_id, 0, 0, 1, extent.generation, len(payload)).sealed(payload)
    receiver.notifications.append(note.pack())
    inbox.start()
    incoming_is_done = inbox_settled(inbox, changed)
    assert incoming_is_done
    assert (arena.array == 0xEE).all()
    with store.pinned([key]) as (published,):
        assert bytes(published) == payload.tobytes()


def inbox_settled(inbox, changed):
    """Stop the inbox; it finishes the notifications that it has drained."""
    for _ in range(1000):
        if changed:
            break
        inbox.join(0.01)
    inbox.stop()
    inbox.join(5)
    return bool(changed)
