"""Checks of this machine and of a root, one by one.

Rules:

- Every check is a function that returns one `CheckResult` and never raises for its findings: a
  machine with one problem often has another.
- A finding that is not ok says what to do. `FAIL` means that records would be lost, or that nothing
  starts; `WARN` means that speed, or only some of the features, would be lost.
- The checks of a root write only below `doctor/`, and remove it.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import itertools
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from sparklog import bill_words, errors, kafka_port, limits, listeners, status
from sparklog.client.times import utc
from sparklog.clock import Clock, SystemClock, unix_seconds
from sparklog.display import counted
from sparklog.expected_bill import expected_bill
from sparklog.listeners import Listener
from sparklog.options import may_others_use
from sparklog.security.credentials import VARIABLES
from sparklog.settings import ANY_HOST, BrokerSettings
from sparklog.storage.metadata import cluster_file as cluster
from sparklog.storage.metadata.liveness import age
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import (
    LocalStore,
    ObjectExists,
    ObjectMissing,
    PutUnresolved,
    Store,
    SyncFailed,
)
from sparklog.storage.wal.choice import AUTO, choose

_PYTHON_NEEDED: Final = (3, 11)
_JAVA_NEEDED: Final = 17
_PYSPARK_MADE_FOR: Final = (4, 2)
_RACERS: Final = 8
_RACES: Final = 25
_PUTS_LOCAL: Final = 200
_PUTS_REMOTE: Final = 20
_PUT_BYTES: Final = 1_000
_SLOW_PUT_LOCAL_MS: Final = 10.0
_SLOW_PUT_REMOTE_MS: Final = 250.0
_SKEW_WARN_SECONDS: Final = 2.0
_SKEW_FAIL_SECONDS: Final = 5.0
_CLOCK_SET_SINCE_US: Final = 1_735_689_600_000_000  # 2025-01-01, older than this code
_FOLDER: Final = "doctor"
_SECRET_FILES: Final = (VARIABLES["key"], VARIABLES["password_file"])
_INODES_WARN: Final = 50_000


class CheckState(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check; `advice` is the recommended action, empty if the check passed."""

    check: str
    state: CheckState
    found: str
    advice: str = ""


Run = Callable[[Sequence[str]], str | None]
"""A command's combined stdout and stderr; None if it could not be run or failed."""


def examine_machine(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """The checks that need no root."""
    pyspark = _version_of("pyspark")
    yield check_python(sys.version_info[:3])
    yield check_java(environment, run_command, needed=pyspark is not None)
    yield check_pyspark(pyspark)
    yield check_worker(environment, needed=pyspark is not None)
    yield check_delta(
        _version_of("delta-spark"), pyspark=pyspark, folders=_jar_folders(environment)
    )


def examine_secrets(
    environment: Mapping[str, str], settings: BrokerSettings | None
) -> Iterator[CheckResult]:
    """The checks of the files with secrets of clients, and of a broker with these settings."""
    named = {name: environment.get(name, "") for name in _SECRET_FILES}
    if settings is not None:
        named["tls.key"] = settings.tls.key
        named["tls.key_password_file"] = settings.tls.key_password_file
        named["security.audit_file"] = settings.security.audit_file
    for option, path in named.items():
        if path:
            yield check_secret(option, Path(path))


def examine_root(
    store: Store, clock: Clock, settings: BrokerSettings | None = None
) -> Iterator[CheckResult]:
    """The checks of a root; those after the first run only if it is writable.

    `settings`: those of a broker for this root; None: unknown.
    """
    folder = f"{_FOLDER}/{secrets.token_hex(8)}"
    made = isinstance(store, LocalStore) and not Path(store.root).exists()
    try:
        writable = check_writable(store, folder)
        yield writable
        if writable.state is CheckState.FAIL:
            return
        yield check_exclusive(store, folder)
        yield check_put_price(store, folder, clock)
        yield check_log(store, folder)
        yield check_space(store)
        yield check_inodes(store)
        yield check_clock(store, folder, clock)
        yield from check_broker(store, clock)
        if settings is not None and not store.is_local:
            yield check_expected_bill(settings, store, clock)
        yield from check_policy(store, clock)
        if store.uri.startswith("s3://"):
            yield note_on_s3()
    finally:
        _clear(store, folder)
        if made:
            _remove_empty(store, "")


# ------------------------------------------------------------------------------ the machine


def check_python(version: tuple[int, ...]) -> CheckResult:
    """pyarrow 26 and obstore 0.12 need Python 3.11."""
    found = ".".join(map(str, version))
    if version < _PYTHON_NEEDED:
        wanted = ".".join(map(str, _PYTHON_NEEDED))
        return _fail("Python", found, f"install Python {wanted} or newer")
    return _ok("Python", found)


def check_java(environment: Mapping[str, str], run: Run, *, needed: bool) -> CheckResult:
    """Spark 4 needs Java 17, including a module that cut-down runtimes leave out.

    Brokers and clients need no Java, so without pyspark its absence is only a warning.
    """
    home = environment.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else "java"
    advice = f"Spark needs a full Java {_JAVA_NEEDED} or newer: install one, or set JAVA_HOME to it"
    wrong = _fail if needed else _warn

    output = run([java, "-version"])
    version = re.search(r'version "(\d+)[^"]*"', output or "")
    if version is None:
        return wrong("Java", f"{java} does not run", advice)
    found = version[0].partition(" ")[2].strip('"')
    if int(version[1]) < _JAVA_NEEDED:
        return wrong("Java", found, advice)
    if run([java, "--add-modules", "jdk.incubator.vector", "-version"]) is None:
        return wrong("Java", f"{found} without the module jdk.incubator.vector", advice)
    return _ok("Java", found)


def check_pyspark(version: str | None) -> CheckResult:
    """Brokers and clients do not need it; the source and sink are made for one line of Spark."""
    if version is None:
        advice = "only for Spark: on a laptop, pip install 'sparklog[spark,local-spark]'"
        return _warn("pyspark", "not installed", advice)
    if _numbers(version) < _PYSPARK_MADE_FOR:
        wanted = ".".join(map(str, _PYSPARK_MADE_FOR))
        return _warn("pyspark", version, f"sparklog's source is made for pyspark {wanted} or newer")
    return _ok("pyspark", version)


def check_worker(environment: Mapping[str, str], *, needed: bool) -> CheckResult:
    """By default Spark uses the first `python3` on the path, which may lack our packages."""
    configured = environment.get("PYSPARK_PYTHON")
    chosen = configured or "python3"
    found = shutil.which(chosen, path=environment.get("PATH"))
    # Not resolved: a virtual environment's interpreter is a link to one that lacks its packages.
    same = found is not None and Path(found).parent == Path(sys.executable).parent
    where = "PYSPARK_PYTHON" if configured else "python3 on PATH"
    if needed and not same:
        advice = f"export PYSPARK_PYTHON={sys.executable}"
        return _warn("Spark's Python", f"{where} is {found or 'missing'}", advice)
    return _ok("Spark's Python", found or "not needed")


def check_delta(
    version: str | None, *, pyspark: str | None, folders: Sequence[Path]
) -> CheckResult:
    """Needed only if Spark itself opens the tables; sparklog's own source needs no jar."""
    if version is None:
        advice = "only if Spark opens the tables as format('delta'): pip install delta-spark==4.4.0"
        return _warn("Delta for Spark", "not installed", advice)
    jars = [jar for folder in folders for jar in folder.glob(f"*delta-spark_*{version}.jar")]
    if not jars:
        line = ".".join(pyspark.split(".")[:2]) if pyspark else "4.2"
        advice = (
            "the first session downloads it, if allowed; otherwise add"
            f" io.delta:delta-spark_{line}_2.13:{version} to spark.jars.packages or the image"
        )
        return _warn("Delta for Spark", f"{version}, its jar is not here yet", advice)
    return _ok("Delta for Spark", f"{version}, {jars[0]}")


def run_command(command: Sequence[str]) -> str | None:
    """The `Run` for a real machine; gives up after half a minute."""
    try:
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _jar_folders(environment: Mapping[str, str]) -> list[Path]:
    """Folders where Spark finds jars: its own, and Ivy's cache."""
    homes = {Path.home()}
    with contextlib.suppress(KeyError):  # a user id without an account
        homes.add(Path(pwd.getpwuid(os.getuid()).pw_dir))  # a JVM's user.home, regardless of HOME
    folders = sorted(folder for home in homes for folder in home.glob(".ivy2*/jars"))
    if environment.get("SPARK_HOME"):
        folders.append(Path(environment["SPARK_HOME"], "jars"))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        folders.append(
            Path(str(importlib.metadata.distribution("pyspark").locate_file("pyspark/jars")))
        )
    return folders


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_secret(option: str, path: Path) -> CheckResult:
    """Checks that other users of this machine can neither read nor change a file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        advice = "correct the setting, or run this as the user that has the file"
        return _warn("secret file", f"{option} = {path}: {error.strerror}", advice)
    if may_others_use(path):
        found = f"{option} = {path} has mode {stat.S_IMODE(mode):04o}: other users can use it"
        return _warn("secret file", found, f"chmod o= {path}; if it was read, replace its content")
    return _ok("secret file", f"{option} = {path}")


# ------------------------------------------------------------------------------ the root


def check_writable(store: Store, folder: str) -> CheckResult:
    """Checks that an object can be put, read and removed."""
    path, data = f"{folder}/writable", secrets.token_bytes(16)
    advice = "grant this user write access, or choose another root"
    try:
        store.put_new(path, data)
        same = store.get(path).to_pybytes() == data
        store.delete([path])
    except errors.StorageFull as error:
        return _fail("root", f"no {error.missing} is left under {store.uri}", error.advice)
    except _STORE_ERRORS as error:
        return _fail("root", f"{store.uri}: {_message(error)}", advice)
    if not same:
        return _fail("root", f"{store.uri} does not return the bytes written", "use another root")
    return _ok("root", f"{store.uri} is writable")


def check_exclusive(store: Store, folder: str) -> CheckResult:
    """Races several threads for one name: exactly one may win, and its bytes must remain.

    Everything rests on this: the write-ahead log, the metadata and the Delta log.
    """
    advice = "no log is safe here: use a file system with hard links, or a store with If-None-Match"
    doubtful = 0
    for race in range(_RACES):
        path = f"{folder}/race-{race}"
        outcomes = _race(store, path)
        doubtful += outcomes.count(_Outcome.UNKNOWN)
        winners = [n for n, outcome in enumerate(outcomes) if outcome is _Outcome.WON]
        try:
            standing = store.get(path).to_pybytes()
        except _STORE_ERRORS as error:
            return _fail("put-if-absent", _message(error), "try again")
        if len(winners) > 1:
            return _fail(
                "put-if-absent", f"{len(winners)} of {_RACERS} racers won the same name", advice
            )
        if winners and standing != _racer_bytes(winners[0]):
            return _fail("put-if-absent", "the winner's object was replaced", advice)
    if doubtful:
        tries = _RACES * _RACERS
        return _warn(
            "put-if-absent",
            f"exclusive, but {doubtful} of {tries} puts had no clear answer",
            "check the network, and the store's limits",
        )
    return _ok("put-if-absent", f"exclusive in {_RACES} races of {_RACERS}")


class _Outcome(enum.Enum):
    WON = enum.auto()
    LOST = enum.auto()
    UNKNOWN = enum.auto()


def _race(store: Store, path: str) -> list[_Outcome]:
    outcomes = [_Outcome.UNKNOWN] * _RACERS
    start = threading.Barrier(_RACERS)

    def run(racer: int) -> None:
        start.wait()
        with contextlib.suppress(*_STORE_ERRORS):
            try:
                store.put_new(path, _racer_bytes(racer))
                outcomes[racer] = _Outcome.WON
            except ObjectExists:
                outcomes[racer] = _Outcome.LOST

    threads = [threading.Thread(target=run, args=(racer,)) for racer in range(_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _racer_bytes(racer: int) -> bytes:
    return b"racer %d" % racer


def check_put_price(store: Store, folder: str, clock: Clock) -> CheckResult:
    """Measures a durable put of 1 kB: no ack is faster than this."""
    data = bytes(_PUT_BYTES)
    spent = []
    try:
        for number in range(_PUTS_LOCAL if store.is_local else _PUTS_REMOTE):
            began = clock.monotonic()
            store.put_new(f"{folder}/price-{number}", data)
            spent.append(clock.monotonic() - began)
    except _STORE_ERRORS as error:
        return _fail("durable put", _message(error), "see the check of the root")
    median_ms, worst_ms = (float(each) * 1e3 for each in np.percentile(spent, [50, 99]))
    found = f"1 kB: p50 {median_ms:.2f} ms, p99 {worst_ms:.2f} ms"
    if median_ms > (_SLOW_PUT_LOCAL_MS if store.is_local else _SLOW_PUT_REMOTE_MS):
        advice = "every ack waits for one: use a disk with a write cache that survives power cuts"
        if not store.is_local:
            advice = "every ack waits for one: run the broker in the store's region"
        return _warn("durable put", found, advice)
    return _ok("durable put", found)


def check_log(store: Store, folder: str) -> CheckResult:
    """Reports the write-ahead log that `writer.log = "auto"` chooses here, and the reason."""
    try:
        chosen = choose(store, AUTO, clock=SystemClock(), folder=folder)
    except _STORE_ERRORS as error:
        return _fail("write-ahead log", _message(error), "see the check of the root")
    return _ok("write-ahead log", f"{chosen.kind} (auto): {chosen.reason}")


def check_space(store: Store) -> CheckResult:
    """Compares with the broker's reserve, and with all that may accumulate unpublished."""
    free_bytes = store.free_bytes()
    if free_bytes is None:
        return _ok("free space", "as much as the store provides")
    found = f"{free_bytes / limits.GIB:.1f} GiB"
    reserve_bytes = limits.FREE_SPACE_RESERVE_BYTES
    if free_bytes <= reserve_bytes:
        advice = (
            f"the broker refuses records below {reserve_bytes // limits.MIB} MiB"
            " (writer.free_space_reserve_bytes): free some space"
        )
        return _fail("free space", found, advice)
    if free_bytes <= limits.UNPUBLISHED_BYTES:
        advice = "the write-ahead log alone may take this much while a table cannot be written"
        return _warn("free space", found, advice)
    return _ok("free space", found)


def check_inodes(store: Store) -> CheckResult:
    """Compares with the number of files that a broker creates over some time."""
    free = store.free_inodes()
    if free is None:
        return _ok("free inodes", "as many as the store provides")
    found = f"{free:,}"
    advice = "no file can be created without one, even with free space: delete files or folders"
    if free < limits.FEW_INODES:
        return _fail("free inodes", found, advice)
    if free < _INODES_WARN:
        return _warn("free inodes", found, advice)
    return _ok("free inodes", found)


def check_clock(store: Store, folder: str, clock: Clock) -> CheckResult:
    """Compares this clock with the store's: sweeping and arrival times depend on them."""
    advice = "synchronize the clock with NTP: sweeping and arrival times depend on it"
    path = f"{folder}/clock"
    before_us = clock.now_us()
    if before_us < _CLOCK_SET_SINCE_US:
        return _fail("clock", f"{before_us // 1_000_000} s since 1970, which is long past", advice)
    try:
        store.put_new(path, b"")
        after_us = clock.now_us()
        modified_us = store.stat(path).modified_us
    except _STORE_ERRORS as error:
        return _fail("clock", _message(error), "see the check of the root")
    # Some stores round down to whole seconds.
    skew_us = max(before_us - 1_000_000 - modified_us, modified_us - after_us, 0)
    found = f"within {skew_us / 1e6:.1f} s of the store's" if skew_us else "agrees with the store's"
    if skew_us > _SKEW_FAIL_SECONDS * 1e6:
        return _fail("clock", found, advice)
    if skew_us > _SKEW_WARN_SECONDS * 1e6:
        return _warn("clock", found, advice)
    return _ok("clock", found)


def check_broker(store: Store, clock: Clock) -> Iterator[CheckResult]:
    """Reports the broker that leads the root, and the topics that it cannot publish."""
    try:
        report = status.of_root(store, clock, waits=lambda _leader, _seconds: None)
    except errors.NotARoot:
        yield check_empty(store)
        return
    except _STORE_ERRORS as error:
        yield _fail("broker", _message(error), "see what the error names")
        return
    broker = report.broker
    who = ""
    if broker is not None:
        who = (
            f"broker {broker.broker} ({broker.kind}, epoch {broker.epoch}), pid {broker.pid} on"
            f" host {broker.host}, Flight at {broker.address}, Kafka {broker.kafka or 'closed'}"
        )
    match report.state:
        case status.LeaderStatus.SERVED:
            assert broker is not None
            running = age(round((report.uptime_seconds or 0.0) * 1e6))
            yield _ok("broker", f"{who}, version {broker.version}, started {running} ago")
            if report.reason:
                yield _warn("broker", "another one is alive but does not answer", report.reason)
            yield from check_listeners(report)
            yield from check_certificates(report, clock)
            yield from check_bills(report)
            yield from check_registries(report)
        case status.LeaderStatus.SILENT:
            advice = f"{report.reason}; check its log: {(broker and broker.log) or 'its stderr'}"
            yield _warn("broker", f"{who} is alive but does not answer", advice)
        case status.LeaderStatus.NEVER:
            yield _ok("broker", "none yet")
        case status.LeaderStatus.STOPPED | status.LeaderStatus.DIED:
            yield _ok("broker", f"none runs; the last was {who}, which {report.state}")
    for each in report.held_back:
        advice = "records wait in the write-ahead log; repair the table, or what the reason names"
        yield _warn("topic held back", f"{each.topic}: {each.reason}", advice)
    for kept in report.kept_records:
        advice = "its records take up space: unset the property, or have the topic retain them"
        yield _warn("deletions refused", f"{kept.topic}: {kept.reason}", advice)


def check_registries(report: status.StatusReport) -> Iterator[CheckResult]:
    """Warns of a schema registry that gives no answer, and of records that wait for schemas."""
    for each in report.registries:
        if each.down_since_us:
            since = utc(each.down_since_us).isoformat(timespec="seconds")
            found = f"{each.url} has given no answer since {since}"
            advice = f"records with new schemas have no columns until it does: {each.reason}"
            yield _warn("schema registry", found, advice)
        else:
            yield _ok("schema registry", each.url)
        for topic in each.waiting:
            found = f"{topic.topic}: {counted(topic.records, 'record')} without columns"
            advice = "register their schemas, under the ids that _error names"
            yield _warn("waiting for schemas", found, advice)
        for number in each.conflicts:
            found = f"the registry has another text for schema {number} than the root"
            advice = "records with it wait: give the registry the texts back that it had before"
            yield _warn("schema in doubt", found, advice)


def check_listeners(report: status.StatusReport) -> Iterator[CheckResult]:
    """Warns of listeners that other machines can reach, and that lack a login or encryption."""
    for each in _listeners_of(report):
        if each.is_loopback or each.has_tls:
            continue
        found = f"{each} has no encryption: others on the network can read and change records"
        if not each.has_sasl:
            found = f"{each} asks for no login: everybody who can reach it may use the log"
        advice = "write SASL_SSL:// before its address, or listen at a loopback address"
        yield _warn("listener", found, advice)

    for each in _metrics_of(report):
        if not (each.is_loopback or each.has_tls):
            found = (
                f"metrics at {each}: everybody who can reach it sees the names of topics and groups"
            )
            advice = (
                "write SASL_SSL:// before metrics.listen, or let only the monitoring reach the port"
            )
            yield _warn("listener", found, advice)


def check_bills(report: status.StatusReport) -> Iterator[CheckResult]:
    """Reports the present bill of each broker, and warns of one above the bound in its settings."""
    for bill in report.bills:
        found = f"{bill_words.monthly(bill)}: {bill_words.requests(bill)}"
        if bill.total.dollars_per_month <= bill.warn_dollars_per_month:
            yield _ok("bill", found)
        else:
            advice = (
                f"most of it: {bill_words.purposes(bill) or 'none'}; lower"
                " requests.puts_per_second, or raise prices.warn_dollars_per_month"
            )
            yield _warn("bill", found, advice)


def check_expected_bill(settings: BrokerSettings, store: Store, clock: Clock) -> CheckResult:
    """Warns of settings with which a broker of this root could cost more than their bound.

    It is judged by the partitions that it leads, or by all if it leads none yet.
    """
    try:
        known = MetadataStore(store, clock=clock).reload().topics.values()
    except _STORE_ERRORS as error:
        return _warn("expected bill", _message(error), "see the check of the root")
    led = [count for each in known if (count := each.leaders.count(settings.id))]
    partitions = led or [each.partition_count for each in known]
    prices = settings.prices.of(store.uri)
    expected = expected_bill(settings, prices, partitions)
    at = bill_words.prices(prices.name)
    found = (
        f"up to {expected.dollars_per_month:,.0f} dollars a month at {at}, if"
        f" {counted(sum(partitions), 'partition')} of {counted(len(partitions), 'topic')} receive"
        f" records all the time: {bill_words.rate(expected.flushes)} flushes/s,"
        f" {bill_words.rate(expected.table_puts)} files and commits/s,"
        f" {bill_words.rate(expected.upkeep_puts)} other puts/s"
    )
    if expected.dollars_per_month <= settings.prices.warn_dollars_per_month:
        return _ok("expected bill", found)
    advice = "lower requests.puts_per_second"
    if settings.requests.profile == "fast":
        advice = 'set requests.profile = "thrifty", which keeps puts within a budget'
    return _warn("expected bill", found, f"{advice}, or raise prices.warn_dollars_per_month")


def check_policy(store: Store, clock: Clock) -> Iterator[CheckResult]:
    """Reports the users and ACLs of a root that has them, and ACLs that protect nothing."""
    from sparklog.security.state import Mode
    from sparklog.storage.security_store import open_security

    try:
        security = open_security(store, clock=clock)
        state = security.look() if security is not None else None
    except errors.NotARoot:
        return
    except _STORE_ERRORS as error:
        yield _warn("users and ACLs", _message(error), "run this as the user of the broker")
        return
    if state is None:
        return
    policy = state.policy
    found = f"{len(state.users):,} users, {len(state.acls):,} ACLs, mode {policy.mode}"
    if policy.mode is Mode.OBSERVE:
        advice = "nothing is refused yet: `sparklog security enforce`, once logs have no refusals"
        yield _warn("users and ACLs", found, advice)
    elif policy.mode is Mode.OFF and state.acls:
        advice = "the ACLs have no effect: `sparklog security observe`, then `enforce`"
        yield _warn("users and ACLs", found, advice)
    else:
        yield _ok("users and ACLs", found)
    if policy.mode is not Mode.OFF and policy.allow_everyone_if_no_acl_found:
        advice = "add ACLs, then `sparklog security enforce --no-allow-everyone-if-no-acl-found`"
        yield _warn("users and ACLs", "everybody may use what no ACL mentions", advice)


def check_certificates(report: status.StatusReport, clock: Clock) -> Iterator[CheckResult]:
    """Reports on the certificate of each listener with TLS."""
    # Metrics have no advertised host: the certificate is not for all addresses of a machine.
    metrics = (each for each in _metrics_of(report) if each.host not in ANY_HOST)
    for listener in itertools.chain(_listeners_of(report), metrics):
        if listener.has_tls:
            yield check_certificate(listener, clock)


def _listeners_of(report: status.StatusReport) -> Iterator[Listener]:
    for broker in report.answered:
        both = broker.flight_listeners, broker.kafka_listeners
        yield from itertools.chain.from_iterable(map(listeners.parse, both))


def _metrics_of(report: status.StatusReport) -> Iterator[Listener]:
    for broker in report.answered:
        yield from listeners.parse(broker.metrics)


def check_certificate(listener: Listener, clock: Clock) -> CheckResult:
    """Reports whether clients accept the certificate of a listener, and for how long."""
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        return _ok("certificate", "not checked: pip install 'sparklog[broker]' installs the check")
    from sparklog.security.certificates import EXPIRY_NOTICE_SECONDS, covers

    try:
        data = kafka_port.certificate(listener, timeout_seconds=limits.PROBE_TIMEOUT_SECONDS)
        found = x509.load_der_x509_certificate(data)
    except (OSError, ValueError) as error:
        return _warn(
            "certificate", f"cannot get that of {listener}: {error}", "see the broker's log"
        )
    expires = found.not_valid_after_utc
    left_seconds = expires.timestamp() - unix_seconds(clock)
    until = f"the one of {listener} expires on {expires:%Y-%m-%d}"
    if left_seconds <= 0:
        return _fail("certificate", f"the one of {listener} has expired", "replace its files")
    if not covers(found, listener.host):
        advice = "clients refuse it: connect by another name, or add this one to it"
        return _fail("certificate", f"the one of {listener} is not for {listener.host}", advice)
    if left_seconds < EXPIRY_NOTICE_SECONDS:
        return _warn("certificate", until, "replace its files; the broker needs no restart")
    return _ok("certificate", until)


def check_empty(store: Store) -> CheckResult:
    """Checks that a folder that is not a root can become one."""
    try:
        cluster.check_empty(store)
    except errors.RootNotEmpty as error:
        found = f"none: this is not a root of a log, and holds {error.found}"
        return _warn("broker", found, error.advice)
    except _STORE_ERRORS as error:
        return _fail("broker", _message(error), "see what the error names")
    return _ok("broker", "none yet: this is not a root of a log")


def note_on_s3() -> CheckResult:
    """Warns of something that cannot be checked here: how other Spark sessions commit."""
    return _warn(
        "S3 and Spark",
        "delta-spark's own S3SingleDriverLogStore does not commit conditionally",
        "run OPTIMIZE, VACUUM or DELETE on the tables through delta-rs, or through Hadoop 3.4.2 or"
        " newer with conditional create: a plain delta-spark may overwrite a commit of sparklog",
    )


def _clear(store: Store, folder: str) -> None:
    with contextlib.suppress(*_STORE_ERRORS):
        store.delete([f"{folder}/{each.name}" for each in store.walk(folder)])
    _remove_empty(store, folder, _FOLDER)


def _remove_empty(store: Store, *folders: str) -> None:
    if isinstance(store, LocalStore):
        for folder in folders:
            with contextlib.suppress(OSError):
                Path(store.root, folder).rmdir()


# ------------------------------------------------------------------------------ findings

_STORE_ERRORS: Final = (
    errors.SparklogError,
    ObjectExists,
    ObjectMissing,
    PutUnresolved,
    SyncFailed,
    OSError,
)


def _message(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _ok(check: str, found: str) -> CheckResult:
    return CheckResult(check=check, state=CheckState.OK, found=found)


def _warn(check: str, found: str, advice: str) -> CheckResult:
    return CheckResult(check=check, state=CheckState.WARN, found=found, advice=advice)


def _fail(check: str, found: str, advice: str) -> CheckResult:
    return CheckResult(check=check, state=CheckState.FAIL, found=found, advice=advice)
