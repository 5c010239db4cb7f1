"""Who gets a request: each policy on its own, workers that fail and come back, and the bounded index of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from scd_trt.serving.rotation import MAX_LEAD, MAX_WORKERS, Endpoint, Policy, PrefixIndex, Rotation

KEYS = [bytes([number]) * 16 for number in range(8)]


def rotation(policy: Policy, *names: str, retry_s: float = 2.0) -> Rotation:
    return Rotation([Endpoint(name, f"{name}-control") for name in names], policy=policy, retry_s=retry_s)


def pick(
    rotating: Rotation, keys: Sequence[bytes] = (), *, now_s: float = 0.0, exclude: Sequence[str] = ()
) -> str | None:
    worker = rotating.pick(keys, now_s=now_s, exclude=exclude)
    return None if worker is None else worker.url


def test_round_robin_goes_round() -> None:
    rotating = rotation("round_robin", "a", "b", "c")
    assert [pick(rotating) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_round_robin_skips_whom_it_may_not_take() -> None:
    rotating = rotation("round_robin", "a", "b", "c")
    assert [pick(rotating, exclude=["b"]) for _ in range(3)] == ["a", "c", "a"]


def test_least_loaded_counts_requests_under_way() -> None:
    rotating = rotation("least_loaded", "a", "b")
    a, b = rotating.workers
    with a.busy(), a.busy(), b.busy():
        assert [pick(rotating), pick(rotating)] == ["b", "b"]
    assert [pick(rotating), pick(rotating)] == ["a", "b"]  # equal loads: the one that waited longest


def test_prefix_affinity_goes_where_most_of_the_prompt_was_seen() -> None:
    rotating = rotation("prefix_affinity", "a", "b", "c")
    rotating.index.note(KEYS[:2], "b")
    rotating.index.note(KEYS[:5], "c")
    assert pick(rotating, KEYS) == "c"
    assert pick(rotating, KEYS[:2]) in ("b", "c")
    assert pick(rotating, KEYS[6:]) == "a"  # nobody knows it, and a has waited longest


def test_prefix_affinity_yields_to_load() -> None:
    rotating = rotation("prefix_affinity", "a", "b")
    rotating.index.note(KEYS, "b")
    rotating.workers[1].num_active = MAX_LEAD
    assert pick(rotating, KEYS) == "b"
    rotating.workers[1].num_active = MAX_LEAD + 1
    assert pick(rotating, KEYS) == "a"


def test_a_worker_that_failed_is_left_alone_and_comes_back() -> None:
    rotating = rotation("round_robin", "a", "b", retry_s=2.0)
    rotating.failed(rotating.workers[0], now_s=10.0)
    assert [pick(rotating, now_s=11.9) for _ in range(2)] == ["b", "b"]
    assert rotating.num_up(11.9) == 1
    assert pick(rotating, now_s=12.0) == "a"
    rotating.failed(rotating.workers[0], now_s=12.0)
    rotating.succeeded(rotating.workers[0])
    assert rotating.num_up(12.0) == 2


def test_health_checks_decide_too() -> None:
    rotating = rotation("round_robin", "a", "b")
    rotating.checked(rotating.workers[0], is_alive=False)
    assert [pick(rotating) for _ in range(2)] == ["b", "b"]
    rotating.checked(rotating.workers[0], is_alive=True)
    assert pick(rotating) == "a"


def test_a_check_does_not_undo_a_failed_request() -> None:
    rotating = rotation("round_robin", "a", retry_s=2.0)
    rotating.failed(rotating.workers[0], now_s=10.0)
    rotating.checked(rotating.workers[0], is_alive=True)
    assert pick(rotating, now_s=11.0) is None


def test_rather_one_out_of_rotation_than_none() -> None:
    rotating = rotation("round_robin", "a")
    rotating.checked(rotating.workers[0], is_alive=False)
    assert pick(rotating) is None
    worker = rotating.pick_any([], now_s=0.0)
    assert worker is not None
    assert worker.url == "a"
    assert rotation("round_robin").pick_any([], now_s=0.0) is None


def test_what_a_worker_had_cached_dies_with_it() -> None:
    for lose in ("failed", "checked", "removed"):
        rotating = rotation("prefix_affinity", "a", "b")
        rotating.index.note(KEYS, "b")
        if lose == "failed":
            rotating.failed(rotating.workers[1], now_s=0.0)
        elif lose == "checked":
            rotating.checked(rotating.workers[1], is_alive=False)
        else:
            rotating.remove("b")
        assert rotating.index.depths(KEYS) == {}, lose


def test_workers_come_and_go_up_to_a_bound() -> None:
    rotating = rotation("round_robin", "a")
    a = rotating.workers[0]
    assert rotating.add(a.endpoint)
    assert rotating.workers == (a,)  # its state stays
    assert all(rotating.add(Endpoint(str(number), "c")) for number in range(MAX_WORKERS - 1))
    assert not rotating.add(Endpoint("one too many", "c"))
    assert rotating.add(Endpoint("a", "moved"))
    assert rotating.workers[0].endpoint.control == "moved"
    rotating.remove("unknown")
    assert len(rotating.workers) == MAX_WORKERS


def test_depth_ends_at_the_first_block_that_a_worker_lacks() -> None:
    index = PrefixIndex()
    index.note(KEYS[:4], "a")
    index.note(KEYS[:2], "b")
    index.note(KEYS[3:6], "b")  # behind a gap: of no use
    assert index.depths(KEYS) == {"a": 4, "b": 2}
    assert index.depths(KEYS[1:]) == {"a": 3, "b": 1}
    assert index.depths([]) == {}


def test_the_index_is_bounded_and_forgets_prompts_from_their_ends() -> None:
    index = PrefixIndex(capacity=6)
    index.note(KEYS[:4], "a")
    index.note([bytes([100 + number]) * 16 for number in range(4)], "a")
    assert index.depths(KEYS) == {"a": 2}
    index.note(KEYS[:4], "b")
    assert index.depths(KEYS) == {"a": 2, "b": 4}


def test_drop_takes_one_worker_away() -> None:
    index = PrefixIndex()
    for name in ("a", "b"):
        index.note(KEYS, name)
    index.drop(KEYS[2:], "a")
    assert index.depths(KEYS) == {"a": 2, "b": 8}
    index.forget("b")
    assert index.depths(KEYS) == {"a": 2}
