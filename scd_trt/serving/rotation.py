"""Which worker of a role gets a request: who is in rotation, how busy each one is, and who has seen the prefix. Pure:
times are given by the caller, nothing is sent.

A worker leaves rotation when a request to it failed (for `retry_s`) and while its health checks fail; it comes back by
itself. Among those in rotation the policy chooses:

    round_robin       the one that was chosen longest ago
    least_loaded      the one with the fewest requests under way
    prefix_affinity   the one that has seen most of the prompt, unless it has `MAX_LEAD` requests more under way than the
                      least loaded one; among equals the least loaded

`PrefixIndex` guesses what a worker has cached from the prompts that it was given, as stock routers do: a worker forgets
without telling, so nothing but speed may rest on it. What a worker is *known* to hold is asked of it (`Expect`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Policy = Literal["round_robin", "least_loaded", "prefix_affinity"]
MAX_LEAD = 4
MAX_WORKERS = 256
MAX_INDEXED_BLOCKS = 1 << 17


@dataclass(frozen=True)
class Endpoint:
    """Where a worker is: URL of its OpenAI endpoint, host:port of its control channel."""

    url: str
    control: str


@dataclass(eq=False)
class Worker:
    """One worker as the router sees it.

    Attributes:
        num_active: requests of this router under way.
        turn: number of the latest choice that fell on it.
        answers_checks: False while its health checks fail.
        down_until_s: a request failed; left alone until then.
    """

    endpoint: Endpoint
    num_active: int = 0
    turn: int = 0
    answers_checks: bool = True
    down_until_s: float = float("-inf")

    @property
    def url(self) -> str:
        """Names the worker."""
        return self.endpoint.url

    def is_up(self, now_s: float) -> bool:
        """True while it is in rotation."""
        return self.answers_checks and now_s >= self.down_until_s

    @contextmanager
    def busy(self) -> Iterator[None]:
        """One request more under way."""
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1


class PrefixIndex:
    """Which workers were given which blocks; at most `capacity` blocks, those not seen for longest leave first."""

    def __init__(self, capacity: int = MAX_INDEXED_BLOCKS) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, frozenset[str]] = OrderedDict()

    def note(self, keys: Sequence[bytes], url: str) -> None:
        """That worker has been given a prompt of these blocks."""
        # the start of a prompt is used last, so that a prompt is forgotten from its end
        for key in reversed(keys):
            self._holders[key] = self._holders.pop(key, frozenset()) | {url}
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def drop(self, keys: Iterable[bytes], url: str) -> None:
        """That worker does not have these blocks."""
        for key in keys:
            if rest := self._holders.pop(key, frozenset()) - {url}:
                self._holders[key] = rest

    def forget(self, url: str) -> None:
        """That worker has lost everything."""
        self.drop([key for key, holders in self._holders.items() if url in holders], url)

    def depths(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Blocks of this prompt, from its start, that each worker was given; workers without any are left out."""
        found: dict[str, int] = {}
        holders: frozenset[str] | None = None
        for depth, key in enumerate(keys, 1):
            here = self._holders.get(key, frozenset())
            holders = here if holders is None else holders & here
            if not holders:
                break
            found |= dict.fromkeys(holders, depth)
        return found


class Rotation:
    """The workers of one role of one pair.

    Args:
        retry_s: how long a worker that failed a request is left alone.
    """

    def __init__(self, endpoints: Iterable[Endpoint], *, policy: Policy, retry_s: float) -> None:
        self.index = PrefixIndex()
        self._policy = policy
        self._retry_s = retry_s
        self._workers = {endpoint.url: Worker(endpoint) for endpoint in endpoints}
        self._num_turns = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All, in rotation or not."""
        return tuple(self._workers.values())

    def add(self, endpoint: Endpoint) -> bool:
        """Take a worker in; False where there are `MAX_WORKERS` already. A known one stays as it is."""
        known = self._workers.get(endpoint.url)
        if known is not None and known.endpoint == endpoint:
            return True
        if known is None and len(self._workers) >= MAX_WORKERS:
            return False
        self._workers[endpoint.url] = Worker(endpoint)
        return True

    def remove(self, url: str) -> None:
        """Forget a worker; requests that it has under way go on."""
        if self._workers.pop(url, None) is not None:
            self.index.forget(url)

    def num_up(self, now_s: float) -> int:
        """Workers in rotation."""
        return sum(worker.is_up(now_s) for worker in self._workers.values())

    def pick(self, keys: Sequence[bytes], *, now_s: float, exclude: Collection[str] = ()) -> Worker | None:
        """The next worker for a prompt of these blocks; None where none but `exclude` is in rotation."""
        candidates = [w for w in self._workers.values() if w.url not in exclude and w.is_up(now_s)]
        return self._choose(candidates, keys)

    def pick_any(self, keys: Sequence[bytes], *, now_s: float) -> Worker | None:
        """The same, but rather one that is out of rotation than none: what is known of it may be old."""
        return self.pick(keys, now_s=now_s) or self._choose(list(self._workers.values()), keys)

    def failed(self, worker: Worker, *, now_s: float) -> None:
        """A request failed through the worker's fault: what it had cached may be gone, too."""
        worker.down_until_s = now_s + self._retry_s
        self.index.forget(worker.url)

    def succeeded(self, worker: Worker) -> None:
        """A request went well."""
        worker.down_until_s = float("-inf")

    def checked(self, worker: Worker, *, is_alive: bool) -> None:
        """The result of a health check."""
        if worker.answers_checks and not is_alive:
            self.index.forget(worker.url)
        worker.answers_checks = is_alive

    def _choose(self, candidates: list[Worker], keys: Sequence[bytes]) -> Worker | None:
        if not candidates:
            return None
        if self._policy == "round_robin":
            chosen = min(candidates, key=lambda worker: worker.turn)
        elif self._policy == "least_loaded":
            chosen = min(candidates, key=lambda worker: (worker.num_active, worker.turn))
        else:
            chosen = self._nearest(candidates, keys)
        self._num_turns += 1
        chosen.turn = self._num_turns
        return chosen

    def _nearest(self, candidates: list[Worker], keys: Sequence[bytes]) -> Worker:
        depths = self.index.depths(keys)
        limit = MAX_LEAD + min(worker.num_active for worker in candidates)
        near = [worker for worker in candidates if worker.num_active <= limit]
        return min(near, key=lambda worker: (-depths.get(worker.url, 0), worker.num_active, worker.turn))
