"""Health of the workers behind a router: each one's GET /health, again and again, puts it in and out of rotation.

A check may say "alive" of a worker whose requests fail (its transfers, say): requests count for themselves
(`Rotation.failed`). A check that is not over when the next one is due delays it; there is never more than one per worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import httpx

from scd_trt.serving.rotation import Rotation, Worker
from scd_trt.serving.worker_clients import is_alive

logger = logging.getLogger(__name__)


class HealthWatch:
    """Checks the workers of some rotations. For one event loop.

    Args:
        client: not closed here.
    """

    def __init__(self, rotations: Sequence[Rotation], *, client: httpx.AsyncClient, interval_s: float) -> None:
        self._rotations = rotations
        self._client = client
        self._interval_s = interval_s
        self._check: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check()

    async def check(self) -> None:
        """Check all workers now; calls that come while a check is under way share it."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._check_all())
        await asyncio.shield(self._check)

    async def close(self) -> None:
        """End a check that is under way."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)

    async def _check_all(self) -> None:
        checks = [self._check_one(rotation, worker) for rotation in self._rotations for worker in rotation.workers]
        await asyncio.gather(*checks)

    async def _check_one(self, rotation: Rotation, worker: Worker) -> None:
        alive = await is_alive(self._client, worker.url)
        if alive != worker.answers_checks:
            logger.warning("worker %s %s", worker.url, "is back" if alive else "does not answer its health check")
        rotation.checked(worker, is_alive=alive)
