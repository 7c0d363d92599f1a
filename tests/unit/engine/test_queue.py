import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainingjob.engine.queue import LONGEST_BACKOFF, WorkQueue, work


async def test_a_key_added_many_times_is_worked_on_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(3):
        queue.add("a")
    assert len(queue) == 1
    key, _ = await queue.get()
    assert key == "a"
    assert len(queue) == 0


async def test_a_key_added_while_it_is_worked_on_comes_again_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await queue.get()
    queue.add("a")
    assert len(queue) == 0, "not two workers on one key"
    queue.done("a")
    assert (await queue.get())[0] == "a"


async def test_the_earliest_of_several_timers_counts() -> None:
    now = [0.0]
    queue: WorkQueue[str] = WorkQueue(clock=lambda: now[0])
    queue.add_after("a", 10)
    queue.add_after("a", 1)
    queue.add_after("a", 20)
    now[0] = 2
    key, waited = await queue.get()
    queue.done(key)
    assert waited == 0
    now[0] = 100
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 0.05)


async def test_an_event_makes_a_pending_timer_needless() -> None:
    now = [0.0]
    queue: WorkQueue[str] = WorkQueue(clock=lambda: now[0])
    queue.add_after("a", 10)
    queue.add("a")
    queue.done((await queue.get())[0])
    now[0] = 20
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 0.05)


async def test_retries_back_off_up_to_a_ceiling_and_success_forgets_them() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waits = [queue.retry("a") for _ in range(12)]
    assert waits[0] < 1
    assert waits[3] > 2
    assert max(waits) <= LONGEST_BACKOFF * 1.2
    queue.succeeded("a")
    assert queue.retry("a") < 1


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
async def test_no_key_is_lost_and_none_is_worked_on_twice_at_a_time(seed: int) -> None:
    chance = random.Random(seed)
    queue: WorkQueue[int] = WorkQueue()
    wanted = dict.fromkeys(range(5), 0)
    done: dict[int, int] = dict(wanted)
    busy: set[int] = set()

    async def handle(key: int) -> None:
        assert key not in busy
        busy.add(key)
        version = wanted[key]
        await asyncio.sleep(chance.choice([0, 0.001]))
        done[key] = version
        busy.discard(key)
        if chance.random() < 0.1:
            queue.add_after(key, 0.001)

    workers = [asyncio.create_task(work(queue, handle)) for _ in range(3)]
    for _ in range(60):
        key = chance.randrange(5)
        wanted[key] += 1
        if chance.random() < 0.5:
            queue.add(key)
        else:
            queue.add_after(key, 0.001)
        if chance.random() < 0.3:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    for worker in workers:
        worker.cancel()
    assert done == wanted, "every key was worked on after its last change"
