"""Stands for the package `docker` in aiokafka's tests, which start Kafka in a container.

The "container" is a broker that runs already, at the address that BROKER names: its connections are
forwarded from the port that the tests have chosen.
"""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any


class Container:
    """The broker; commands in it, which make certificates and users, do nothing."""

    def exec_run(self, *_arguments: Any, **_options: Any) -> tuple[int, bytes]:
        return 0, b""

    def stop(self) -> None:
        """The broker runs on."""


def from_env() -> SimpleNamespace:
    """Returns a client of the daemon."""
    return SimpleNamespace(containers=SimpleNamespace(run=_run), close=lambda: None)


def _run(environment: dict[str, Any] | None = None, **_options: Any) -> Container:
    if environment:
        listener = socket.create_server(("127.0.0.1", int(environment["ADVERTISED_PORT"])))
        threading.Thread(target=_forward, args=(listener,), daemon=True).start()
    return Container()


def _forward(listener: socket.socket) -> None:
    host, _, port = os.environ["BROKER"].rpartition(":")
    while True:
        client, _ = listener.accept()
        broker = socket.create_connection((host, int(port)))
        for ends in ((client, broker), (broker, client)):
            threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one of them has left


models = SimpleNamespace(containers=SimpleNamespace(Container=Container))
