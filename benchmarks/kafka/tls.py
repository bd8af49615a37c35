"""The cost of TLS: each side with it and without, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Final, NamedTuple

from benchmarks import jars
from benchmarks.kafka import clients
from benchmarks.kafka.sides import PARTITIONS, KafkaSetup, measure
from benchmarks.kafka_process import KafkaProcess
from benchmarks.progress import doing
from benchmarks.secured import TrialFiles, trial_files
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import Measurement, Times

_TURNS: Final = 3
_HOT_TAIL_BYTES: Final = 1 << 30


class _Figures(NamedTuple):
    produced: float
    consumed: float
    single: Times


@measure
def tls(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures librdkafka with and without TLS, at both sides."""
    with FreshRoot(setup.folder) as folder:
        files = trial_files(folder)
        found: dict[str, dict[bool, list[_Figures]]] = {}
        for turn in range(_TURNS):
            for name, run in _SIDES.items():
                if name == "Kafka" and not jars.find().broker:
                    continue
                of_side = found.setdefault(name, {False: [], True: []})
                for has_tls in (False, True):
                    what = f"{name} {'with' if has_tls else 'without'} TLS"
                    with doing(f"{what}, turn {turn + 1} of {_TURNS}"):
                        of_side[has_tls].append(run(setup, files, has_tls))
    yield from _report(found)


def _report(found: Mapping[str, Mapping[bool, list[_Figures]]]) -> Iterator[Measurement]:
    for what, figure in (
        ("confluent-kafka, produce", lambda each: each.produced),
        ("confluent-kafka, consume", lambda each: each.consumed),
    ):
        best = {
            name: {has_tls: max(map(figure, runs)) for has_tls, runs in of_side.items()}
            for name, of_side in found.items()
        }
        ratios = {name: each[True] / each[False] for name, each in best.items()}
        detail = ", ".join(
            f"{name} {each[True] / 1e6:.2f} of {each[False] / 1e6:.2f} M records/s"
            for name, each in best.items()
        )
        ours, theirs = ratios["sparklog"], ratios.get("Kafka")
        beside = f"; Kafka {theirs:.2f} ×" if theirs is not None else ""
        yield Measurement(
            name=f"{what}: TLS against plaintext",
            value=f"{ours:.2f} ×",
            target="≥ 0.7 ×, and not below Kafka's by more than 0.1",
            met=ours >= 0.7 and (theirs is None or ours >= min(theirs, 1.0) - 0.1),
            detail=detail + beside,
        )
    medians = {
        name: {
            has_tls: min(each.single.ms(50) for each in runs) for has_tls, runs in of_side.items()
        }
        for name, of_side in found.items()
    }
    yield Measurement(
        name="confluent-kafka, one record at a time, acked: more with TLS, p50",
        value=f"{medians['sparklog'][True] - medians['sparklog'][False]:+.2f} ms",
        detail=", ".join(
            f"{name} {each[True]:.2f} and {each[False]:.2f} ms" for name, each in medians.items()
        ),
    )


def _measured(setup: KafkaSetup, address: str, client: Mapping[str, str]) -> _Figures:
    count = setup.options.rows // 10
    clients.create(address, PARTITIONS, client=client)
    clients.confluent_produce(address, count // 20, client)
    produced = clients.confluent_produce(address, count, client)
    consumed = max(clients.confluent_consume(address, count, client) for _ in range(3))
    single = clients.one_at_a_time(address, round(100 * setup.options.seconds), client)
    return _Figures(produced, consumed, single)


def _ours(setup: KafkaSetup, files: TrialFiles, has_tls: bool) -> _Figures:
    settings = {"SPARKLOG_HOT_TAIL_BYTES": str(_HOT_TAIL_BYTES)}
    if has_tls:
        settings |= files.settings
    kafka = f"{'SSL://' if has_tls else ''}127.0.0.1:0"
    with FreshRoot(setup.folder) as folder, ExitStack() as ending:
        process = BrokerProcess(folder / "root", settings, kafka=kafka)
        process.start()
        ending.callback(process.stop)
        return _measured(setup, process.kafka_address, _client(files, has_tls))


def _theirs(setup: KafkaSetup, files: TrialFiles, has_tls: bool) -> _Figures:
    settings = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": files.both,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": files.ca,
    }
    with (
        FreshRoot(setup.folder) as folder,
        KafkaProcess(
            jars.find().broker,
            folder / "kafka",
            settings if has_tls else {},
            protocol="SSL" if has_tls else "PLAINTEXT",
        ) as process,
    ):
        return _measured(setup, process.address, _client(files, has_tls))


def _client(files: TrialFiles, has_tls: bool) -> dict[str, str]:
    return {"security.protocol": "SSL", "ssl.ca.location": files.ca} if has_tls else {}


_SIDES: Final[Mapping[str, Callable[[KafkaSetup, TrialFiles, bool], _Figures]]] = {
    "sparklog": _ours,
    "Kafka": _theirs,
}
