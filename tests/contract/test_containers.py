"""The image of deploy/ and its guide against the program: what they name exists, and it serves.

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
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest
from kafka import KafkaAdminClient

import sparklog
from sparklog import limits
from sparklog.settings import load_settings
from tests.support import containers, fences
from tests.support.ports import quiet_port

_PAGE: Final = containers.PAGE
_SECONDS: Final = 60.0


def docker_commands() -> list[list[str]]:
    """The commands of the page that build and run the image, as words."""
    (block,) = (each for each in fences.fences(_PAGE) if each.code.startswith("docker build "))
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


def ports_of(environment: Mapping[str, str]) -> set[int]:
    """The ports at which a broker with that environment listens."""
    settings = load_settings(None, environment, {})
    assert settings.metrics.listener is not None
    listeners = (
        *settings.kafka.listeners,
        *settings.flight.listeners,
        settings.metrics.listener,
    )
    return {each.port for each in listeners}


def test_ports_of_the_page_are_those_of_the_listeners() -> None:
    """The ports that are exposed and published are those that the broker opens."""
    listened = ports_of(environment_of_the_run())
    assert {int(port) for port in containers.instructions("EXPOSE")[0].split()} == listened
    published = [each.split(":") for each in run_options()["--publish"]]
    assert {int(inner) for *_, inner in published} == listened - {9404}
    assert {f"localhost:{outer}" for _, outer, _ in published} == {
        environment_of_the_run()[f"SPARKLOG_{each}_ADVERTISED"] for each in ("KAFKA", "FLIGHT")
    }


def test_page_builds_the_image_of_the_file() -> None:
    """`docker build` names the Dockerfile and the top folder, and `docker run` the built tag."""
    build, run = docker_commands()
    assert build[-1] == "."
    assert build[build.index("--file") + 1] == str(containers.DOCKERFILE.relative_to(fences.ROOT))
    assert build[build.index("--tag") + 1] == run[-1]


def test_variables_of_the_image_are_settings() -> None:
    """Each variable of the image that begins like a setting is one."""
    assert containers.unknown_variables(containers.environment()) == set()
    assert containers.unknown_variables({"SPARKLOG_KAFKA_LISTENS": "x"}) != set()


def test_container_waits_for_the_stop() -> None:
    """Docker gives a broker longer to stop than it takes at most."""
    (seconds,) = run_options()["--stop-timeout"]
    assert int(seconds) > limits.STOP_SECONDS + limits.DRAIN_SECONDS


def test_image_installs_an_extra_that_exists() -> None:
    """The extra of the pip line is one of the package, and the image's Python is supported."""
    project = tomllib.loads((fences.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert containers.extra() in project["optional-dependencies"]
    (image,) = containers.instructions("FROM")
    version = image.removeprefix("python:").removesuffix("-slim")
    assert tuple(map(int, version.split("."))) >= (3, 11)
    assert project["requires-python"] == ">=3.11"


def test_volume_is_the_root() -> None:
    """The root is the folder that is a volume, and that the image makes for the broker's user.

    So is the mount point of Compose's volume with keys, which gets its owner.
    """
    root = load_settings(None, environment_of_the_run(), {}).root
    assert containers.instructions("VOLUME") == [root]
    (volume,) = run_options()["--volume"]
    assert volume.endswith(f":{root}")
    (number,) = containers.instructions("USER")
    makes = [each for each in containers.instructions("RUN") if "useradd" in each]
    assert makes == [
        f"useradd --uid {number} sparklog && mkdir {root} /secret && chown sparklog {root} /secret"
    ]


def test_context_has_what_the_package_is_built_from(tmp_path: Path) -> None:
    """The files that the image's build gets are enough for a wheel, and the wheel is whole."""
    ignored, *kept = [
        line
        for line in Path(f"{containers.DOCKERFILE}.dockerignore").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert ignored == "*"
    source = tmp_path / "src"
    source.mkdir()
    for name in (each.removeprefix("!") for each in kept if each.startswith("!")):
        path = fences.ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--wheel-dir", str(tmp_path), str(source)],
        check=True, timeout=_SECONDS, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if not fnmatch(name, "*.dist-info/*")}
    packages = [fences.ROOT / "sparklog", fences.ROOT / "pyspark_sparklog"]
    assert packed == {
        str(path.relative_to(fences.ROOT))
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


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
    free = {port: quiet_port() for port in ("9092", "8815", "9404")}
    environment = containers.without_settings(os.environ)
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
