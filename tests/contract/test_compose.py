"""The cluster of deploy/compose.yaml: a legal file, whose brokers serve together as processes.

Each broker runs with the environment that Compose gives its container. Only hosts and ports differ,
and the store is moto's S3 server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from sparklog import limits
from sparklog.settings import BrokerSettings, load_settings
from sparklog.storage.objects import open_store
from tests.support import containers, fences
from tests.support.ports import quiet_port
from tests.support.s3 import s3_server
from tests.support.waiting import wait_until

STORE: Final = "store"
SECURITY: Final = "security"
SECRET: Final = "/secret"
BROKERS_PORT: Final = 8814
"""The port of the listener that has none on the host."""
SECONDS: Final = 60.0
_HOST: Final = "TEST_HOST_NAME"


def settings_of(monkeypatch: pytest.MonkeyPatch, name: str) -> BrokerSettings:
    """The settings of a broker in its container."""
    service = containers.brokers()[name]
    monkeypatch.setattr("sparklog.settings.loading.socket.gethostname", lambda: service["hostname"])
    return load_settings(None, containers.environment() | service["environment"], {})


# ------------------------------------------------------------------------------ the file


def checked(file: Path) -> subprocess.CompletedProcess[str]:
    """The check of a file against the schema of the Compose specification."""
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def test_file_is_legal(tmp_path: Path) -> None:
    """It is as the Compose specification says; a misspelt key is not."""
    done = checked(containers.COMPOSE)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(containers.COMPOSE.read_text("utf-8").replace("healthcheck:", "heathcheck:"))
    assert checked(wrong).returncode == 1


def test_page_names_the_file_and_its_services() -> None:
    """Each command of the page for Compose is about this file, and about services of it."""
    commands = re.findall(r"^docker compose .*$", containers.PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        words = command.split()
        assert words[3] == str(containers.COMPOSE.relative_to(fences.ROOT))
        if words[4] in ("start", "stop", "exec"):
            assert words[5] in containers.brokers()
        if words[4] == "cp":
            assert words[5:] == [f"{SECURITY}:{SECRET}/admin", "admin"]


def test_brokers_are_three_members_of_one_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an id of its own, from the name of its host, and they agree in all but addresses."""
    found = [settings_of(monkeypatch, name) for name in containers.brokers()]
    assert [each.id for each in found] == [0, 1, 2]
    assert all(each.cluster.join for each in found)
    assert len({(each.root, json.dumps(dict(each.storage))) for each in found}) == 1


@pytest.mark.parametrize("name", ["broker-0", "broker-1", "broker-2"])
def test_variables_are_settings(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each variable that begins like a setting is one, and the store knows its options."""
    assert containers.unknown_variables(containers.brokers()[name]["environment"]) == set()
    settings = settings_of(monkeypatch, name)
    open_store(settings.root, settings.storage)


def test_advertised_addresses_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client on the host reaches each broker where it says, and no port is taken twice."""
    taken: Counter[int] = Counter(
        containers.published(containers.compose()["services"][STORE]).values()
    )
    for name, service in containers.brokers().items():
        settings = settings_of(monkeypatch, name)
        outer = containers.published(service)
        taken.update(outer.values())
        listened = {each.port for of in (settings.kafka, settings.flight) for each in of.listeners}
        assert settings.metrics.listener is not None
        listened.add(settings.metrics.listener.port)
        assert outer.keys() == listened - {BROKERS_PORT}
        (kafka,), (_, clients) = settings.kafka.listeners, settings.flight.listeners
        for of, listener in ((settings.kafka, kafka), (settings.flight, clients)):
            assert of.advertised_of(listener.name) == f"localhost:{outer[listener.port]}"
    assert set(taken.values()) == {1}


def test_brokers_reach_each_other_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Flight listener, which brokers use, is advertised at the name of the container.

    The certificate is valid for it.
    """
    words = containers.compose()["services"][SECURITY]["command"]
    hosts = {each.removeprefix("--host=") for each in words if each.startswith("--host=")}
    assert hosts == {"localhost", *containers.brokers()}
    for name, service in containers.brokers().items():
        settings = settings_of(monkeypatch, name)
        first = settings.flight.listeners[0]
        assert first.port == BROKERS_PORT
        assert service["hostname"] == name
        assert settings.flight.advertised_of(first.name) == f"{name}:{BROKERS_PORT}"


def test_clients_log_in_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """All listeners but that of metrics, with the files that `sparklog security init` has written,
    to a volume which brokers only read.
    """
    service = containers.compose()["services"][SECURITY]
    assert f"--out={SECRET}" in service["command"]
    (volume,) = service["volumes"]
    assert volume.endswith(f":{SECRET}")
    for name, broker in containers.brokers().items():
        settings = settings_of(monkeypatch, name)
        listeners = (*settings.kafka.listeners, *settings.flight.listeners)
        assert {each.protocol for each in listeners} == {"SASL_SSL"}
        assert settings.security.anonymous == "loopback"
        assert settings.tls.certificate == f"{SECRET}/broker.pem"
        assert settings.tls.key == f"{SECRET}/broker.key"
        assert broker["volumes"] == [f"{volume}:ro"]
        assert broker["depends_on"][SECURITY] == {"condition": "service_completed_successfully"}
        root = {key: each for key, each in broker["environment"].items() if "STORAGE" in key}
        root["SPARKLOG_ROOT"] = settings.root
        assert service["environment"] == root


def test_brokers_wait_for_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start once the store is healthy, use its credentials, and it makes their bucket."""
    services = containers.compose()["services"]
    store = services[STORE]
    for name, broker in containers.brokers().items():
        settings = settings_of(monkeypatch, name)
        for each in (broker, services[SECURITY]):
            assert each["depends_on"][STORE] == {"condition": "service_healthy"}
        assert settings.root.split("/")[2] == store["environment"]["S3_BUCKET"]
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert settings.storage[key.lower()] == store["environment"][key]
        port = int(settings.storage["aws_endpoint"].rpartition(":")[2])
        assert settings.storage["aws_endpoint"] == f"http://{STORE}:{port}"
        assert port in containers.published(store)
    probe = store["healthcheck"]["test"][-1]
    assert probe.endswith(f"/buckets/{store['environment']['S3_BUCKET']}/")
    assert re.fullmatch(r"\S+:\d+\.\d+", store["image"]), "name a release"


def test_containers_have_time_to_stop_and_folders_to_write() -> None:
    """A stop takes less than the grace, and what the broker writes on disk is in a tmpfs."""
    for broker in containers.brokers().values():
        seconds = int(broker["stop_grace_period"].removesuffix("s"))
        assert seconds > limits.STOP_SECONDS + limits.DRAIN_SECONDS
        assert broker["read_only"] is True
        cache = Path(containers.environment()["NUMBA_CACHE_DIR"])
        assert {str(each) for each in cache.parents} & {*broker["tmpfs"]}
        assert broker["build"]["dockerfile"] == str(containers.DOCKERFILE.relative_to(fences.ROOT))
        assert (containers.DEPLOY / broker["build"]["context"]).resolve() == fences.ROOT


def test_image_of_the_brokers_is_that_of_the_page() -> None:
    """A built image is used by Compose too."""
    assert {each["image"] for each in containers.brokers().values()} == {"sparklog"}
    assert "--tag sparklog ." in containers.PAGE.read_text("utf-8")


# ------------------------------------------------------------------------------ the processes


class Container:
    """A broker of the file as a process of this machine.

    Args:
        folder: a folder for the host name, which the process takes from a module there.
        ports: the free ports that stand for those of the host.
        storage: the options of the store.
    """

    def __init__(
        self,
        folder: Path,
        service: Mapping[str, Any],
        ports: Mapping[int, int],
        storage: Mapping[str, str],
    ) -> None:
        self._service = service
        self._ports = {
            inner: ports[outer] for inner, outer in containers.published(dict(service)).items()
        } | {BROKERS_PORT: quiet_port()}
        (self._environment, self._folder) = containers.without_settings(os.environ), folder
        given = containers.environment() | service["environment"]
        for name, value in given.items():
            if name.endswith("_LISTEN"):
                value = re.sub(r":(\d+)", lambda found: f":{self._ports[int(found[1])]}", value)
            elif name.endswith("_ADVERTISED"):
                value = re.sub(
                    r"localhost:(\d+)", lambda found: f"localhost:{ports[int(found[1])]}", value
                )
                own = f"127.0.0.1:{self._ports[BROKERS_PORT]}"
                value = value.replace(f"{service['hostname']}:{BROKERS_PORT}", own)
            value = value.replace(SECRET, str(folder / "secret"))
            if name.startswith("SPARKLOG_"):
                self._environment[name] = value
        for name, value in storage.items():
            self._environment[f"SPARKLOG_STORAGE_{name.upper()}"] = value
        self._environment |= {
            _HOST: service["hostname"],
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(folder), str(fences.ROOT)]),
        }
        self.process: subprocess.Popen[str] | None = None

    @property
    def kafka(self) -> str:
        return self._environment["SPARKLOG_KAFKA_ADVERTISED"]

    def start(self) -> None:
        """Starts the entry point of the image; does not wait until it serves."""
        (entry_point,) = containers.instructions("ENTRYPOINT")
        command = json.loads(entry_point)
        found = shutil.which(command[0], path=self._environment["PATH"])
        assert found, command
        self.process = subprocess.Popen(
            [found, *command[1:]], cwd=self._folder, env=self._environment,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def is_healthy(self) -> bool:
        """Runs the health check of the file."""
        assert self.process is not None
        assert self.process.poll() is None, "the broker has ended"
        kind, program, *arguments = self._service["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        arguments = [
            re.sub(
                r"(127\.0\.0\.1):(\d+)",
                lambda found: f"{found[1]}:{self._ports[int(found[2])]}",
                each,
            )
            for each in arguments
        ]
        done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
        return done.returncode == 0

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(limits.STOP_SECONDS + limits.DRAIN_SECONDS)
        self.close()
        return code

    def close(self) -> None:
        """Ends the process, if it runs, and frees what belongs to it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def run(self, code: str, *, inside: bool = False) -> str:
        """Runs commands of a client of the cluster on the host, or in the container.

        Returns their output.
        """
        environment = (
            self._environment if inside else containers.without_settings(self._environment)
        )
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code], cwd=self._folder, env=environment,
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout


class Cluster:
    """The brokers of the file, by name, and the ports that stand for those of the host."""

    def __init__(self, folder: Path, storage: Mapping[str, str]) -> None:
        self._folder = folder
        # As the uts namespace of a container gives its process a host name.
        (folder / "sitecustomize.py").write_text(
            f"import os, socket\nsocket.gethostname = lambda: os.environ[{_HOST!r}]\n"
        )
        outer = [
            port
            for service in containers.brokers().values()
            for port in containers.published(service).values()
        ]
        self.ports = {port: quiet_port() for port in outer}
        self.brokers = {
            name: Container(folder, service, self.ports, storage)
            for name, service in containers.brokers().items()
        }

    def secure(self) -> None:
        """Runs the service `security`, and copies the administrator's files as the page does."""
        service, folder = containers.compose()["services"][SECURITY], self._folder
        words = (*service["entrypoint"], *service["command"])
        command = " ".join(each.replace(SECRET, f"{folder}/secret") for each in words)
        self.brokers["broker-0"].run(command, inside=True)
        shutil.copytree(folder / "secret" / "admin", folder / "admin")

    @property
    def login(self) -> dict[str, Any]:
        """The properties of a Kafka client of the administrator."""
        lines = (self._folder / "admin" / "librdkafka.properties").read_text().splitlines()
        return dict(each.split("=", 1) for each in lines) | {
            "bootstrap.servers": ",".join(each.kafka for each in self.brokers.values())
        }

    def commands(self) -> str:
        """The commands for a client in the page, with the ports that stand for those there."""
        blocks = fences.fences(containers.PAGE)
        (block,) = (each for each in blocks if "export SPARKLOG_BOOTSTRAP=" in each.code)
        return re.sub(
            r"localhost:(\d+)", lambda found: f"localhost:{self.ports[int(found[1])]}", block.code
        )

    def end(self) -> None:
        """Kills what runs."""
        for each in self.brokers.values():
            each.close()


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Iterator[Cluster]:
    bucket = containers.compose()["services"][STORE]["environment"]["S3_BUCKET"]
    with s3_server(bucket) as storage:
        found = Cluster(tmp_path, storage)
        try:
            found.secure()
            for each in found.brokers.values():
                each.start()  # all at once, as Compose and a parallel StatefulSet do
            for name, each in found.brokers.items():
                wait_until(each.is_healthy, f"{name} is healthy", look_seconds=1.0)
            yield found
        finally:
            found.end()


def members(admin: AdminClient) -> dict[int, str]:
    """The brokers that Kafka's clients see: addresses by id."""
    nodes = admin.describe_cluster(request_timeout=SECONDS).result(SECONDS).nodes
    return {node.id: f"{node.host}:{node.port}" for node in nodes}


def write(cluster: Cluster, topic: str, wanted: range) -> None:
    """Writes numbers; all of them are acked when it returns."""
    failed: list[KafkaError] = []

    def note(error: KafkaError | None, _: object) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({**cluster.login, "enable.idempotence": True})
    for number in wanted:
        producer.produce(topic, value=b"%d" % number, key=b"%d" % number, on_delivery=note)
    assert producer.flush(SECONDS) == 0
    assert failed == []


def read(cluster: Cluster, topic: str, count: int) -> Counter[bytes]:
    """Reads so many values from the start of a topic, as a group."""
    found: Counter[bytes] = Counter()
    consumer = Consumer(
        {
            **cluster.login,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    with contextlib.closing(consumer):
        deadline = time.monotonic() + SECONDS
        while found.total() < count:
            assert time.monotonic() < deadline, f"{found.total()} of {count} records were read"
            for message in consumer.consume(500, 0.5):
                assert message.error() is None, message.error()
                value = message.value()
                assert value is not None
                found[value] += 1
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_brokers_serve_together(cluster: Cluster) -> None:
    """Clients on the host reach all three, also while one is stopped and after its return.

    The ids are those of the hosts, and each broker that gets SIGTERM ends in time without an error.
    """
    expected = {number: each.kafka for number, each in enumerate(cluster.brokers.values())}
    admin = AdminClient(cluster.login)
    wait_until(lambda: members(admin) == expected, "all members are seen")
    created = admin.create_topics([NewTopic("numbers", 6)], request_timeout=SECONDS)
    created["numbers"].result(SECONDS)
    found = admin.list_topics("numbers", timeout=SECONDS).topics["numbers"].partitions
    assert {each.leader for each in found.values()} == {0, 1, 2}
    write(cluster, "numbers", range(300))

    stopped = cluster.brokers["broker-1"]
    assert stopped.stop() == 0
    wait_until(lambda: members(admin).keys() == {0, 2}, "the stopped broker is gone")
    write(cluster, "numbers", range(300, 600))
    assert read(cluster, "numbers", 600) == Counter(b"%d" % number for number in range(600))

    stopped.start()
    wait_until(stopped.is_healthy, "the stopped broker is back", look_seconds=1.0)
    wait_until(lambda: members(admin) == expected, "all members are seen again")
    output = stopped.run(cluster.commands())
    assert "the first order" in output
    status = json.loads(stopped.run("sparklog status --json", inside=True))
    assert status["state"] == "served"
    assert [each.stop() for each in cluster.brokers.values()] == [0, 0, 0]


def test_file_has_no_other_services() -> None:
    """Only the store, `security` and the brokers, so that no service is left out of these tests."""
    document = yaml.safe_load(containers.COMPOSE.read_text("utf-8"))
    assert document["services"].keys() == {STORE, SECURITY, *containers.brokers()}
