"""The Kafka listener from the outside: a broker with one, and requests frame by frame."""

from __future__ import annotations

import dataclasses
import gc
import io
import itertools
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from sparklog.broker.agent import Agent
from sparklog.broker.kafka.messages import _maker
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    KafkaSettings,
    LogSettings,
    PublisherSettings,
)

SECONDS = 30.0


@contextmanager
def broker(root: Path, **settings: Any) -> Iterator[Agent]:
    """Yields a broker with both listeners, and id 1 unless the settings name another."""
    usual = {
        "id": 1,
        "flight": FlightSettings(listen="127.0.0.1:0"),
        "kafka": KafkaSettings(listen="127.0.0.1:0"),
        "publisher": PublisherSettings(interval_seconds=0.1),
        "log": LogSettings(level="error"),
    }
    given = BrokerSettings(root=str(root), **{**usual, **settings})
    with Agent(given) as agent:
        yield agent


def forget_producers(agent: Agent) -> None:
    """Makes the broker forget all producers, as after a day without writes."""
    led_partitions = agent.parts.led_partitions
    led_partitions.expire_producers(2**62)
    for topic in led_partitions.topics():
        assert not any(each.producers for each in topic.partitions.values())


def close_leavings() -> None:
    """Closes sockets that kafka-python leaves to the garbage collector, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class Frames:
    """A connection to the listener: any request in any version, even those that no client sends."""

    def __init__(self, address: str, seconds: float = SECONDS) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), seconds)
        self._numbers = itertools.count(1)

    @staticmethod
    def frame(key: int, version: int, number: int, fields: Any) -> bytes:
        """Encodes a request for the wire, from fields or kio's message; `number`: its id."""
        schema: Any = load_request_schema(key, version)
        target = io.BytesIO()
        header: Any = schema.__header_schema__
        names = {field.name for field in dataclasses.fields(header)}
        given = {
            "request_api_key": key,
            "request_api_version": version,
            "correlation_id": number,
            "client_id": "frames",
        }
        taken = {name: value for name, value in given.items() if name in names}
        entity_writer(header)(target, header(**taken))
        body = _maker(schema)(fields) if isinstance(fields, Mapping) else fields
        entity_writer(schema)(target, body)
        frame = target.getvalue()
        return len(frame).to_bytes(4, "big") + frame

    def ask(self, key: int, version: int, fields: Any) -> Any:
        """Sends a request, and returns the response as kio's message."""
        (answer,) = self.ask_all([(key, version, fields)])
        return answer

    def ask_all(self, requests: Sequence[tuple[int, int, Any]]) -> list[Any]:
        """Sends all requests, each (key, version, fields), before reading the first response."""
        numbers = [next(self._numbers) for _ in requests]
        self._socket.sendall(
            b"".join(
                self.frame(key, version, number, fields)
                for number, (key, version, fields) in zip(numbers, requests, strict=True)
            )
        )
        return [
            self._answer(key, version, number)
            for number, (key, version, _) in zip(numbers, requests, strict=True)
        ]

    def _answer(self, key: int, version: int, number: int) -> Any:
        return self.reply(key, version, self._read(int.from_bytes(self._read(4), "big")), number)

    @staticmethod
    def reply(key: int, version: int, frame: bytes, number: int = 1) -> Any:
        """Decodes the response to a request, without its length, as kio's message."""
        answer: Any = load_response_schema(key, version)
        found, at = entity_reader(answer.__header_schema__)(frame, 0)
        assert found.correlation_id == number
        return entity_reader(answer)(frame, at)[0]

    def _read(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            assert part, "the listener has closed the connection"
            parts += part
        return parts

    def close(self) -> None:
        self._socket.close()


@contextmanager
def frames(agent: Agent) -> Iterator[Frames]:
    """Opens a connection to the listener."""
    found = Frames(agent.kafka_address)
    try:
        yield found
    finally:
        found.close()
