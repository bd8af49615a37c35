"""`sparklog security init` and `client`: from nothing to a secured broker, and its clients.

Promises: the files work as they are with kafka-python, librdkafka and native clients; a user has
the rights that were given to it and no others; a command that is killed at any point can be
repeated; a log that is in use is not closed.
"""

from __future__ import annotations

import json
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import kafka
import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.cli import app, security_files
from sparklog.settings import load_settings
from tests.support.kafkas import close_leavings
from tests.support.ports import quiet_port


@pytest.fixture(autouse=True)
def _leavings() -> Iterator[None]:
    """Otherwise another test of this process has to collect what kafka-python leaves."""
    yield
    close_leavings()


def run(*arguments: object) -> Result:
    """Runs a command."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def init(folder: Path, *more: object, host: str = "localhost") -> Result:
    """Secures the root `data`."""
    return run(
        *("security", "init", "--host", host),
        *("--out", folder / "secret", "--root", folder / "data", *more),
    )


def test_clients_work_with_the_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of the administrator and of a user with the rights of a producer and consumer."""
    kafka_port, flight_port = quiet_port(), quiet_port()
    done = init(tmp_path, "--kafka-port", kafka_port, "--flight-port", flight_port)
    assert done.exit_code == 0, done.stderr
    for path in (tmp_path / "secret").rglob("*"):
        is_public = path.suffix == ".pem" or path.name == "broker.toml"
        assert is_public or not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    with Agent(load_settings(tmp_path / "secret" / "broker.toml", {}, {})):
        shop = tmp_path / "shop"
        done = run("security", "client", "shop", "--out", shop, "--root", tmp_path / "data")
        assert done.exit_code == 0, done.stderr
        rights = ("--producer", "--consumer", "--topic", "orders", "--group", "shop")
        assert not run("acls", "add", "User:shop", *rights, "--root", tmp_path / "data").exit_code

        given = json.loads((shop / "kafka-python.json").read_text())
        producer = kafka.KafkaProducer(**given)
        assert producer.send("orders", b"tea").get(timeout=30).offset == 0
        producer.close()
        lines = (shop / "librdkafka.properties").read_text().splitlines()
        of_librdkafka = dict(line.split("=", 1) for line in lines)
        consumer = confluent_kafka.Consumer(
            of_librdkafka | {"group.id": "shop", "auto.offset.reset": "earliest"}
        )
        consumer.subscribe(["orders"])
        (message,) = consumer.consume(1, 30)
        assert message.value() == b"tea"
        consumer.close()

        for words in map(shlex.split, (shop / "sparklog.env").read_text().splitlines()):
            monkeypatch.setenv(*words[1].split("=", 1))
        with sparklog.connect() as log:
            assert log.read("orders").num_rows == 1
            with pytest.raises(errors.TopicNotAuthorized):
                log.delete_topic("orders")
        for words in map(
            shlex.split, (tmp_path / "secret/admin/sparklog.env").read_text().splitlines()
        ):
            monkeypatch.setenv(*words[1].split("=", 1))
        with sparklog.connect() as log:
            log.delete_topic("orders")


def test_init_can_be_repeated_after_a_kill_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run ends with files that fit, and with the password that the first one drew."""
    written = security_files.write
    for survived in range(12):
        folder = tmp_path / str(survived)
        folder.mkdir()
        count = 0

        def write(path: Path, content: bytes, *, is_secret: bool, last: int = survived) -> None:
            nonlocal count
            if count == last:
                raise KeyboardInterrupt
            count += 1
            written(path, content, is_secret=is_secret)

        monkeypatch.setattr(security_files, "write", write)
        killed = init(folder)
        monkeypatch.setattr(security_files, "write", written)
        password = folder / "secret/admin/password"
        drawn = password.read_text() if password.exists() else None
        assert init(folder).exit_code == 0
        assert drawn in (None, password.read_text())
        assert_works(folder)
        if killed.exit_code == 0:
            return
    raise AssertionError("it writes more files than this test expects")


def assert_works(folder: Path) -> None:
    """A broker starts with the settings, and the administrator logs in."""
    elsewhere = {
        "kafka.listen": "",
        "kafka.advertised": "",
        "flight.listen": "SASL_SSL://127.0.0.1:0",
        "flight.advertised": "",
    }
    secret = folder / "secret"
    security = sparklog.Security(
        ca=str(secret / "ca.pem"), user="admin", password_file=str(secret / "admin/password")
    )
    with (
        Agent(load_settings(secret / "broker.toml", {}, elsewhere)) as agent,
        sparklog.connect(agent.address, security=security) as log,
    ):
        log.create_topic("t", 1)
        log.delete_topic("t")


def test_repeated_commands_leave_alone_what_exists(tmp_path: Path) -> None:
    """But a certificate that does not fit is replaced, and a wrong password is an error."""

    secret = tmp_path / "secret"
    init(tmp_path)
    before = {path: path.read_bytes() for path in secret.rglob("*") if path.is_file()}
    again = init(tmp_path)
    assert (again.exit_code, "wrote a certificate" in again.stdout) == (0, False)
    assert before == {path: path.read_bytes() for path in secret.rglob("*") if path.is_file()}
    assert "wrote a certificate for k1.example.org" in init(tmp_path, host="k1.example.org").stdout
    found = x509.load_pem_x509_certificate((secret / "broker.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["k1.example.org", "localhost"]
    ca = x509.load_pem_x509_certificate((secret / "ca.pem").read_bytes())
    found.verify_directly_issued_by(ca)
    (secret / "admin/password").write_text("another")
    assert "has another password" in init(tmp_path).stderr
    (secret / "ca.key").unlink()
    assert "it is not the CA of" in init(tmp_path).stderr
    assert "neither a host name" in init(tmp_path / "other", host="bäd host").stderr


def test_a_log_in_use_is_only_observed(tmp_path: Path) -> None:
    """Its clients continue until an administrator enforces ACLs."""
    with sparklog.connect(tmp_path / "data") as log:
        log.create_topic("t", 1)
    done = init(tmp_path)
    assert "ACLs are evaluated, and refusals only logged" in done.stdout
    assert "ACLs are evaluated" in init(tmp_path).stdout


def test_client_needs_a_ca_and_addresses(tmp_path: Path) -> None:
    """The errors say which command comes first."""
    root = ("--root", tmp_path / "data")
    password = tmp_path / "password"
    password.write_text("a long password")
    run("users", "add", "alice", "--password-file", password, *root)
    asked = ("security", "client", "app", "--out", tmp_path / "app", *root)
    assert "run `sparklog security init`" in run(*asked).stderr
    init(tmp_path)
    assert "pass --kafka and --flight" in run(*asked).stderr
    assert run(*asked, "--kafka", "k1:9093", "--flight", "k1:8815").exit_code == 0
    assert "tls://k1:8815" in (tmp_path / "app/sparklog.env").read_text()
