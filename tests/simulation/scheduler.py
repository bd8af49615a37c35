"""Greenlets in place of threads: one seed decides which of them runs next, and when time passes.

Rules:

- A *process* is a set of tasks that live, freeze and die together. A task gives up control only
  where the real code waits for something outside of it: at a store, a clock, a lock.
- Time passes a little with every step of a task, and otherwise only when all tasks wait.
- A killed task gets `Crashed` where it waits; nothing it does after that has an effect, because
  store, clock and locks only raise `Crashed` from then on.
- `Threading` stands in for the module `threading`, and `Queueing` for `queue`: a greenlet that
  waits for a lock lets the others run. In one thread a real lock would never wait, or forever.
"""

from __future__ import annotations

import functools
import queue
import random
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from greenlet import getcurrent, greenlet

from sparklog.clock import ManualClock

_STEP_SECONDS = 0.004
"""The longest time that a step takes."""


class Crashed(BaseException):
    """The process that this is raised in is dead."""


class Stuck(Exception):
    """All tasks wait for each other."""


class Process:
    """Tasks with one fate, and a wall clock of their own that may be wrong."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen_until = 0.0
        self.skew_us = 0
        self.clock = ProcessClock(scheduler, self)

    def __repr__(self) -> str:
        return self.name


class ProcessClock:
    """`Clock` for one process: everybody's time, and its own idea of the date."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self._process = process

    def now_us(self) -> int:
        return self._scheduler.clock.now_us() + self._process.skew_us

    def monotonic(self) -> float:
        return self._scheduler.clock.monotonic()

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class Task:
    """A thread of a process. `failure` is the error that ended it, if one did."""

    __slots__ = ("failure", "greenlet", "name", "process", "thread", "until", "wake_at")

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.greenlet: greenlet | None = None
        self.wake_at = 0.0
        self.until: Callable[[], bool] | None = None
        """Condition that the task waits for, at most until `wake_at`."""
        self.failure: Exception | None = None
        self.thread: _Thread | None = None

    def __repr__(self) -> str:
        return f"{self.process.name}.{self.name}"

    def is_ready(self, now: float) -> bool:
        """Returns true if the task can continue; killed tasks can, to their end."""
        process = self.process
        if now < process.frozen_until and process.alive:
            return False
        is_due = now >= self.wake_at or (self.until is not None and self.until())
        return is_due or not process.alive

    @property
    def done(self) -> bool:
        return self.greenlet is None or self.greenlet.dead


class Scheduler:
    """Runs tasks one at a time, in an order that only the seed knows."""

    def __init__(self, chance: random.Random, *, switch_rate: float) -> None:
        self.clock = ManualClock()
        self.threading = Threading(self)
        self.queue = Queueing(self)
        self.current: Task | None = None
        self.steps = 0
        self._chance = chance
        self._switch_rate = switch_rate
        self._hub = getcurrent()
        self._tasks: list[Task] = []

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def spawn(self, process: Process, name: str, body: Callable[[], None]) -> Task:
        """A new task, which begins when its turn comes."""
        task = Task(process, name)

        def run() -> None:
            try:
                body()
            except Crashed:
                pass
            except Exception as error:
                task.failure = error

        task.greenlet = greenlet(run, parent=self._hub)
        self._tasks.append(task)
        return task

    # -------------------------------------------------------------------------- in a task

    def step(self) -> None:
        """A moment at which others may run, and at which the process may turn out to be dead."""
        self.steps += 1
        self.clock.advance(self._chance.random() * _STEP_SECONDS)
        if self._chance.random() < self._switch_rate:
            self._yield()
        self.check_alive()

    def sleep(self, seconds: float) -> None:
        task = self._running()
        task.wake_at = self.now + seconds
        self._yield()
        self.check_alive()

    def wait(self, until: Callable[[], bool], timeout_seconds: float = float("inf")) -> bool:
        """Sleeps until the condition holds. Returns false on timeout."""
        self.check_alive()
        if until():
            return True
        if timeout_seconds <= 0:
            return False
        task = self._running()
        task.until, task.wake_at = until, self.now + timeout_seconds
        try:
            self._yield()
        finally:
            task.until, task.wake_at = None, 0.0
        self.check_alive()
        return until()

    def check_alive(self) -> None:
        if self.current is not None and not self.current.process.alive:
            raise Crashed

    def _running(self) -> Task:
        assert self.current is not None, "only a task may wait"
        return self.current

    def _yield(self) -> None:
        self._running()
        self._hub.switch()

    # -------------------------------------------------------------------------- the hub

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lets tasks run until it is over. Raises the first failure of a task, and `Stuck`."""
        while not is_over():
            now = self.now
            ready = [task for task in self._tasks if task.is_ready(now)]
            if ready:
                self._resume(ready[int(self._chance.random() * len(ready))])
            else:
                self._let_time_pass()

    def _resume(self, task: Task) -> None:
        assert task.greenlet is not None
        self.current = task
        try:
            if task.process.alive:
                task.greenlet.switch()
            else:
                task.greenlet.throw(Crashed)
        except Crashed:
            pass  # it had not begun
        finally:
            self.current = None
        if task.greenlet.dead:
            self._tasks.remove(task)
        if task.failure is not None:
            raise task.failure

    def _let_time_pass(self) -> None:
        """To the moment at which the first of the sleepers wakes."""
        soonest = min(
            (max(task.wake_at, task.process.frozen_until) for task in self._tasks),
            default=float("inf"),
        )
        if soonest == float("inf"):
            raise Stuck(f"no task can continue: {self._tasks}")
        self.clock.advance(max(soonest - self.now, 1e-6))

    def end(self) -> None:
        """Kills all remaining tasks, so that nothing runs after the run."""
        while self._tasks:
            for task in list(self._tasks):
                task.process.alive = False
                self._resume(task)


# ------------------------------------------------------------------------------ threading


class Threading:
    """Replacement of the module `threading`, as far as the code under test uses it, for
    greenlets.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> _Lock:  # noqa: N802 - the module's own names
        return _Lock(self._scheduler, reentrant=False)

    def RLock(self) -> _Lock:  # noqa: N802
        return _Lock(self._scheduler, reentrant=True)

    def Condition(self, lock: _Lock | None = None) -> _Condition:  # noqa: N802
        return _Condition(self._scheduler, lock or self.RLock())

    def Event(self) -> _Event:  # noqa: N802
        return _Event(self._scheduler)

    def Thread(  # noqa: N802
        self, *, target: Callable[..., None], args: Iterable[Any] = (), name: str = ""
    ) -> _Thread:
        return _Thread(self._scheduler, functools.partial(target, *args), name)

    def current_thread(self) -> _Thread | None:
        current = self._scheduler.current
        return current.thread if current is not None else None


class Queueing:
    """Replacement of the module `queue`, as far as the code under test uses it, for greenlets."""

    Empty = queue.Empty

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Queue(self) -> _Queue:  # noqa: N802 - the module's own name
        return _Queue(self._scheduler)


class _Queue:
    """A queue without an end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        patience_seconds = float("inf") if timeout is None else timeout
        if not self._scheduler.wait(lambda: bool(self._items), patience_seconds):
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class _Thread:
    """A task of the process that starts it."""

    def __init__(self, scheduler: Scheduler, body: Callable[[], None], name: str) -> None:
        self.daemon = False
        self._scheduler = scheduler
        self._body = body
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        current = self._scheduler.current
        assert current is not None, "a process starts its threads"
        self._task = self._scheduler.spawn(current.process, self._name, self._body)
        self._task.thread = self

    def join(self) -> None:
        task = self._task
        assert task is not None, "it was not started"
        self._scheduler.wait(lambda: task.done)


class _Lock:
    """A lock, reentrant or not; as in the real module, anybody may release one that is not."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, *, blocking: bool = True, timeout: float = float("inf")) -> bool:
        current = self._scheduler.current
        is_free = not self._count or (self._reentrant and self._owner is current)
        if not (is_free or (blocking and self._scheduler.wait(lambda: not self._count, timeout))):
            return False
        self._owner = current
        self._count += 1
        return True

    def release(self) -> None:
        current = self._scheduler.current
        is_dying = current is not None and not current.process.alive
        assert self._count or is_dying, "released by a task that does not hold it"
        self._count = max(self._count - 1, 0)

    def locked(self) -> bool:
        return bool(self._count)

    def give_up(self) -> int:
        """Releases it however often it is held, for a condition's wait."""
        count, self._count = self._count, 0
        return count

    def take_back(self, count: int) -> None:
        self.acquire()
        self._count = count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class _Condition:
    """A condition on `lock`."""

    def __init__(self, scheduler: Scheduler, lock: _Lock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Releases the lock until notified. Returns false on timeout."""
        seen, count = self._notified, self._lock.give_up()
        try:
            patience_seconds = float("inf") if timeout is None else timeout
            return self._scheduler.wait(lambda: self._notified > seen, patience_seconds)
        finally:
            self._lock.take_back(count)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = self._scheduler.now + (float("inf") if timeout is None else timeout)
        while not predicate() and self._scheduler.now < deadline:
            self.wait(deadline - self._scheduler.now)
        return predicate()

    def notify(self) -> None:
        self.notify_all()  # a condition may wake more than it was asked to

    def notify_all(self) -> None:
        self._notified += 1

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()


class _Event:
    """A flag that can be waited for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(self.is_set, float("inf") if timeout is None else timeout)
