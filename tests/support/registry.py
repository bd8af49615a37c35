"""A schema registry for tests: the part of Confluent's API that the broker uses, and registration.

Faults on demand: it may give no answer, wrong answers, or answer late.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from sparklog.broker.http_client import Response
from tests.support.issuer import send, web_server

UNKNOWN_SCHEMA: Final = {"error_code": 40403, "message": "Schema not found"}
UNKNOWN_SUBJECT: Final = {"error_code": 40401, "message": "Subject not found"}


class FakeRegistry:
    """Subjects with versions of schemas. Thread-safe."""

    def __init__(self) -> None:
        self.url = ""
        self.schemas: dict[int, dict[str, Any]] = {}
        """The schemas, by id, as `GET /schemas/ids/{id}` returns them."""
        self.versions: dict[str, list[int]] = {}
        """The ids of each subject's versions."""
        self.requests: list[str] = []
        """The paths of all requests."""
        self.authorizations: set[str | None] = set()
        self.answer: Callable[[str], tuple[int, bytes] | None] = lambda _: None
        """Answers a path in another way; None: as usual."""
        self.may_answer = threading.Event()
        """Cleared: requests wait."""
        self.may_answer.set()

    def register(
        self,
        subject: str,
        schema: Any,
        *,
        schema_id: int | None = None,
        kind: str | None = None,
        references: list[dict[str, Any]] | None = None,
    ) -> int:
        """Adds a version of a subject, and returns its id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        number = schema_id or max(self.schemas, default=0) + 1
        found: dict[str, Any] = {"schema": text}
        if kind is not None:
            found["schemaType"] = kind
        if references is not None:
            found["references"] = references
        self.schemas[number] = found
        self.versions.setdefault(subject, []).append(number)
        return number

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers a request."""
        path = handler.path.partition("?")[0]
        self.requests.append(path)
        self.authorizations.add(handler.headers["Authorization"])
        self.may_answer.wait(30)
        if (other := self.answer(path)) is not None:
            status, body = other
            send(handler, body, status)
            return
        if handler.command == "POST":
            length = int(handler.headers["Content-Length"])
            found = self._posted(path, json.loads(handler.rfile.read(length)))
        else:
            found = self._found(path)
        status = 404 if isinstance(found, dict) and "error_code" in found else 200
        send(handler, json.dumps(found).encode(), status)

    def get(self, url: str) -> Response:
        """Returns the response to a GET request, without a server."""
        path = urlsplit(url).path
        self.requests.append(path)
        found = self._found(path)
        is_error = isinstance(found, dict) and "error_code" in found
        return Response(404 if is_error else 200, json.dumps(found).encode())

    def _posted(self, path: str, body: dict[str, Any]) -> Any:
        match _parts(path):
            case ["subjects", subject, "versions"]:
                text = body["schema"]
                for number, known in self.schemas.items():
                    if known["schema"] == text:
                        self.versions.setdefault(subject, [])
                        if number not in self.versions[subject]:
                            self.versions[subject].append(number)
                        return {"id": number}
                return {"id": self.register(subject, text)}
        return {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _found(self, path: str) -> Any:
        match _parts(path):
            case ["schemas", "ids", given]:
                return self.schemas.get(int(given), UNKNOWN_SCHEMA)
            case ["schemas", "ids", given, "versions"]:
                found = [
                    {"subject": subject, "version": at + 1}
                    for subject, ids in self.versions.items()
                    for at, each in enumerate(ids)
                    if each == int(given)
                ]
                return found or UNKNOWN_SCHEMA
            case ["subjects", subject, "versions", version]:
                ids = self.versions.get(subject)
                if not ids:
                    return UNKNOWN_SUBJECT
                at = len(ids) if version == "latest" else int(version)
                number = ids[at - 1]
                return {"subject": subject, "version": at, "id": number, **self.schemas[number]}
        return {"error_code": 404, "message": "HTTP 404 Not Found"}


def _parts(path: str) -> list[str]:
    return [unquote(each) for each in path.strip("/").split("/")]


@contextlib.contextmanager
def registry() -> Iterator[FakeRegistry]:
    """Serves a registry on a loopback address."""
    found = FakeRegistry()
    with web_server(found.respond) as url:
        found.url = url
        yield found
        found.may_answer.set()


def framed(schema_id: int, value: bytes) -> bytes:
    """A value as Confluent's serializers write it."""
    return struct.pack(">bI", 0, schema_id) + value


def text(value: str) -> bytes:
    """A string in Avro's binary encoding, of up to 63 bytes."""
    data = value.encode()
    return bytes([2 * len(data)]) + data


def double(value: float) -> bytes:
    """A double in Avro's binary encoding."""
    return struct.pack("<d", value)


def record(name: str, *fields: str, **more: Any) -> dict[str, Any]:
    """A schema of a record; each field is `name:type`."""
    pairs = (each.split(":") for each in fields)
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": key, "type": kind} for key, kind in pairs],
        **more,
    }
