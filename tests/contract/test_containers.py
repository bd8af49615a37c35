"""The container guide against the program: what its files name exists, and its entry point serves.

No container engine is needed: the entry point runs as a process, with the environment that the
Dockerfile and `docker run` give it. `tests/interop/test_installation.py` runs the image's pip line.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kafka import KafkaAdminClient

import sparklog
from sparklog import limits
from sparklog.settings import load_settings
from tests.support import containers, fences

_PAGE: Final = containers.PAGE
_SECONDS: Final = 60.0


def docker_commands() -> list[list[str]]:
    """The commands of the page, as words."""
    (block,) = (each for each in fences.fences(_PAGE) if each.language == "bash")
    return [shlex.split(line) for line in block.code.replace("\\\n", " ").splitlines()]


def options(command: list[str]) -> dict[str, list[str]]:
    """The values of each option of `docker run`; each of them takes one."""
    found: dict[str, list[str]] = {}
    words = iter(command[2:-1])
    for name in words:
        found.setdefault(name, []).append(next(words))
    return found


def run_options() -> dict[str, list[str]]:
    """The values of the options of `docker run`."""
    _, run = docker_commands()
    assert run[:2] == ["docker", "run"]
    return options(run)


def environment_of_the_run() -> dict[str, str]:
    """The variables of the image, and those that `docker run` adds."""
    given = dict(each.split("=", 1) for each in run_options()["--env"])
    return containers.environment() | given


def manifests() -> dict[str, Any]:
    """The objects for Kubernetes by their kind."""
    found = [yaml.safe_load(each.code) for each in fences.fences(_PAGE) if each.language == "yaml"]
    return {each["kind"]: each for each in found}


def ports_of(environment: Mapping[str, str]) -> set[int]:
    """The ports at which a broker with that environment listens."""
    settings = load_settings(None, environment, {})
    addresses = (settings.kafka.listen, settings.flight.listen)
    return {int(address.rpartition(":")[2]) for address in addresses}


def test_ports_of_the_page_are_those_of_the_listeners() -> None:
    """The ports that are exposed, published, probed and routed are those that the broker opens."""
    listened = ports_of(environment_of_the_run())
    assert {int(port) for port in containers.instructions("EXPOSE")[0].split()} == listened
    published = [each.split(":") for each in run_options()["--publish"]]
    assert {int(inner) for *_, inner in published} == listened
    assert {f"localhost:{outer}" for _, outer, _ in published} == {
        environment_of_the_run()[f"SPARKLOG_{each}_ADVERTISED"] for each in ("KAFKA", "FLIGHT")
    }
    container = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["tcpSocket"]["port"] in listened
    assert {each["port"] for each in manifests()["Service"]["spec"]["ports"]} == listened


def test_settings_of_kubernetes_are_settings() -> None:
    """The pod's variables are settings, and the advertised name is that of the Service."""
    deployment, service = manifests()["Deployment"], manifests()["Service"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    links = {"SPARKLOG_SERVICE_HOST": "10.0.0.1", "SPARKLOG_PORT_9092_TCP": "tcp://10.0.0.1:9092"}
    settings = load_settings(None, containers.environment() | given | links, {})
    name = service["metadata"]["name"]
    assert {settings.kafka.advertised, settings.flight.advertised} == {
        f"{name}:{each['port']}" for each in service["spec"]["ports"]
    }
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    tag = docker_commands()[0]
    assert container["image"] == tag[tag.index("--tag") + 1] == docker_commands()[1][-1]


def test_containers_wait_for_the_stop() -> None:
    """Docker and Kubernetes give a broker longer to stop than it takes at most."""
    (seconds,) = run_options()["--stop-timeout"]
    assert int(seconds) > limits.STOP_SECONDS
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > limits.STOP_SECONDS


def test_image_installs_an_extra_that_exists() -> None:
    """The extra of the pip line is one of the package, and the image's Python is supported."""
    project = tomllib.loads((fences.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert containers.extra() in project["optional-dependencies"]
    (image,) = containers.instructions("FROM")
    version = image.removeprefix("python:").removesuffix("-slim")
    assert tuple(map(int, version.split("."))) >= (3, 11)
    assert project["requires-python"] == ">=3.11"


def test_volume_is_the_root() -> None:
    """The root is the folder that is a volume, and that the image makes for the broker's user."""
    root = load_settings(None, environment_of_the_run(), {}).root
    assert containers.instructions("VOLUME") == [root]
    (volume,) = run_options()["--volume"]
    assert volume.endswith(f":{root}")
    (user,) = containers.instructions("USER")
    makes = [each for each in containers.instructions("RUN") if "useradd" in each]
    assert makes == [f"useradd --uid 1000 {user} && mkdir {root} && chown {user} {root}"]


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the docker command")
def test_docker_knows_the_options() -> None:
    """Every option of the page is one of docker's."""
    for command in docker_commands():
        shown = subprocess.run([*command[:2], "--help"], capture_output=True, text=True, check=True)
        for word in command:
            if word.startswith("--"):
                assert f"{word} " in shown.stdout, command


def test_entry_point_serves_under_the_advertised_addresses(tmp_path: Path) -> None:
    """With the page's environment the broker serves both ports to clients, and stops in time."""
    free = {port: fences.free_port() for port in ("9092", "8815")}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SPARKLOG_")
    }
    for name, value in environment_of_the_run().items():
        if name.startswith("SPARKLOG_"):
            host, colon, port = value.rpartition(":")
            environment[name] = f"{host}{colon}{free[port]}" if port in free else value
    environment["SPARKLOG_ROOT"] = str(tmp_path / "data")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = str(fences.ROOT)
    (entry_point,) = containers.instructions("ENTRYPOINT")
    command = json.loads(entry_point)
    found = shutil.which(command[0], path=environment["PATH"])
    assert found, command
    with subprocess.Popen(
        [found, *command[1:]], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as broker:
        try:
            assert broker.stdout is not None
            assert broker.stdout.readline()
            for number in free.values():
                socket.create_connection(("127.0.0.1", number), _SECONDS).close()
            admin = KafkaAdminClient(bootstrap_servers=f"localhost:{free['9092']}")
            brokers = admin.describe_cluster()["brokers"]
            admin.close()
            assert [(each["host"], each["port"]) for each in brokers] == [
                ("localhost", free["9092"])
            ]
            with sparklog.connect(f"localhost:{free['8815']}") as log:
                log.create_topic("t")
                assert log.cluster().brokers
            broker.send_signal(signal.SIGTERM)
            assert broker.wait(limits.STOP_SECONDS) == 0
        finally:
            broker.kill()
