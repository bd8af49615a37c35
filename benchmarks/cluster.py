"""Kills and stops of a cluster's three brokers on this machine, as seen by Kafka clients.

One client writes numbers to each partition at a steady rate, and another reads them in a group. For
each kill and stop, the longest time without an ack is measured per partition. At the end everything
is read again: each partition must contain each number once, in order.

Brokers on one machine notice immediately that another one's process has exited. To measure the time
without this shortcut, each broker gets its own hostname (`unshare`, which requires root).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias

import numpy as np

import sparklog
from benchmarks import jars
from benchmarks.kafka_process import KafkaCluster
from benchmarks.progress import doing
from benchmarks.store_process import ROOT, StoreProcess
from benchmarks.wide.measures import lags, result_of, start_load
from sparklog.bench.broker import BrokerProcess, FreshRoot, free_address
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.bench.writing import STREAMS, in_streams
from sparklog.client.log import Log

if TYPE_CHECKING:
    import confluent_kafka

_BROKERS: Final = (1, 2, 3)
_TOPICS: Final = 10
_PARTITIONS: Final = 30
_ROUNDS_PER_SECOND: Final = 5
"""More records would saturate the two cores of a small machine, and delay acks."""
_DEATHS: Final = 30
_STOPS: Final = 6
_PAUSE_SECONDS: Final = 0.002
"""The longest pause of the writer."""
_SETTLED_SECONDS: Final = 5.0
"""A pause after the others have taken over, and after a broker has restarted."""
_PATIENCE_SECONDS: Final = 60.0
_WIDE_TOPICS: Final = 1_000
_WIDE_PARTITIONS: Final = 10
_WIDE_BUSY: Final = 200
_WIDE_RATE: Final = 1_000
"""Records/s over all busy topics."""
_STORE_MILLISECONDS: Final = 20
_STORE_ROUNDS_PER_SECOND: Final = 0.5
"""librdkafka has five requests in flight per broker, each for one partition. With acks that take
45 ms, this allows a hundred records/s; at a higher rate, records would wait even without a kill.
"""
_WITH_HOST_NAME: Final = (
    "unshare",
    "--uts",
    "sh",
    "-c",
    'hostname "$0" && exec "$@"',
)
"""A prefix for a hostname and a command: runs the command on a host with that name."""
_SELDOM: Final = {"fetch.min.bytes": 1_000_000, "fetch.wait.max.ms": 500}
_Place: TypeAlias = tuple[str, int]


class _Process(Protocol):
    """A running broker."""

    def kill(self) -> None:
        """Ends it as a crash would."""
        ...

    def stop(self) -> None:
        """Shuts it down cleanly."""
        ...


class _Cluster(Protocol):
    """Three brokers."""

    running: dict[int, _Process]

    @property
    def bootstrap(self) -> str: ...

    def start(self, broker: int) -> None: ...


class _Kafka:
    """A real Kafka cluster of three nodes, with three replicas of every partition."""

    def __init__(self, folder: Path) -> None:
        self._cluster = KafkaCluster(jars.find().broker, folder)
        self.running: dict[int, _Process] = {}

    @property
    def bootstrap(self) -> str:
        return self._cluster.address

    def start(self, broker: int) -> None:
        self.running[broker] = self._cluster.brokers[broker].start()

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        self.running.update(self._cluster.brokers)
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.stop()


class _Brokers:
    """Our brokers, each in its own process."""

    def __init__(
        self,
        root: Path | str,
        brokers: Sequence[int] = _BROKERS,
        *,
        have_hosts: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`have_hosts`: each broker appears to be on its own host."""
        self._root = root
        self._have_hosts = have_hosts
        self._settings = settings or {}
        self.addresses = {broker: free_address() for broker in brokers}
        self.running: dict[int, _Process] = {}

    @property
    def bootstrap(self) -> str:
        return ",".join(self.addresses.values())

    def connect(self) -> Log:
        """Returns a native client of all brokers."""
        return sparklog.connect(str(self._root))

    def start(self, broker: int) -> None:
        settings = {**self._settings, "SPARKLOG_ID": str(broker)}
        prefix = [*_WITH_HOST_NAME, f"host-{broker}"] if self._have_hosts else []
        process = BrokerProcess(self._root, settings, kafka=self.addresses[broker], prefix=prefix)
        self.running[broker] = process.start()

    def __enter__(self) -> Self:
        for broker in self.addresses:
            self.start(broker)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.stop()


class _BrokersOnStore(_Brokers):
    """Brokers of a root in an S3 store that takes 20 ms per request.

    Each has its own hostname: brokers that share a bucket are seldom on one machine.
    """

    def __init__(self, _folder: Path) -> None:
        self._store = StoreProcess(_STORE_MILLISECONDS)
        super().__init__(ROOT, have_hosts=True, settings=self._store.environment())

    def __enter__(self) -> Self:
        self._store.__enter__()
        try:
            return super().__enter__()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._store.__exit__()


class _Writer:
    """A producer that writes 0 to each partition in turn, then 1, and so on.

    Its records are spread evenly over time, so that none has to wait for simultaneous ones.
    """

    def __init__(self, bootstrap: str, rounds_per_second: float) -> None:
        import confluent_kafka

        self._rounds_per_second = rounds_per_second
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "linger.ms": 5,
                "enable.idempotence": True,
                "log_level": 0,
            }
        )
        self.acked: dict[_Place, list[tuple[float, float]]] = defaultdict(list)
        """The time of each record's ack, in monotonic seconds, and its latency since the call."""
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        places = [(f"t{n}", partition) for partition in range(_PARTITIONS) for n in range(_TOPICS)]
        began, sent = time.monotonic(), 0
        while not self._is_over.is_set():
            due = (time.monotonic() - began) * self._rounds_per_second * len(places)
            while sent < due:
                number, place = divmod(sent, len(places))
                topic, partition = places[place]
                value = str(number).encode()
                self._producer.produce(topic, value, partition=partition, callback=self._noted)
                sent += 1
            self._producer.poll(_PAUSE_SECONDS)
        self._producer.flush(_PATIENCE_SECONDS)

    def _noted(self, error: Any, message: confluent_kafka.Message) -> None:
        if error is not None:
            self.failures.append(str(error))
        else:
            place = message.topic() or "", message.partition() or 0
            self.acked[place].append((time.monotonic(), message.latency() or 0.0))

    def took_seconds(self, since: float = 0.0) -> list[float]:
        """Returns the times from send to ack of the records acked at `since` or later."""
        return [took for found in self.acked.values() for at, took in list(found) if at >= since]

    def longest_waits(self, places: Iterable[_Place], since: float) -> list[float]:
        """Returns, for each place, the longest wait of a record for its ack since then, in seconds.

        A place that still has no ack has been waiting since shortly after its last one.
        """
        due = time.monotonic() - 1 / self._rounds_per_second
        found = []
        for place in places:
            acked = list(self.acked[place])
            silent = due - (acked[-1][0] if acked else since)
            found.append(max([silent, *(took for at, took in acked if at >= since)]))
        return found

    def next_acks(self, places: Iterable[_Place], since: float) -> list[float]:
        """Returns, for each place, the time from `since` until its next ack, in seconds.

        Acks within the first half second are ignored, as they were already in flight.
        """
        began, now = since + 0.5, time.monotonic()
        return [
            next((at for at, _ in list(self.acked[place]) if at >= began), now) - since
            for place in places
        ]

    def close(self) -> None:
        """Stops sending, and returns once everything is acked. May be called again."""
        self._is_over.set()
        self._thread.join()


class _Reader:
    """A group member that reads everything, and counts how often it is assigned partitions.

    It fetches twice a second. With the default, a fetch after each record, it would use as much of
    a small machine's two cores as all writers together.
    """

    def __init__(self, bootstrap: str) -> None:
        self.assignments = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bootstrap,))
        self._thread.start()

    def _run(self, bootstrap: str) -> None:
        with _consumer(bootstrap, "group", **_SELDOM) as consumer:
            consumer.subscribe([f"t{n}" for n in range(_TOPICS)], on_assign=self._assigned)
            while not self._is_over.is_set():
                consumer.consume(10_000, 0.2)

    def _assigned(self, _consumer: object, _partitions: object) -> None:
        self.assignments += 1

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


@contextlib.contextmanager
def _consumer(
    bootstrap: str, group: str, **options: str | int
) -> Iterator[confluent_kafka.Consumer]:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "log_level": 0,
            **options,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def kill(options: BenchOptions) -> Iterator[Measurement]:
    """Kills and stops of one of three brokers, as seen by Kafka clients."""
    deaths = max(round(_DEATHS * options.seconds / 10), 1)
    stops = max(round(_STOPS * options.seconds / 10), 1)
    with _running(options) as (brokers, admin, writer):
        reader = _Reader(brokers.bootstrap)
        time.sleep(_SETTLED_SECONDS)
        dead = _kill(brokers, admin, writer, deaths, away_seconds=_SETTLED_SECONDS)
        before = reader.assignments
        stopped, took = _stop(brokers, admin, writer, stops)
        rebalances = reader.assignments - before
        reader.close()
        yield _gaps(f"a broker without an ack, {deaths} × kill -9", dead, 1.5, 3.0)
        p50, p99 = np.percentile(stopped, [50, 99])
        yield Measurement(
            name=f"the same, {stops} × SIGTERM, p50, p99; the longest stop",
            value=f"{1e3 * p50:.0f}, {1e3 * p99:.0f} ms; {max(took):.2f} s",
            target="≤ 60, 300 ms; 5 s",
            met=bool(p50 <= 0.06 and p99 <= 0.3 and max(took) <= 5),
            detail=f"{rebalances} rebalances of the group",
        )
        yield _judged(brokers, writer)


def hosts(options: BenchOptions) -> Iterator[Measurement]:
    """Kills of one of three brokers that cannot see each other's processes."""
    deaths = max(round(_DEATHS * options.seconds / 10), 1)
    with _running(options, _on_hosts) as (brokers, admin, writer):
        time.sleep(_SETTLED_SECONDS)
        dead = _kill(brokers, admin, writer, deaths, away_seconds=2 * _SETTLED_SECONDS)
        yield _gaps(f"a broker on another host, {deaths} × kill -9", dead, 6.5, 9.0)
        yield _judged(brokers, writer)


def store(options: BenchOptions) -> Iterator[Measurement]:
    """Kills of one of three brokers on an object store, each on its own host."""
    deaths = max(round(_DEATHS * options.seconds / 10), 1)
    with _running(options, _BrokersOnStore, _STORE_ROUNDS_PER_SECOND) as (brokers, admin, writer):
        time.sleep(_SETTLED_SECONDS)
        dead = _kill(
            brokers,
            admin,
            writer,
            deaths,
            away_seconds=4 * _SETTLED_SECONDS,
            seconds_of=writer.next_acks,
        )
        yield _gaps(
            f"a broker on an object store of {_STORE_MILLISECONDS} ms until the next ack,"
            f" {deaths} × kill -9",
            dead,
            13.0,
            17.0,
            rounds_per_second=_STORE_ROUNDS_PER_SECOND,
        )
        yield _judged(brokers, writer)


def kafka(options: BenchOptions) -> Iterator[Measurement]:
    """Kills and stops of one of a real Kafka's three nodes, with default timeouts."""
    deaths = max(round(_DEATHS * options.seconds / 10), 1)
    stops = max(round(_STOPS * options.seconds / 10), 1)
    with _running(options, _Kafka) as (brokers, admin, writer):
        time.sleep(_SETTLED_SECONDS)
        # A node counts as dead after nine seconds of silence (`broker.session.timeout.ms`).
        dead = _kill(brokers, admin, writer, deaths, away_seconds=4 * _SETTLED_SECONDS)
        stopped, took = _stop(brokers, admin, writer, stops)
        yield _gaps(f"a node of Kafka without an ack, {deaths} × kill -9", dead)
        p50, p99 = np.percentile(stopped, [50, 99])
        yield Measurement(
            name=f"the same, {stops} × SIGTERM, p50, p99; the longest stop",
            value=f"{1e3 * p50:.0f}, {1e3 * p99:.0f} ms; {max(took):.2f} s",
        )
        yield _judged(brokers, writer)


def rolling(options: BenchOptions) -> Iterator[Measurement]:
    """A rolling restart of three brokers under load."""
    rounds = max(round(options.seconds / 5), 1)
    with _running(options) as (brokers, admin, writer):
        time.sleep(_SETTLED_SECONDS)
        began = time.monotonic()
        for number in range(rounds):
            for victim in _BROKERS:
                with doing(f"restart of broker {victim}, round {number + 1} of {rounds}"):
                    brokers.running.pop(victim).stop()
                    _start_again(brokers, admin, victim)
        took = writer.took_seconds(began)
        p50, p99 = np.percentile(took, [50, 99])
        yield Measurement(
            name=f"rolling restart of three brokers, {rounds} times: from send to ack, p50, p99",
            value=f"{1e3 * p50:.0f}, {1e3 * p99:.0f} ms",
            target="p99 ≤ 1 s",
            met=bool(p99 <= 1.0),
            detail=f"the longest {max(took):.2f} s",
        )
        yield _judged(brokers, writer)


def wide(options: BenchOptions) -> Iterator[Measurement]:
    """1,000 topics on three brokers, 200 of which receive records."""
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    names = [f"wide-{number}" for number in range(_WIDE_TOPICS)]
    with FreshRoot(options.folder) as root, _Brokers(root) as brokers:
        admin = AdminClient({"bootstrap.servers": brokers.bootstrap, "log_level": 0})
        _wait_for_all(admin)
        new = [NewTopic(name, _WIDE_PARTITIONS, 1) for name in names]
        with doing(f"{_WIDE_TOPICS:,} topics"):
            for made in admin.create_topics(new, request_timeout=_PATIENCE_SECONDS).values():
                made.result(2 * _PATIENCE_SECONDS)
            time.sleep(_SETTLED_SECONDS)
        with doing(f"records for {_WIDE_BUSY} of them"):
            load = start_load(
                brokers.bootstrap,
                f"--topics={_WIDE_BUSY}",
                f"--partitions={_WIDE_PARTITIONS}",
                f"--rate={_WIDE_RATE}",
                f"--seconds={3 * options.seconds}",
            )
            sent = result_of(load)
            with brokers.connect() as log:
                log.flush_to_table(timeout_seconds=2 * _PATIENCE_SECONDS)
        found = np.concatenate([lags(root, name) for name in names[:_WIDE_BUSY]])
    p50, p99 = np.percentile(found, [50, 99])
    yield Measurement(
        name=f"{_WIDE_TOPICS:,} topics × {_WIDE_PARTITIONS} partitions, three brokers,"
        f" {_WIDE_RATE:,} records/s to {_WIDE_BUSY} of them: oldest record of a file, sent until"
        " committed",
        value=f"p50 {p50:.2f}, p99 {p99:.2f}, max {found.max():.2f} s",
        target="p99 ≤ 3 s",
        met=bool(p99 <= 3.0),
        detail=f"{len(found)} files, {sent['acked']} records, {sent['refused']} refused",
    )


def speed(options: BenchOptions) -> Iterator[Measurement]:
    """A burst of large batches to one broker, and to three on the same machine."""
    rates = {}
    for brokers in (_BROKERS[:1], _BROKERS):
        with FreshRoot(options.folder) as root, _Brokers(root, brokers) as running:
            with running.connect() as log:
                log.create_topic("burst", partitions=2 * len(_BROKERS))
                for wanted in (options.rows // 10, options.rows):  # the first is a warm-up
                    share = wanted // STREAMS
                    rows, seconds = in_streams(log, "burst", lambda sent: sent >= share)  # noqa: B023
            rates[len(brokers)] = rows / seconds
    ratio = rates[len(_BROKERS)] / rates[1]
    yield Measurement(
        name=f"a burst of {options.rows / 1e6:.0f} M rows: three brokers on this machine, and one",
        value=f"{rates[len(_BROKERS)] / 1e6:.2f}, {rates[1] / 1e6:.2f} M rows/s: {ratio:.2f} ×",
        target="≥ 0.9 × on two cores",
        met=ratio >= 0.9,
    )


# ------------------------------------------------------------------------------ parts


def _on_hosts(root: Path) -> _Brokers:
    return _Brokers(root, have_hosts=True)


@contextlib.contextmanager
def _running(
    options: BenchOptions,
    cluster_in: Callable[[Path], AbstractContextManager[_Cluster]] = _Brokers,
    rounds_per_second: float = _ROUNDS_PER_SECOND,
) -> Iterator[tuple[_Cluster, Any, _Writer]]:
    """Runs three brokers and a writer to all partitions."""
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    with FreshRoot(options.folder) as root, cluster_in(root) as brokers:
        admin = AdminClient({"bootstrap.servers": brokers.bootstrap, "log_level": 0})
        _wait_for_all(admin)
        wanted = [NewTopic(f"t{n}", _PARTITIONS, -1) for n in range(_TOPICS)]
        for made in admin.create_topics(wanted).values():
            made.result(_PATIENCE_SECONDS)
        writer = _Writer(brokers.bootstrap, rounds_per_second)
        try:
            yield brokers, admin, writer
        finally:
            writer.close()


def _stop(
    brokers: _Cluster, admin: Any, writer: _Writer, stops: int
) -> tuple[list[float], list[float]]:
    """Stops brokers in turn, and starts them again.

    Returns the longest wait for an ack of each of their partitions, and the duration of each stop,
    in seconds.
    """
    waited, took = list[float](), list[float]()
    for number in range(stops):
        victim = _BROKERS[number % len(_BROKERS)]
        with doing(f"stop {number + 1} of {stops}"):
            led, at = _led_by(admin, victim), time.monotonic()
            brokers.running.pop(victim).stop()
            took.append(time.monotonic() - at)
            time.sleep(_SETTLED_SECONDS)
            waited += writer.longest_waits(led, at)
            _start_again(brokers, admin, victim)
    return waited, took


def _kill(
    brokers: _Cluster,
    admin: Any,
    writer: _Writer,
    deaths: int,
    *,
    away_seconds: float,
    seconds_of: Callable[[Iterable[_Place], float], list[float]] | None = None,
) -> list[float]:
    """Kills brokers in turn. Returns how long each of their partitions got no ack, in seconds.

    `seconds_of`: measures this for partitions, from a point in time; by default, `longest_waits`.
    """
    chance, found = random.Random(7), []
    measure = seconds_of or writer.longest_waits
    for number in range(deaths):
        controller = int(admin.list_topics(timeout=_PATIENCE_SECONDS).controller_id)
        victim = controller if number % 3 == 0 else chance.choice(_BROKERS)
        with doing(f"death {number + 1} of {deaths}"):
            led, at = _led_by(admin, victim), time.monotonic()
            brokers.running.pop(victim).kill()
            time.sleep(away_seconds)
            found += measure(led, at)
            _start_again(brokers, admin, victim)
    return found


def _gaps(
    what: str,
    found: Sequence[float],
    most_p50: float = 0.0,
    most_p99: float = 0.0,
    rounds_per_second: float = _ROUNDS_PER_SECOND,
) -> Measurement:
    """`most_p50` and `most_p99`: the target; 0: no target."""
    p50, p99 = np.percentile(found, [50, 99])
    return Measurement(
        name=f"{_TOPICS} × {_PARTITIONS} partitions, {rounds_per_second:g} records/s each, three"
        f" brokers: partitions of {what}, p50, p99",
        value=f"{p50:.2f}, {p99:.2f} s",
        target=f"≤ {most_p50:g}, {most_p99:g} s" if most_p50 else "",
        met=bool(p50 <= most_p50 and p99 <= most_p99) if most_p50 else None,
    )


def _judged(brokers: _Cluster, writer: _Writer) -> Measurement:
    writer.close()
    wrong, count, examples = _wrong_partitions(brokers.bootstrap, writer)
    return Measurement(
        name="records that failed; partitions in which one is lost, doubled or out of order",
        value=f"{len(writer.failures)}; {wrong} of {count:,} records",
        target="0; 0",
        met=not writer.failures and not wrong,
        detail=examples,
    )


def _led_by(admin: Any, broker: int) -> list[_Place]:
    """Returns the partitions that the broker leads, without internal topics."""
    topics = admin.list_topics(timeout=_PATIENCE_SECONDS).topics
    return [
        (name, number)
        for name, topic in topics.items()
        for number, partition in topic.partitions.items()
        if partition.leader == broker and not name.startswith("__")
    ]


def _wait_for_all(admin: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if len(admin.list_topics(timeout=_PATIENCE_SECONDS).brokers) == len(_BROKERS):
            return
        time.sleep(0.1)
    raise TimeoutError("not all brokers are up")


def _start_again(brokers: _Cluster, admin: Any, broker: int) -> None:
    brokers.start(broker)
    _wait_for_all(admin)
    time.sleep(_SETTLED_SECONDS)


def _wrong_partitions(bootstrap: str, writer: _Writer) -> tuple[int, int, str]:
    """Reads everything. Returns the number of wrong partitions, that of records, and examples."""
    found: dict[_Place, list[int]] = defaultdict(list)
    wanted, count = sum(map(len, writer.acked.values())), 0
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with _consumer(bootstrap, "again") as consumer:
        consumer.subscribe([f"t{n}" for n in range(_TOPICS)])
        while count < wanted and time.monotonic() < deadline:
            for message in consumer.consume(10_000, 0.5):
                place = message.topic() or "", message.partition() or 0
                found[place].append(int(message.value() or b"-1"))
                count += 1
                deadline = time.monotonic() + _PATIENCE_SECONDS
    wrong = [
        place for place, times in writer.acked.items() if found[place] != list(range(len(times)))
    ]
    examples = ", ".join(
        f"{place}: {len(found[place])} of {len(writer.acked[place])}" for place in wrong[:3]
    )
    return len(wrong), wanted, examples
