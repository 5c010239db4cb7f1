"""Transfer states: pure; terminal states are sticky and transitions may be repeated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scd_trt.transfer.states import FALLBACK_REASONS, Landing, Sending


def landing(num_blocks=3, num_groups=2):
    return Landing(num_groups=num_groups, num_blocks=num_blocks, granted_s=100.0)


def test_lands_block_by_block():
    state = landing()
    assert state.state == "waiting"
    assert state.completed_by(0, 0, 3) == []
    state.land(0, 0, 3, now_s=101)
    assert state.state == "landing"
    assert state.completed_by(1, 0, 2) == [0, 1]
    state.land(1, 0, 2, now_s=102)
    assert state.num_landed_blocks == 2
    assert state.completed_by(1, 0, 3) == [2]
    state.land(1, 2, 1, now_s=103)
    assert (state.state, state.first_landing_s, state.last_landing_s) == ("landed", 101, 103)


def test_a_single_group_completes_at_once():
    assert landing(num_groups=1).completed_by(0, 1, 2) == [1, 2]


def test_nothing_granted_is_landed():
    assert landing(num_blocks=0).state == "landed"


def test_terminal_is_sticky_and_keeps_its_first_reason():
    state = landing()
    state.fail("timeout")
    state.fail("producer_gone")
    for group in range(2):
        state.land(group, 0, 3, now_s=101)
    state.end(num_writes=2, reason="aborted")
    assert (state.state, state.reason) == ("failed", "timeout")
    done = landing(num_blocks=1, num_groups=1)
    done.land(0, 0, 1, now_s=101)
    done.fail("producer_gone")
    assert (done.state, done.reason) == ("landed", None)


def test_landed_extent_is_not_drained_before_the_producer_says_so():
    state = landing(num_blocks=1, num_groups=1)
    state.land(0, 0, 1, now_s=101)
    assert not state.is_drained
    state.end(num_writes=1, reason=None)
    assert state.is_drained


def test_end_may_overtake_the_notifications():
    state = landing(num_blocks=1)
    state.end(num_writes=2, reason=None)
    assert (state.state, state.is_drained) == ("waiting", False)
    state.land(0, 0, 1, now_s=101)
    state.land(1, 0, 1, now_s=101)
    assert (state.state, state.is_drained) == ("landed", True)


def test_ended_without_everything_is_not_encoded():
    state = landing()
    state.land(0, 0, 3, now_s=101)
    state.end(num_writes=1, reason=None)
    assert (state.state, state.reason, state.is_drained) == ("failed", "not_encoded", True)


def test_a_wrong_digest_is_the_reason_in_the_end():
    state = landing(num_blocks=1, num_groups=1)
    state.reject(0, 0, 1)
    assert state.state == "waiting"
    state.end(num_writes=1, reason=None)
    assert (state.state, state.reason) == ("failed", "digest_mismatch")


def test_a_lie_does_not_stand_in_for_the_write_that_follows():
    state = landing(num_blocks=1)
    state.reject(0, 0, 1)
    state.end(num_writes=2, reason=None)
    state.land(0, 0, 1, now_s=101)
    assert state.state == "landing"
    state.land(1, 0, 1, now_s=101)
    assert (state.state, state.is_drained) == ("landed", True)


@pytest.mark.parametrize(
    ("now_s", "landed", "overdue"), [(130, 0, 0), (131, 0, 1), (131, 1, 0), (106, 1, 0), (172, 1, 1)]
)
def test_deadlines(now_s, landed, overdue):
    state = landing()
    if landed:
        state.land(0, 0, 1, now_s=111)
    assert state.is_overdue(now_s, lease_s=30, transfer_timeout_s=60) == bool(overdue)


steps = st.one_of(
    st.tuples(st.just("land"), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("reject"), st.integers(0, 1)),
    st.tuples(st.just("end"), st.integers(0, 8), st.sampled_from([None, *FALLBACK_REASONS])),
    st.tuples(st.just("fail"), st.sampled_from(FALLBACK_REASONS)),
)


@given(st.lists(steps, max_size=12))
def test_no_sequence_leaves_a_terminal_state(sequence):
    state, terminal = landing(), None
    for step in sequence:
        match step:
            case ("land", group, block):
                state.land(group, block, 1, now_s=101)
            case ("reject", group):
                state.reject(group, 0, 1)
            case ("end", num_writes, reason):
                state.end(num_writes=num_writes, reason=reason)
            case ("fail", reason):
                state.fail(reason)
        if terminal is not None:
            assert (state.state, state.reason) == terminal
        if state.is_terminal:
            terminal = state.state, state.reason
        assert (state.state == "failed") == (state.reason is not None)


def sending():
    return Sending(num_groups=2, num_blocks=3)


def test_sending_drains_after_the_last_write():
    state = sending()
    assert state.queue(0, 0, 3)
    assert state.queue(1, 0, 3)
    state.written()
    state.finish()
    assert not state.is_drained
    state.written()
    assert (state.is_drained, state.reason, state.num_written) == (True, None, 2)


def test_sent_twice_is_ignored_and_half_twice_is_an_error():
    state = sending()
    assert state.queue(0, 0, 2)
    assert not state.queue(0, 0, 2)
    assert not state.queue(0, 1, 1)
    with pytest.raises(ValueError, match="partly"):
        state.queue(0, 1, 2)
    assert state.num_in_flight == 1


def test_finish_with_holes_still_writes_what_is_queued():
    state = sending()
    state.queue(0, 0, 3)
    state.finish()
    assert (state.end_reason, state.is_failed, state.is_drained) == ("not_encoded", False, False)
    assert not state.queue(1, 0, 3)
    state.written()
    assert state.is_drained


def test_failed_push_queues_nothing_more():
    state = sending()
    state.fail("timeout")
    state.fail("aborted")
    assert not state.queue(0, 0, 1)
    assert (state.reason, state.is_drained) == ("timeout", True)
