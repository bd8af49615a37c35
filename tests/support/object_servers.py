"""Servers of S3 and Azure Blob Storage, which are used if they are installed.

None of them is a dependency. A server is found by its environment variable, which has the path of
its program, or by the name of its program on the PATH. Each gets a free port of the loopback
interface, and keeps its data in memory or in a temporary folder.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final

import boto3
import pytest

from tests.support.ports import quiet_port
from tests.support.waiting import wait_until

_KEY: Final = "sparklogtest"
_AZURE_ACCOUNT: Final = "devstoreaccount1"
_AZURE_KEY: Final = base64.b64encode(b"a key of tests").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectServer:
    """A server that a test can start."""

    name: str
    scheme: str
    """The scheme of its buckets' URIs: `s3` or `az`."""
    program: str
    """The name of its program on the PATH."""
    command: Callable[[int, Path], Sequence[str]]
    """Arguments of the program, for a port and an empty folder for its data."""
    environment: Callable[[int, Path], Mapping[str, str]] = field(default=lambda _port, _data: {})
    key: str = _KEY
    """The id of an S3 access key, and its secret."""
    is_exclusive: bool = True
    """True if it honours put-if-absent. A broker must refuse a server that does not."""

    @property
    def variable(self) -> str:
        """The environment variable with the path of its program."""
        return f"SPARKLOG_TEST_{self.name.upper().replace('-', '_')}"

    def found(self) -> str | None:
        """Returns the path of the installed program, or None."""
        return os.environ.get(self.variable) or shutil.which(self.program)

    @property
    def missing(self) -> str:
        """The reason for which tests skip the server if it is not installed."""
        place = f"set {self.variable} to its path, or put {self.program} on the PATH"
        return f"{self.name} is not installed: {place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An empty bucket of a running server."""

    uri: str
    options: Mapping[str, str]
    """Opens the bucket, under obstore's names."""

    @property
    def environment(self) -> dict[str, str]:
        """The options as the environment of a broker."""
        return {f"SPARKLOG_STORAGE_{name.upper()}": value for name, value in self.options.items()}


def _versitygw(port: int, data: Path) -> Sequence[str]:
    # Without the sidecar it needs a file system with extended attributes, which tmpfs lacks.
    buckets, sidecar = data / "buckets", data / "sidecar"
    buckets.mkdir()
    sidecar.mkdir()
    return ("--port", f"127.0.0.1:{port}", "posix", "--sidecar", str(sidecar), str(buckets))


SERVERS: Final = {
    each.name: each
    for each in (
        ObjectServer(
            name="azurite",
            scheme="az",
            program="azurite-blob",
            command=lambda port, _: (
                *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
                *("--silent", "--inMemoryPersistence", "--skipApiVersionCheck"),
            ),
            environment=lambda _port, _data: {"AZURITE_ACCOUNTS": f"{_AZURE_ACCOUNT}:{_AZURE_KEY}"},
        ),
        ObjectServer(
            name="minio",
            scheme="s3",
            program="minio",
            command=lambda port, data: ("server", "--address", f"127.0.0.1:{port}", str(data)),
            environment=lambda _port, _data: {
                "MINIO_ROOT_USER": _KEY,
                "MINIO_ROOT_PASSWORD": _KEY,
                "MINIO_BROWSER": "off",
            },
        ),
        ObjectServer(
            name="versitygw",
            scheme="s3",
            program="versitygw",
            command=_versitygw,
            environment=lambda _port, _data: {
                "ROOT_ACCESS_KEY": _KEY,
                "ROOT_SECRET_KEY": _KEY,
            },
        ),
        ObjectServer(
            name="gofakes3",
            scheme="s3",
            program="gofakes3",
            command=lambda port, _: ("-backend", "memory", "-host", f"127.0.0.1:{port}"),
        ),
        ObjectServer(
            name="s3rver",
            scheme="s3",
            program="s3rver",
            command=lambda port, data: (
                *("--address", "127.0.0.1", "--port", str(port), "--directory", str(data)),
                *("--silent", "--no-vhost-buckets"),
            ),
            key="S3RVER",
            is_exclusive=False,
        ),
    )
}


@contextlib.contextmanager
def running(server: ObjectServer, bucket: str) -> Iterator[Served]:
    """Starts a server; yields an empty bucket of it, and stops it at the end.

    Skips the test if it is not installed.
    """
    program = server.found()
    if program is None:
        pytest.skip(server.missing)
    port = quiet_port()
    with tempfile.TemporaryDirectory(prefix="object-server-") as folder:
        data, log = Path(folder) / "data", Path(folder) / "log"
        data.mkdir()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [program, *server.command(port, data)],
                env={**os.environ, **server.environment(port, data)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:

            def is_up() -> bool:
                assert process.poll() is None, log.read_text(errors="replace")[-2_000:]
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    return True
                return False

            wait_until(is_up, f"{server.name} accepts connections")
            yield _created(server, f"127.0.0.1:{port}", bucket)
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# ------------------------------------------------------------------------------ buckets


def _created(server: ObjectServer, address: str, bucket: str) -> Served:
    if server.scheme == "az":
        return _azure_container(address, bucket)
    return s3_bucket(address, bucket, server.key)


def s3_bucket(address: str, bucket: str, key: str = "test") -> Served:
    """Creates a bucket on an S3 server. `key`: the id of an access key, and its secret."""
    options = {
        "aws_endpoint": f"http://{address}",
        "aws_access_key_id": key,
        "aws_secret_access_key": key,
        "aws_region": "us-east-1",
        "allow_http": "true",
    }
    s3_client(options).create_bucket(Bucket=bucket)
    return Served(uri=f"s3://{bucket}", options=options)


def s3_client(options: Mapping[str, str]) -> Any:
    """Returns a client of Amazon's own library for an S3 server."""
    return boto3.client(
        "s3",
        endpoint_url=options["aws_endpoint"],
        aws_access_key_id=options["aws_access_key_id"],
        aws_secret_access_key=options["aws_secret_access_key"],
        region_name=options["aws_region"],
    )


def _azure_container(address: str, container: str) -> Served:
    """Creates a container. The request is signed by the account's key ("Shared Key", Azure's docs).

    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    path = f"/{_AZURE_ACCOUNT}/{container}"
    # The path of an emulator has the account twice: as the account, and as the first folder.
    signed = f"PUT{11 * chr(10)}\n{canonical}/{_AZURE_ACCOUNT}{path}\nrestype:container"
    digest = hmac.digest(base64.b64decode(_AZURE_KEY), signed.encode(), hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    headers["Authorization"] = f"SharedKey {_AZURE_ACCOUNT}:{signature}"
    url = f"http://{address}{path}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="PUT")):
        pass
    options = {
        "azure_storage_account_name": _AZURE_ACCOUNT,
        "azure_storage_account_key": _AZURE_KEY,
        "azure_storage_endpoint": f"http://{address}/{_AZURE_ACCOUNT}",
        "allow_http": "true",
    }
    return Served(uri=f"az://{container}", options=options)
