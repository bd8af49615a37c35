"""A process of `benchmarks.s3_server`, and the requests that each of its clients has made."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from typing import Final, Self

from benchmarks.s3_server import COUNTS_PATH
from sparklog.bench.broker import free_address

ROOT: Final = "s3://bench/log"


class StoreProcess:
    """An S3 server that takes a given time for each request, with an empty bucket."""

    def __init__(self, milliseconds: float) -> None:
        self._address = free_address()
        self._milliseconds = milliseconds
        self._process: subprocess.Popen[bytes] | None = None

    def options(self, client: str = "sparklog") -> dict[str, str]:
        """Returns the options of the store, under obstore's names.

        `client`: the name for which the server counts the requests.
        """
        return {
            "aws_endpoint": f"http://{self._address}",
            "aws_access_key_id": "none",
            "aws_secret_access_key": "none",
            "aws_region": "us-east-1",
            "allow_http": "true",
            "user_agent": client,
        }

    def environment(self, client: str = "sparklog") -> dict[str, str]:
        """Returns the options as the environment of a broker."""
        return {
            f"SPARKLOG_STORAGE_{name.upper()}": value
            for name, value in self.options(client).items()
        }

    def requests(self, client: str) -> Counter[str]:
        """Returns the requests of a client so far, by kind: puts, lists, reads and deletes."""
        with urllib.request.urlopen(f"http://{self._address}{COUNTS_PATH}", timeout=30) as answer:
            return Counter(json.load(answer).get(client, {}))

    def __enter__(self) -> Self:
        port = self._address.rpartition(":")[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.s3_server", port, str(self._milliseconds)]
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
