"""The bill of an object store for real brokers, in simulated time: each request, by kind and path.

The brokers are agents with greenlets for threads and without sockets, as in `tests.simulation`, but
without faults, and each with a machine of its own. A minute takes about a second.

`python -m tests.support.bills --brokers 3 --topics 1 --records 10` prints the bill of three brokers
whose only topic gets ten records per second.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from unittest import mock

import msgspec
import pyarrow as pa
import structlog

import sparklog.broker.agent  # noqa: F401 - its modules get stand-ins
from sparklog import limits
from sparklog.broker.agent import Agent
from sparklog.broker.broker import Broker
from sparklog.clock import Clock
from sparklog.formats.flight_messages import CreateTopic
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    KafkaSettings,
    LogSettings,
    RequestSettings,
)
from sparklog.storage.metadata.processes import Fate
from sparklog.storage.metadata.processes import Process as ProcessId
from sparklog.storage.objects import MemoryStore, Payload, Stat, in_parallel
from sparklog.storage.objects.base import open_by_ranges
from tests.simulation.scheduler import Process, Scheduler, Task
from tests.support.brokers import payload

_Listed = TypeVar("_Listed")

REQUEST_SECONDS: Final = 0.02
"""The time that each request takes."""
_MONTH_MINUTES: Final = 730 * 60
_DOLLARS: Final = {"put": 0.005 / 1_000, "list": 0.005 / 1_000, "read": 0.0004 / 1_000}
_PAGE: Final = 1_000
"""Objects per page of a listing, which is a request."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Requests per minute, by kind (put, list or read) and pattern of their paths."""

    per_minute: dict[tuple[str, str], float]

    @property
    def dollars(self) -> float:
        """Dollars per month."""
        return sum(_dollars(kind, count) for (kind, _), count in self.per_minute.items())

    def of(self, kind: str, path: str = "") -> float:
        """Requests per minute of a kind, to paths whose pattern begins with `path`."""
        return sum(
            count
            for (found, pattern), count in self.per_minute.items()
            if found == kind and pattern.startswith(path)
        )

    def __str__(self) -> str:
        counts = ", ".join(f"{self.of(kind):.2f} {kind}s" for kind in _DOLLARS)
        lines = [f"{self.dollars:.2f} dollars per month; per minute {counts}"]
        rows = sorted(
            self.per_minute.items(), key=lambda each: (-_dollars(each[0][0], each[1]), each)
        )
        lines += [
            f"{_dollars(kind, count):8.2f}  {count:8.2f}  {kind:4}  {path}"
            for (kind, path), count in rows
        ]
        return "\n".join(lines)


def _dollars(kind: str, per_minute: float) -> float:
    return _DOLLARS[kind] * per_minute * _MONTH_MINUTES


def pattern(path: str) -> str:
    """Returns the pattern of a path: names and numbers become stars."""
    path = re.sub(r"^topics/[^/]+", "topics/*", path)
    path = re.sub(r"partition=\d+/.*", "partition=*/*.parquet", path)
    return re.sub(r"\d+", "*", path)


class BilledStore:
    """A bucket as one process sees it: delays each request, and counts it by kind and pattern."""

    is_local = False
    requests_at_once = limits.STORE_REQUESTS_AT_ONCE

    def __init__(
        self, inner: MemoryStore, requests: Counter[tuple[str, str]], clock: Clock
    ) -> None:
        self.uri = inner.uri
        self._inner = inner
        self._requests = requests
        self._clock = clock

    def _request(self, kind: str, path: str) -> None:
        self._requests[kind, pattern(path)] += 1
        self._clock.sleep(REQUEST_SECONDS)

    def put_new(self, path: str, data: Payload) -> None:
        self._request("put", path)
        self._inner.put_new(path, data)

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        def put(item: tuple[str, Payload]) -> Exception | None:
            self._request("put", item[0])
            return self._inner.put_all_new([item])[0]

        return in_parallel(self, put, objects)

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        self._request("put", path)
        self._inner.put(path, data, durable=durable)

    def get(self, path: str) -> pa.Buffer:
        self._request("read", path)
        return self._inner.get(path)

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        self._request("read", path)
        return self._inner.get_range(path, start, length)

    def open(self, path: str) -> pa.NativeFile:
        return open_by_ranges(self, path)

    def stat(self, path: str) -> Stat:
        self._request("read", path)
        return self._inner.stat(path)

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        return self._listed(folder, self._inner.list_after(folder, after))

    def folders(self, folder: str) -> list[str]:
        return self._listed(folder, self._inner.folders(folder))

    def walk(self, folder: str) -> Iterator[Stat]:
        return iter(self._listed(folder, list(self._inner.walk(folder))))

    def _listed(self, folder: str, found: list[_Listed]) -> list[_Listed]:
        for _ in range(max(-(-len(found) // _PAGE), 1)):
            self._request("list", folder)
        return found

    def delete(self, paths: Iterable[str]) -> None:
        self._inner.delete(paths)  # free

    def sync_folder(self, folder: str) -> None:
        self._inner.sync_folder(folder)

    def sync_files(self, paths: Iterable[str]) -> None:
        self._inner.sync_files(paths)

    def remove_folder(self, folder: str) -> None:
        self._inner.remove_folder(folder)

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        return self._inner.sweep_temporaries(folder, older_than_us)

    def free_bytes(self) -> int | None:
        return None

    def free_inodes(self) -> int | None:
        return None


class Bucket:
    """An object store in simulated time, its brokers, and the requests of them all."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(random.Random(0), switch_rate=0.0)
        self.requests = Counter[tuple[str, str]]()
        self._store = MemoryStore(self.scheduler.clock)
        self._stack = contextlib.ExitStack()
        self._outside = Process(self.scheduler, "outside")
        self.agents: list[Agent] = []
        self._machines: dict[Process, ProcessId] = {}
        self._processes: list[Process] = []
        """Those of the brokers, in the order of their ids."""

    def __enter__(self) -> Self:
        for name, value in _stand_ins(self).items():
            self._stack.enter_context(mock.patch(name, value))
        for name, module in sorted(sys.modules.items()):
            if name.startswith(("sparklog.broker.", "sparklog.storage.")):
                for stand_in in ("threading", "queue"):
                    if hasattr(module, stand_in):
                        value = getattr(self.scheduler, stand_in)
                        self._stack.enter_context(mock.patch.object(module, stand_in, value))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.scheduler.end()
        self._stack.close()

    def view(self, process: Process | None = None) -> BilledStore:
        """Returns the store as a process sees it; None: one that is not a broker."""
        return BilledStore(self._store, self.requests, (process or self._outside).clock)

    # -------------------------------------------------------------------------- brokers

    def start(self, settings: BrokerSettings | None = None) -> Agent:
        """Starts a broker, with the next id, and returns once it serves."""
        number = len(self.agents)
        process = Process(self.scheduler, f"broker {number}")
        self._machines[process] = ProcessId(host="a host", machine=process.name, pid=number + 1)
        settings = msgspec.structs.replace(
            settings or BrokerSettings(),
            root=self._store.uri,
            id=number,
            flight=FlightSettings(listen=f"127.0.0.1:{1_000 + number}"),
            kafka=KafkaSettings(listen=""),
            log=LogSettings(level="error"),
        )
        agent = Agent(settings, store=self.view(process), clock=process.clock)
        self.agents.append(agent)
        self._processes.append(process)
        self.run(agent.start, process)
        return agent

    def stop(self, number: int) -> None:
        """Stops a broker cleanly."""
        self.run(self.agents[number].stop, self._processes[number])

    def kill(self, number: int) -> None:
        """Ends the process of a broker."""
        self._processes[number].alive = False

    def run(self, body: Callable[[], Any], process: Process | None = None) -> Any:
        """Runs `body` as a task, and returns its result."""
        found: list[Any] = []
        task = self.scheduler.spawn(process or self._outside, "run", lambda: found.append(body()))
        self.scheduler.run(lambda: task.done)
        return found[0]

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        """Starts a task outside of the brokers."""
        return self.scheduler.spawn(self._outside, name, body)

    def pass_time(self, seconds: float) -> None:
        """Lets the brokers run."""
        end = self.scheduler.now + seconds
        self.spawn("time", lambda: self.scheduler.sleep(seconds))
        self.scheduler.run(lambda: self.scheduler.now >= end)

    def bill(self, minutes: float) -> Bill:
        """Returns the requests of the next minutes."""
        before = self.requests.copy()
        self.pass_time(60 * minutes)
        found = self.requests - before
        return Bill({key: count / minutes for key, count in found.items()})

    def create(self, names: Sequence[str], partitions: int) -> None:
        """Creates topics."""

        def create() -> None:
            for name in names:
                self.agents[0].parts.broker.topics.create(
                    CreateTopic(topic=name, partitions=partitions)
                )

        self.run(create)

    def produce(
        self, names: Sequence[str], partitions: int, records_per_second: float, size: int = 100
    ) -> None:
        """Sends a record at even intervals, to each partition of each topic in turn, forever."""
        batch = payload([bytes(size)])
        places = [(name, number) for number in range(partitions) for name in names]

        def send() -> None:
            began, count = self.scheduler.now, 0
            while True:
                name, number = places[count % len(places)]
                broker = self._leader(name, number)
                # The broker's flush leaders do the rest.
                broker.append(name, number, batch, None)
                count += 1
                self.scheduler.sleep(began + count / records_per_second - self.scheduler.now)

        self.spawn("producer", send)

    def _leader(self, name: str, number: int) -> Broker:
        for agent in self.agents:
            led = agent.parts.led_partitions
            if led.has_topic(name) and number in led.topic(name).partitions:
                return agent.parts.broker
        raise AssertionError(f"no broker leads {name}/{number}")


# ------------------------------------------------------------------------------ stand-ins


class _Flight:
    """Stands for the Flight listener."""

    calls = 0
    open_calls = 0

    def __init__(self, *_: object, **_bounds: object) -> None: ...

    def close(self) -> None: ...

    def budgets(self) -> list[object]:
        return []


class _Port:
    """Stands for a listener's socket."""

    is_bound = True

    def __init__(self, _option: str, listen: str) -> None:
        self.address = self.listen_address = listen
        self.port = int(listen.rpartition(":")[2])

    def try_bind(self) -> bool:
        return True

    def bind(self, *, patience_seconds: float) -> None: ...

    def listen(self, *, patience_seconds: float) -> None: ...

    def overlaps(self, _other: object) -> bool:
        return False

    def close(self) -> None: ...


class _Pool:
    """Stands for `ThreadPoolExecutor`: each piece of work is a task of its process."""

    def __init__(
        self, bucket: Bucket, _size: int, _prefix: str = "", *, thread_name_prefix: str = "pool"
    ) -> None:
        self._bucket = bucket
        self._name = thread_name_prefix

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _Future(self._bucket, functools.partial(work, *args, **kwargs), self._name)

    def shutdown(self, *_: object, **_options: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, work: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        return [each.result() for each in [self.submit(work, item) for item in items]]


class _Future:
    """The result of work in a pool."""

    def __init__(self, bucket: Bucket, work: Callable[[], Any], name: str) -> None:
        self._work = work
        self._result: Any = None
        self._failure: Exception | None = None
        self._is_done = False
        self._thread = bucket.scheduler.threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._failure = error
        self._is_done = True

    def done(self) -> bool:
        return self._is_done

    def cancel(self) -> None: ...

    def exception(self) -> Exception | None:
        self._thread.join()
        return self._failure

    def result(self) -> Any:
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._result


def _stand_ins(bucket: Bucket) -> dict[str, object]:
    def this_process() -> ProcessId:
        current = bucket.scheduler.current
        assert current is not None
        return bucket._machines.get(current.process, ProcessId())

    def is_of_this_machine(process: ProcessId) -> bool:
        return process.machine == this_process().machine

    pool = functools.partial(_Pool, bucket)
    return {
        "sparklog.broker.pools.ThreadPoolExecutor": pool,
        "sparklog.storage.objects.parallel.ThreadPoolExecutor": pool,
        "sparklog.storage.metadata.observer.ThreadPoolExecutor": pool,
        "sparklog.broker.agent.this_process": this_process,
        "sparklog.broker.listening.this_process": this_process,
        "sparklog.broker.listening.FlightListener": _Flight,
        "sparklog.broker.ports.BoundPort": _Port,
        "sparklog.storage.metadata.liveness.is_of_this_machine": is_of_this_machine,
        "sparklog.storage.metadata.liveness.fate_of": lambda _process: Fate.UNKNOWN,
        "sparklog.broker.live_members.fate_of": lambda _process: Fate.UNKNOWN,
        "sys.setswitchinterval": lambda _seconds: None,
    }


def main() -> None:
    """Prints the bill of idle brokers, or of brokers whose topics get records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--topics", type=int, default=0)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--records", type=float, default=0.0, help="per second, of all topics")
    parser.add_argument("--puts-per-second", type=float, default=20.0, help="of each broker")
    parser.add_argument("--after", type=float, default=5.0, help="minutes before the bill begins")
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    requests = RequestSettings(puts_per_second=given.puts_per_second)
    names = [f"t{number}" for number in range(given.topics)]
    with Bucket() as bucket:
        for _ in range(given.brokers):
            bucket.start(BrokerSettings(requests=requests))
        bucket.create(names, given.partitions)
        if given.records:
            bucket.produce(names, given.partitions, given.records)
        bucket.pass_time(60 * given.after)
        print(bucket.bill(given.minutes))  # noqa: T201


if __name__ == "__main__":
    main()
