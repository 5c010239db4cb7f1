"""Extents: nobody shares bytes, everything comes back, quarantine is never lent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scd_trt.transfer.extents import ALIGNMENT_BYTES, ExtentAllocator, ExtentsFullError

SIZE = 16 * ALIGNMENT_BYTES


def test_first_fit_and_fresh_generations():
    extents = ExtentAllocator(SIZE)
    first, second = extents.allocate(100), extents.allocate(1)
    assert (first.offset, second.offset) == (0, 128)
    extents.free(first)
    again = extents.allocate(100)
    assert again.offset == 0
    assert again.generation > second.generation > first.generation


def test_full_says_so_and_recovers():
    extents = ExtentAllocator(SIZE)
    whole = extents.allocate(SIZE)
    with pytest.raises(ExtentsFullError, match=str(SIZE)):
        extents.allocate(1)
    extents.free(whole)
    assert extents.allocate(SIZE).offset == 0


def test_quarantined_bytes_come_back_only_after_the_fence():
    extents = ExtentAllocator(SIZE)
    extent = extents.allocate(SIZE)
    extents.quarantine(extent)
    with pytest.raises(ExtentsFullError):
        extents.allocate(1)
    with pytest.raises(ValueError, match="not in that state"):
        extents.free(extent)
    assert extents.num_quarantined_bytes == SIZE
    extents.free_fenced(extent)
    assert extents.num_free_bytes == SIZE


def test_double_free_is_refused():
    extents = ExtentAllocator(SIZE)
    extent = extents.allocate(64)
    extents.free(extent)
    extents.allocate(64)  # the same bytes, another owner
    with pytest.raises(ValueError, match="freed before"):
        extents.free(extent)


@given(st.integers(-3, 0))
def test_refuses_empty(num_bytes):
    with pytest.raises(ValueError, match="extent of"):
        ExtentAllocator(SIZE).allocate(num_bytes)


class Extents(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.extents = ExtentAllocator(SIZE)
        self.held, self.quarantined = [], []

    @rule(num_bytes=st.integers(1, SIZE // 2))
    def allocate(self, num_bytes):
        try:
            self.held.append(self.extents.allocate(num_bytes))
        except ExtentsFullError:
            pass

    @precondition(lambda self: self.held)
    @rule(data=st.data(), quarantine=st.booleans())
    def let_go(self, data, quarantine):
        extent = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if quarantine:
            self.extents.quarantine(extent)
            self.quarantined.append(extent)
        else:
            self.extents.free(extent)

    @precondition(lambda self: self.quarantined)
    @rule()
    def fence(self):
        self.extents.free_fenced(self.quarantined.pop())

    @invariant()
    def bytes_are_owned_once_and_add_up(self):
        owned = [0] * SIZE
        for extent in self.held + self.quarantined:
            for index in range(extent.offset, extent.offset + extent.num_bytes):
                owned[index] += 1
        assert max(owned) <= 1
        padded = sum(-(-e.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for e in self.held + self.quarantined)
        assert self.extents.num_free_bytes == SIZE - padded
        if not padded:
            self.extents.free(self.extents.allocate(SIZE))  # coalesced again


TestExtents = Extents.TestCase
