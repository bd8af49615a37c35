from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from sparklog import doctor, errors, limits
from sparklog.cli import app
from sparklog.clock import ManualClock, SystemClock
from sparklog.doctor import CheckResult, CheckState
from sparklog.formats.flight_messages import BrokerInfo
from sparklog.formats.store_bill import StoreBill, StoreRates
from sparklog.security.acl import Operation, ResourceType
from sparklog.security.policies import with_policy
from sparklog.security.state import Mode
from sparklog.settings import load_settings
from sparklog.status import LeaderStatus, StatusReport
from sparklog.storage.objects import (
    DelayedStore,
    DelayFaults,
    Fault,
    LocalStore,
    MemoryStore,
    Payload,
    PutUnresolved,
    ScriptedFaults,
    Stat,
)
from tests.support.acls import acl, set_acls
from tests.support.brokers import Rig
from tests.support.users import change_users

FOLDER = "doctor/test"


def java(version: str | None, *, vector: bool = True) -> Callable[[Sequence[str]], str | None]:
    """Returns a fake for running Java, of `version` or missing."""

    def run(command: Sequence[str]) -> str | None:
        if version is None or ("--add-modules" in command and not vector):
            return None
        return f'openjdk version "{version}" 2025-04-15\nOpenJDK Runtime Environment\n'

    return run


class OverwritingStore(MemoryStore):
    """A store that says that it puts only if absent, and does not."""

    def put_new(self, path: str, data: Payload) -> None:
        self.put(path, data)


class SkewedStore(MemoryStore):
    """A store whose clock is `skew_us` ahead of ours."""

    skew_us = 0

    def stat(self, path: str) -> Stat:
        found = super().stat(path)
        return Stat(
            name=found.name,
            size_bytes=found.size_bytes,
            modified_us=found.modified_us + self.skew_us,
        )


class SmallStore(MemoryStore):
    """A store with so much room left."""

    free = 0

    inodes: int | None = None

    def free_bytes(self) -> int | None:
        return self.free

    def free_inodes(self) -> int | None:
        return self.inodes


# ------------------------------------------------------------------------------ the machine


@pytest.mark.parametrize(
    ("run", "needed", "state"),
    [
        (java("17.0.15"), True, CheckState.OK),
        (java("21"), True, CheckState.OK),
        (java("11.0.2"), True, CheckState.FAIL),
        (java("1.8.0_392"), True, CheckState.FAIL),
        (java("17.0.15", vector=False), True, CheckState.FAIL),
        (java(None), True, CheckState.FAIL),
        (java(None), False, CheckState.WARN),
    ],
)
def test_java(run: Callable[[Sequence[str]], str | None], needed: bool, state: CheckState) -> None:
    """Java must be 17 or newer and whole where Spark is installed, and is a hint elsewhere."""
    found = doctor.check_java({}, run, needed=needed)
    assert found.state is state
    assert bool(found.advice) is (state is not CheckState.OK)


def test_java_home_is_asked_first() -> None:
    """JAVA_HOME names the Java that Spark will use, so that one is examined."""
    asked = []

    def run(command: Sequence[str]) -> str | None:
        asked.append(command[0])
        return None

    doctor.check_java({"JAVA_HOME": "/opt/jdk"}, run, needed=True)
    assert asked == ["/opt/jdk/bin/java"]


@pytest.mark.parametrize(
    ("version", "state"),
    [((3, 10, 14), CheckState.FAIL), ((3, 11, 0), CheckState.OK), ((3, 13), CheckState.OK)],
)
def test_python(version: tuple[int, ...], state: CheckState) -> None:
    """Python 3.11 is the first that serves."""
    assert doctor.check_python(version).state is state


@pytest.mark.parametrize(
    ("version", "state"),
    [
        (None, CheckState.WARN),
        ("3.5.1", CheckState.WARN),
        ("4.2.0", CheckState.OK),
        ("4.10.1", CheckState.OK),
    ],
)
def test_pyspark(version: str | None, state: CheckState) -> None:
    """A pyspark that is missing or too old is worth a word, and versions compare as numbers."""
    assert doctor.check_pyspark(version).state is state


def test_worker_must_be_this_python(tmp_path: Path) -> None:
    """Workers are examined as Spark chooses them: PYSPARK_PYTHON, or python3 of the path."""
    own, other = Path(sys.executable).parent, tmp_path / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    strange = doctor.check_worker({"PATH": str(tmp_path)}, needed=True)
    assert strange.state is CheckState.WARN
    assert strange.advice == f"export PYSPARK_PYTHON={sys.executable}"
    told = {"PATH": str(tmp_path), "PYSPARK_PYTHON": sys.executable}
    assert doctor.check_worker(told, needed=True).state is CheckState.OK
    assert doctor.check_worker({"PATH": str(own)}, needed=True).state is CheckState.OK
    assert doctor.check_worker({"PATH": str(tmp_path)}, needed=False).state is CheckState.OK


def test_delta_jar(tmp_path: Path) -> None:
    """Delta's jar is found by the package's version, and one that is missing is named whole."""
    missing = doctor.check_delta("4.4.0", pyspark="4.2.0", folders=[tmp_path])
    assert missing.state is CheckState.WARN
    assert "io.delta:delta-spark_4.2_2.13:4.4.0" in missing.advice
    (tmp_path / "io.delta_delta-spark_4.2_2.13-4.4.0.jar").touch()
    assert doctor.check_delta("4.4.0", pyspark="4.2.0", folders=[tmp_path]).state is CheckState.OK
    assert doctor.check_delta(None, pyspark="4.2.0", folders=[tmp_path]).state is CheckState.WARN


def test_jars_are_looked_for_where_a_jvm_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ivy's folder is in the home of the user's account, also where HOME names another one."""
    account = pwd.getpwuid(os.getuid())
    given = pwd.struct_passwd((*account[:5], str(tmp_path / "account"), *account[6:]))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "account/.ivy2.5.2/jars").mkdir(parents=True)
    (tmp_path / "home/.ivy2/jars").mkdir(parents=True)
    found = doctor._jar_folders({})
    assert tmp_path / "account/.ivy2.5.2/jars" in found
    assert tmp_path / "home/.ivy2/jars" in found


def test_command_that_is_not_there() -> None:
    """A command that does not exist or fails has no output; one that runs has both streams'."""
    assert doctor.run_command(["/nowhere/java", "-version"]) is None
    assert doctor.run_command([sys.executable, "-c", "raise SystemExit(1)"]) is None
    speaking = "import sys; print('out'); print('err', file=sys.stderr)"
    output = doctor.run_command([sys.executable, "-c", speaking])
    assert output is not None
    assert sorted(output.split()) == ["err", "out"]


# ------------------------------------------------------------------------------ the root


def test_sound_root(tmp_path: Path) -> None:
    """On a sound folder nothing fails, and afterwards it is as it was, or not there."""
    for root, existed in ((tmp_path / "there", True), (tmp_path / "not", False)):
        if existed:
            root.mkdir()
        findings = list(doctor.examine_root(LocalStore(root), SystemClock()))
        assert [each.check for each in findings] == [
            "root",
            "put-if-absent",
            "durable put",
            "write-ahead log",
            "free space",
            "free inodes",
            "clock",
            "broker",
        ]
        assert CheckState.FAIL not in {each.state for each in findings}
        assert root.exists() is existed
        assert not existed or not list(root.iterdir())


def test_folder_of_another_program(tmp_path: Path) -> None:
    """A folder that a broker would refuse is a warning that lists its contents."""
    (tmp_path / "notes.txt").write_text("mine")
    findings = {
        each.check: each for each in doctor.examine_root(LocalStore(tmp_path), SystemClock())
    }
    assert findings["broker"].state is CheckState.WARN
    assert "holds notes.txt" in findings["broker"].found
    assert "--allow-non-empty" in findings["broker"].advice
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_root_in_use_keeps_its_objects(tmp_path: Path) -> None:
    """Objects in a root still exist after the examination."""
    store = LocalStore(tmp_path)
    store.put_new("cluster.json", b"{}")
    list(doctor.examine_root(store, SystemClock()))
    assert [stat.name for stat in store.walk("")] == ["cluster.json"]


def test_root_that_refuses() -> None:
    """If the root is read-only, that is its only finding, with the reason."""
    refusal = errors.RootNotWritable(root="memory://store", reason="permission denied")
    store = MemoryStore(
        ManualClock(), faults=ScriptedFaults(Fault(operation="put_new", error=refusal))
    )
    findings = list(doctor.examine_root(store, ManualClock()))
    assert [each.state for each in findings] == [CheckState.FAIL]
    assert "permission denied" in findings[0].found


def test_store_that_overwrites() -> None:
    """A store that lets two win one name fails, whatever it calls itself."""
    found = doctor.check_exclusive(OverwritingStore(ManualClock()), FOLDER)
    assert found.state is CheckState.FAIL
    assert found.advice


def test_store_that_replaces_the_winner() -> None:
    """A store that names one winner and keeps the bytes of another fails."""

    class TreacherousStore(MemoryStore):
        def get(self, path: str) -> pa.Buffer:
            self.put(path, b"racer of nobody")
            return super().get(path)

    found = doctor.check_exclusive(TreacherousStore(ManualClock()), FOLDER)
    assert (found.state, found.found) == (CheckState.FAIL, "the winner's object was replaced")


def test_unanswered_puts_are_no_failure() -> None:
    """A put without an answer may have won, so it makes the check doubtful and not failed."""
    lost = PutUnresolved(FOLDER, "timeout")
    faults = ScriptedFaults(Fault(operation="put_new", error=lost, moment="after"))
    found = doctor.check_exclusive(MemoryStore(ManualClock(), faults=faults), FOLDER)
    assert found.state is CheckState.WARN
    assert found.found.startswith("exclusive, but 1 of ")


@pytest.mark.parametrize(
    ("seconds", "is_local", "state"),
    [
        (0.001, True, CheckState.OK),
        (0.020, True, CheckState.WARN),
        (0.020, False, CheckState.OK),
        (0.400, False, CheckState.WARN),
    ],
)
def test_price_of_a_put(seconds: float, is_local: bool, state: CheckState) -> None:
    """A put is dear beyond 10 ms on a disk and beyond a quarter of a second on a store."""
    clock = ManualClock()
    faults = DelayFaults(clock, seconds)
    store = MemoryStore(clock, is_local=is_local, faults=faults)
    found = doctor.check_put_price(store, FOLDER, clock)
    assert found.state is state
    milliseconds = f"{seconds * 1e3:.2f} ms"
    assert found.found == f"1 kB: p50 {milliseconds}, p99 {milliseconds}"


@pytest.mark.parametrize(
    ("free_bytes", "state"),
    [
        (limits.FREE_SPACE_RESERVE_BYTES, CheckState.FAIL),
        (limits.UNPUBLISHED_BYTES, CheckState.WARN),
        (100 * limits.GIB, CheckState.OK),
    ],
)
def test_free_space(free_bytes: int, state: CheckState) -> None:
    """Room below the broker's own reserve fails; what one bad day may fill is a warning."""
    store = SmallStore(ManualClock())
    store.free = free_bytes
    assert doctor.check_space(store).state is state


def test_bucket_has_room() -> None:
    """A store that does not know its free space has enough, and enough inodes."""
    assert doctor.check_space(MemoryStore(ManualClock())).state is CheckState.OK
    assert doctor.check_inodes(MemoryStore(ManualClock())).state is CheckState.OK


@pytest.mark.parametrize(
    ("free", "state"),
    [
        (0, CheckState.FAIL),
        (20_000, CheckState.WARN),
        (10**6, CheckState.OK),
        (None, CheckState.OK),
    ],
)
def test_free_inodes(free: int | None, state: CheckState) -> None:
    """Without inodes no file can be created, whatever space is free."""
    store = SmallStore(ManualClock())
    store.inodes = free
    assert doctor.check_inodes(store).state is state


@pytest.mark.parametrize("missing", ["space", "inode", "quota"])
def test_a_root_that_is_full_names_the_missing_resource(missing: str) -> None:
    """And the advice is about that, not about rights."""
    full = errors.StorageFull(root="r", missing=missing, free_bytes=10**9, reserve_bytes=0)
    faults = ScriptedFaults(Fault(operation="put_new", error=full))
    found = doctor.check_writable(MemoryStore(ManualClock(), faults=faults), FOLDER)
    assert (found.state, found.advice) == (CheckState.FAIL, full.advice)
    assert found.found.startswith(f"no {missing} is left under ")


@pytest.mark.parametrize(
    ("skew_seconds", "state"),
    [
        (0, CheckState.OK),
        (-0.9, CheckState.OK),
        (3, CheckState.WARN),
        (-4, CheckState.WARN),
        (60, CheckState.FAIL),
    ],
)
def test_clock_against_the_store(skew_seconds: float, state: CheckState) -> None:
    """A skew above 2 s is a warning, one beyond a broker's timeout a failure; rounding is
    neither.
    """
    clock = ManualClock(now_us=1_800_000_000_000_000)
    store = SkewedStore(clock)
    store.skew_us = round(skew_seconds * 1e6)
    assert doctor.check_clock(store, FOLDER, clock).state is state


def test_clock_that_was_never_set() -> None:
    """A clock that says 1970 fails, although it agrees with its own disk."""
    clock = ManualClock(now_us=1_000_000)
    assert doctor.check_clock(MemoryStore(clock), FOLDER, clock).state is CheckState.FAIL


def test_s3_is_told_about_spark() -> None:
    """Only a root on S3 is warned of delta-spark's own log store."""
    store = MemoryStore(SystemClock())
    assert "S3 and Spark" not in checks(doctor.examine_root(store, SystemClock()))
    store.uri = "s3://bucket/root"
    found = checks(doctor.examine_root(store, SystemClock()))["S3 and Spark"]
    assert found.state is CheckState.WARN
    assert "S3SingleDriverLogStore" in found.found


@pytest.mark.parametrize(
    ("mode", "allow_everyone", "advice"),
    [
        (Mode.OFF, False, ["the ACLs have no effect"]),
        (Mode.OBSERVE, False, ["nothing is refused yet"]),
        (Mode.ENFORCE, False, []),
        (Mode.ENFORCE, True, ["--no-allow-everyone-if-no-acl-found"]),
    ],
)
def test_acls_that_protect_nothing(
    tmp_path: Path, mode: Mode, allow_everyone: bool, advice: list[str]
) -> None:
    """ACLs that are not enforced, and those that leave the rest to everybody, are warnings."""
    store, clock = LocalStore(tmp_path), SystemClock()
    assert list(doctor.check_policy(store, clock)) == []
    set_acls(store, [acl(ResourceType.TOPIC, "t", Operation.READ)], mode=mode)
    change_users(store, with_policy(allow_everyone=allow_everyone))
    found = list(doctor.check_policy(store, clock))
    assert f"0 users, 1 ACLs, mode {mode}" in found[0].found
    warned = [each.advice for each in found if each.state is CheckState.WARN]
    assert len(warned) == len(advice)
    assert all(part in each for part, each in zip(advice, warned, strict=True))


def test_listeners_that_are_open() -> None:
    """A listener that others can reach is a warning without a login, or without TLS."""
    addresses = {
        "127.0.0.1:9092": "",
        "10.0.0.1:9092": "asks for no login",
        "SASL_PLAINTEXT://10.0.0.1:9093": "has no encryption",
        "SASL_SSL://10.0.0.1:9094": "",
        "IN=PLAINTEXT://k1.example.org:9095": "asks for no login",
    }
    broker = BrokerInfo(
        broker=1, epoch=1, address="127.0.0.1:8815", kafka_listeners=",".join(addresses)
    )
    report = StatusReport(
        state=LeaderStatus.SERVED, root="r", cluster_id="c", broker=broker, answered=[broker]
    )
    found = [each.found for each in doctor.check_listeners(report)]
    expected = [(address, reason) for address, reason in addresses.items() if reason]
    assert len(found) == len(expected)
    for text, (address, reason) in zip(found, expected, strict=True):
        assert text.startswith(address)
        assert reason in text


@pytest.mark.parametrize(
    ("metrics", "is_open"),
    [
        ("", False),
        ("127.0.0.1:9404", False),
        ("0.0.0.0:9404", True),
        ("SSL://0.0.0.0:9404", False),
        ("SASL_SSL://10.0.0.1:9404", False),
    ],
)
def test_metrics_that_are_open(metrics: str, is_open: bool) -> None:
    """A port for metrics that others can reach without TLS is a warning."""
    broker = BrokerInfo(broker=1, epoch=1, address="127.0.0.1:8815", metrics=metrics)
    report = StatusReport(
        state=LeaderStatus.SERVED, root="r", cluster_id="c", broker=broker, answered=[broker]
    )
    found = [each.found for each in doctor.check_listeners(report)]
    assert [each.startswith(f"metrics at {metrics}") for each in found] == [True] * is_open


def test_files_with_secrets(tmp_path: Path) -> None:
    """Files that other users of the machine can read or write are warnings, and name the mode."""
    given = {"tls.key": "key.pem", "tls.certificate": "certificate.pem"}
    given |= {"tls.key_password_file": "missing", "security.audit_file": "audit.json"}
    paths = {option: tmp_path / name for option, name in given.items()}
    for name, mode in (("key.pem", 0o644), ("certificate.pem", 0o644), ("audit.json", 0o640)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    password = tmp_path / "password"
    password.touch()
    password.chmod(0o602)
    more = {"root": "/r", "metrics.listen": "SSL://127.0.0.1:0"}
    settings = load_settings(None, {}, more | {name: str(path) for name, path in paths.items()})
    environment = {"SPARKLOG_CLIENT_PASSWORD_FILE": str(password)}
    found = {
        each.found.partition(" = ")[0]: each
        for each in doctor.examine_secrets(environment, settings)
    }
    assert {option for option, each in found.items() if each.state is CheckState.WARN} == {
        "tls.key", "tls.key_password_file", "SPARKLOG_CLIENT_PASSWORD_FILE",
    }  # fmt: skip
    assert "mode 0644" in found["tls.key"].found
    assert found["security.audit_file"].state is CheckState.OK
    assert list(doctor.examine_secrets({}, None)) == []


def test_settings_name_the_root(tmp_path: Path) -> None:
    """With `--config`, the root of the file is checked, and its keys."""
    key = tmp_path / "key.pem"
    key.touch(mode=0o600)
    key.chmod(0o604)
    settings = tmp_path / "broker.toml"
    settings.write_text(
        f'root = "{tmp_path / "root"}"\n[metrics]\nlisten = "SSL://127.0.0.1:1"\n'
        f'[tls]\ncertificate = "c.pem"\nkey = "{key}"\n'
    )
    found = CliRunner().invoke(app, ["doctor", "--config", str(settings)])
    assert f"{tmp_path / 'root'} is writable" in found.output
    assert "mode 0604" in found.output


def test_a_delayed_store_is_asked_little() -> None:
    """A store across a network is spared: some hundred requests for everything."""
    clock = ManualClock(now_us=1_800_000_000_000_000)
    store = DelayedStore(MemoryStore(clock), 0.0, clock)
    list(doctor.examine_root(store, clock))
    assert store.requests.total() < 300


FAST: Final[dict[str, object]] = {"requests.profile": "fast"}


@pytest.mark.parametrize(
    ("overrides", "topics", "state", "advice"),
    [
        ({}, 0, CheckState.OK, ""),
        ({}, 100, CheckState.OK, ""),
        ({"requests.puts_per_second": 100.0}, 100, CheckState.WARN, "lower requests.puts_per"),
        (FAST, 100, CheckState.WARN, 'set requests.profile = "thrifty"'),
        (FAST | {"prices.warn_dollars_per_month": 1e6}, 100, CheckState.OK, ""),
        (FAST | {"prices.dollars_per_million_puts": 0.1}, 9, CheckState.OK, ""),
    ],
)
def test_expensive_settings(
    overrides: dict[str, object], topics: int, state: CheckState, advice: str
) -> None:
    """Those of a busy broker without a budget, or with a large one, but never the defaults."""
    clock = ManualClock(now_us=1_800_000_000_000_000)
    store = MemoryStore(clock)
    rig = Rig(store, clock)
    for number in range(topics):
        rig.create(f"t{number}", 4)
    settings = load_settings(None, {}, {"root": store.uri, "id": 1} | overrides)
    found = doctor.check_expected_bill(settings, store, clock)
    assert (found.state, found.advice.startswith(advice)) == (state, True), found
    counts = f"{4 * topics} partitions of {topics} topics"
    assert counts in found.found
    has_own = "prices.dollars_per_million_puts" in overrides
    assert ("at your own prices" if has_own else "at the prices of S3 Standard") in found.found


def test_the_bill_of_a_running_broker() -> None:
    """It is compared with the bound in the settings of the broker."""
    report = StatusReport(
        state=LeaderStatus.SERVED,
        root="s3://b",
        cluster_id="c",
        bills=[
            StoreBill(
                prices="S3 Standard",
                seconds=60.0,
                warn_dollars_per_month=bound,
                rates=[StoreRates(purpose="tables", puts=30.0, dollars_per_month=394.2)],
            )
            for bound in (500.0, 300.0)
        ],
    )
    cheap, expensive = doctor.check_bills(report)
    assert (cheap.state, expensive.state) == (CheckState.OK, CheckState.WARN)
    assert cheap.found == expensive.found
    words = "about 394 dollars a month at the prices of S3 Standard: 30 puts/s"
    assert cheap.found.startswith(words)
    assert expensive.advice.startswith("most of it: tables 394;")


def checks(findings: Iterable[CheckResult]) -> dict[str, CheckResult]:
    """Returns the results by check."""
    return {each.check: each for each in findings}
