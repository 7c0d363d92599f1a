"""A keyed work queue: every key is worked on by one worker at a time, and never lost."""

import asyncio
import heapq
import itertools
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 60.0


class WorkQueue(Generic[Key]):
    """Keys to work on, with the semantics of client-go's rate-limited queue.

    A key added many times is worked on once. A key added while it is worked on is worked on
    again. Times are seconds of `clock`.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._ready: dict[Key, float] = {}
        self._processing: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._timers: list[tuple[float, int, Key]] = []
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._count = itertools.count()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: Key) -> None:
        """To be worked on as soon as a worker is free."""
        self._due.pop(key, None)
        if key in self._processing:
            self._again.setdefault(key, self._clock())
        else:
            self._ready.setdefault(key, self._clock())
            self._wake.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """To be worked on in `seconds`, or earlier if it is due earlier already."""
        if seconds <= 0:
            self.add(key)
            return
        due = self._clock() + seconds
        if key in self._ready or self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._timers, (due, next(self._count), key))
        self._wake.set()

    def retry(self, key: Key) -> float:
        """To be worked on after a wait that doubles with each failure in a row."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures, 20))
        wait *= random.uniform(0.8, 1.2)
        self.add_after(key, wait)
        return wait

    def succeeded(self, key: Key) -> None:
        """Forgets the failures of the key."""
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        """The key's object is gone: no timer and no failure of it is kept."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def get(self) -> tuple[Key, float]:
        """The next key, and how long it has waited. `done` must follow."""
        while True:
            self._move_due()
            if self._ready:
                key = next(iter(self._ready))
                since = self._ready.pop(key)
                self._processing.add(key)
                if self._ready:
                    self._wake.set()
                return key, self._clock() - since
            self._wake.clear()
            wait = self._timers[0][0] - self._clock() if self._timers else None
            try:
                await asyncio.wait_for(self._wake.wait(), wait)
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """The worker has finished with the key."""
        self._processing.discard(key)
        since = self._again.pop(key, None)
        if since is not None:
            self._ready.setdefault(key, since)
            self._wake.set()

    def _move_due(self) -> None:
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            due, _, key = heapq.heappop(self._timers)
            if self._due.get(key) == due:
                self.add(key)


async def work(queue: WorkQueue[Key], handle: Callable[[Key], Awaitable[None]]) -> None:
    """Works on the queue until cancelled. `handle` must not raise."""
    while True:
        key, _ = await queue.get()
        try:
            await handle(key)
        finally:
            queue.done(key)
