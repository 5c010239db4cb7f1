"""Wire: golden bytes from the table of the module, round trips, and what is refused."""

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from scd_trt.transfer.wire import NOTIFICATION_BYTES, CodeLayout, Notification, WireError, new_transfer_id

SESSION = bytes(range(16))
TRANSFER = "0f" * 16
PAYLOAD = np.arange(100, dtype=np.uint8)
HEADER = bytes.fromhex(
    "5343444e"  # magic
    "0100"  # version
    "0302"  # group 515
    "000102030405060708090a0b0c0d0e0f"  # session
    "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"  # transfer
    "07000000"  # first block
    "02000000"  # blocks
    "2a00000000000000"  # generation
    "6400000000000000"  # bytes
)
layouts = st.builds(CodeLayout, st.integers(1, 8), st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple))


def note(**changes):
    fields = {
        "session": SESSION,
        "transfer_id": TRANSFER,
        "group": 515,
        "first_block": 7,
        "num_blocks": 2,
        "generation": 42,
        "num_bytes": 100,
    }
    return Notification(**(fields | changes))


def test_golden_bytes():
    digest = xxhash.xxh3_128(HEADER + PAYLOAD.tobytes()).digest()
    packed = note().sealed(PAYLOAD).pack()
    assert packed == HEADER + digest
    assert len(packed) == NOTIFICATION_BYTES == 80


@given(
    group=st.integers(0, 2**16 - 1),
    first_block=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(1, 2**32 - 1),
    generation=st.integers(0, 2**64 - 1),
    payload=st.binary(min_size=1, max_size=64),
)
def test_round_trip(group, first_block, num_blocks, generation, payload):
    data = np.frombuffer(payload, dtype=np.uint8)
    sent = note(
        group=group, first_block=first_block, num_blocks=num_blocks, generation=generation, num_bytes=len(payload)
    ).sealed(data)
    received = Notification.unpack(sent.pack())
    assert received == sent
    assert received.vouches_for(data)


def test_digest_covers_payload_and_header():
    packed = note().sealed(PAYLOAD).pack()
    altered = PAYLOAD.copy()
    altered[50] ^= 1
    assert not Notification.unpack(packed).vouches_for(altered)
    assert not Notification.unpack(packed).vouches_for(PAYLOAD[:-1])
    for offset in (6, 8, 24, 40, 44, 48):  # one byte of each field but magic, version and length
        changed = bytearray(packed)
        changed[offset] ^= 1
        assert not Notification.unpack(bytes(changed)).vouches_for(PAYLOAD), f"byte {offset}"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: b"X" + data[1:],
        lambda data: data[:4] + b"\2" + data[5:],
        lambda data: data[:44] + bytes(4) + data[48:],
        lambda data: data[:56] + bytes(8) + data[64:],
    ],
    ids=["short", "long", "empty", "magic", "version", "no blocks", "no bytes"],
)
def test_refuses(change):
    with pytest.raises(WireError):
        Notification.unpack(change(note().sealed(PAYLOAD).pack()))


@given(st.binary(max_size=120))
def test_any_bytes_give_a_notification_or_a_wire_error(data):
    try:
        Notification.unpack(data)
    except WireError:
        pass


@given(st.lists(st.tuples(st.integers(0, 79), st.integers(1, 255)), min_size=1, max_size=4))
def test_an_edited_notification_vouches_for_nothing(edits):
    data = bytearray(note().sealed(PAYLOAD).pack())
    original = bytes(data)
    for offset, change in edits:
        data[offset] ^= change
    if data == original:
        return
    try:
        edited = Notification.unpack(bytes(data))
    except WireError:
        return
    assert not edited.vouches_for(PAYLOAD)


@given(st.lists(st.integers(0, 100), max_size=5))
def test_pieces_are_vouched_for_as_a_whole_is(cuts):
    sealed, edges = note().sealed(PAYLOAD), sorted([0, *cuts, 100])
    pieces = [PAYLOAD[start:stop] for start, stop in itertools.pairwise(edges)]
    assert sealed.vouches_for(*pieces)
    assert not sealed.vouches_for(*pieces, PAYLOAD[:1])
    assert not sealed.vouches_for()


@pytest.mark.parametrize(
    "change", [{"group": 1 << 16}, {"first_block": -1}, {"session": b"short"}, {"transfer_id": "xy"}]
)
def test_does_not_pack_what_does_not_fit(change):
    with pytest.raises(WireError):
        note(**change).sealed(PAYLOAD).pack()


def test_does_not_pack_unsealed():
    with pytest.raises(WireError, match="seal"):
        note().pack()


def test_transfer_ids_are_new_and_hexadecimal():
    first, second = new_transfer_id(), new_transfer_id()
    assert first != second
    assert len(bytes.fromhex(first)) == 16


def test_span_by_hand():
    layout = CodeLayout(4, (2, 3))
    # 5 blocks: group 0 takes 5*4*2 = 40 bytes, group 1 starts there with 12 bytes a block
    assert layout.span(0, 0, 5, extent_blocks=5) == slice(0, 40)
    assert layout.span(1, 2, 2, extent_blocks=5) == slice(64, 88)
    assert layout.block_bytes == 20
    assert layout.entry_span(1) == slice(8, 20)


@given(layouts, st.integers(1, 6))
def test_spans_tile_the_extent(layout, num_blocks):
    seen = np.zeros(layout.block_bytes * num_blocks, dtype=int)
    for group in range(layout.num_groups):
        for block in range(num_blocks):
            seen[layout.span(group, block, 1, extent_blocks=num_blocks)] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("group", "first", "num"), [(2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 3, 3), (0, 6, 1)]
)
def test_span_refuses_what_lies_outside(group, first, num):
    with pytest.raises(ValueError, match="outside"):
        CodeLayout(4, (2, 3)).span(group, first, num, extent_blocks=5)


@pytest.mark.parametrize(("block", "groups"), [(0, (1,)), (4, ()), (4, (3, 0))])
def test_layout_refuses_empty_sizes(block, groups):
    with pytest.raises(ValueError, match="positive"):
        CodeLayout(block, groups)
