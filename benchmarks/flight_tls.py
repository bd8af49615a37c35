"""The cost of TLS and of logins for native clients, each with it and without in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import sparklog
from benchmarks.processes import cpu_seconds
from benchmarks.progress import doing
from benchmarks.secured import TrialFiles, add_user, trial_files
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.bench.writing import STREAMS, VALUE_BYTES, in_streams

_TURNS: Final = 3
_READS: Final = 3
_LOGINS: Final = 300
_HOT_TAIL_BYTES: Final = 1 << 30
_SETTINGS: Final = {"SPARKLOG_HOT_TAIL_BYTES": str(_HOT_TAIL_BYTES)}
_USER: Final = "alice"
_PASSWORD: Final = "a long password"


class _Figures(NamedTuple):
    appended: float
    read: float
    single: Times


def tls(options: BenchOptions) -> Iterator[Measurement]:
    """Measures appends, reads and single acks with and without TLS."""
    found: dict[bool, list[_Figures]] = {False: [], True: []}
    with FreshRoot(options.folder) as folder:
        files = trial_files(folder)
        for turn in range(_TURNS):
            for has_tls, runs in found.items():
                what = f"Flight {'with' if has_tls else 'without'} TLS"
                with doing(f"{what}, turn {turn + 1} of {_TURNS}"):
                    runs.append(_measured(options, files, has_tls))
    yield _ratio("append", 0.6, found, lambda each: each.appended)
    yield _ratio("read", 0.5, found, lambda each: each.read)
    best = {has_tls: min(each.single.ms(50) for each in runs) for has_tls, runs in found.items()}
    yield Measurement(
        name="Flight, one record at a time, acked: more with TLS, p50",
        value=f"{best[True] - best[False]:+.2f} ms",
        detail=f"with {best[True]:.2f}, without {best[False]:.2f} ms",
    )


def logins(options: BenchOptions) -> Iterator[Measurement]:
    """Measures connections over TLS of clients that log in, and of clients that do not."""
    with FreshRoot(options.folder) as folder:
        files = trial_files(folder)
        password = folder / "password"
        password.write_text(_PASSWORD, "utf-8")
        user = sparklog.Security(ca=files.ca, user=_USER, password_file=str(password))
        spent = {
            security.user: _connect(folder / name, files, security, scheme)
            for name, security, scheme in (
                ("open", sparklog.Security(ca=files.ca), "SSL"),
                ("users", user, "SASL_SSL"),
            )
        }
    each_ms, times = spent[_USER]
    open_ms, open_times = spent[None]
    login_ms = each_ms - open_ms
    yield Measurement(
        name="Flight, login over TLS: processor time of the broker",
        value=f"{login_ms:.2f} ms",
        target="≤ 10 ms",
        met=login_ms <= 10,
        detail=f"connecting and a question: {each_ms:.2f} ms with it, {open_ms:.2f} without",
    )
    yield Measurement(
        name="Flight, a new client's first answer, over TLS with a login",
        value=str(times),
        detail=f"without a login {open_times}",
    )


def _ratio(
    what: str,
    least: float,
    found: Mapping[bool, list[_Figures]],
    figure: Callable[[_Figures], float],
) -> Measurement:
    best = {has_tls: max(map(figure, runs)) for has_tls, runs in found.items()}
    ratio = best[True] / best[False]
    return Measurement(
        name=f"Flight, {what}: TLS against plaintext",
        value=f"{ratio:.2f} ×",
        target=f"≥ {least} ×",
        met=ratio >= least,
        detail=f"{best[True] / 1e6:.2f} of {best[False] / 1e6:.2f} M rows/s of {VALUE_BYTES} bytes",
    )


def _measured(options: BenchOptions, files: TrialFiles, has_tls: bool) -> _Figures:
    share = options.rows // 10 // STREAMS
    security = sparklog.Security(ca=files.ca) if has_tls else None
    with FreshRoot(options.folder) as folder:
        process = _broker(folder / "root", files, "SSL" if has_tls else "PLAINTEXT")
        with process, sparklog.connect(process.address, security=security) as log:
            log.create_topic("single", partitions=1)
            log.create_topic("bulk", partitions=STREAMS)
            single = _one_at_a_time(log, options.seconds)
            rows, seconds = in_streams(log, "bulk", lambda sent: sent >= share)
            reads = []
            for _ in range(_READS):
                began = time.perf_counter()
                assert log.read("bulk").num_rows == rows
                reads.append(rows / (time.perf_counter() - began))
    return _Figures(rows / seconds, max(reads), single)


def _one_at_a_time(log: sparklog.Log, seconds: float) -> Times:
    value, times = bytes(VALUE_BYTES), Times()
    with log.producer(linger_ms=0) as producer:
        producer.send("single", value).result()
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            producer.send("single", value).result()
            times.add(time.perf_counter() - began)
    return times


def _connect(
    root: Path, files: TrialFiles, security: sparklog.Security, scheme: str
) -> tuple[float, Times]:
    """Returns (processor time of the broker for each connection in ms, times until an answer).

    Each connection lists the topics once.
    """
    if security.user is not None:
        add_user(root, security.user, _PASSWORD)
    times = Times()
    with (
        doing(f"connections to {scheme}"),
        _broker(root, files, scheme) as process,
    ):
        _ask(process.address, security)
        before = cpu_seconds(process.pid)[process.pid]
        for _ in range(_LOGINS):
            began = time.perf_counter()
            _ask(process.address, security)
            times.add(time.perf_counter() - began)
        spent = cpu_seconds(process.pid)[process.pid] - before
    return spent / _LOGINS * 1e3, times


def _ask(address: str, security: sparklog.Security) -> None:
    with sparklog.connect(address, security=security) as log:
        log.topics()


def _broker(root: Path, files: TrialFiles, scheme: str) -> BrokerProcess:
    settings = files.settings if scheme.endswith("SSL") else {}
    return BrokerProcess(root, _SETTINGS | settings, flight=f"{scheme}://127.0.0.1:0")
