"""A client of an outside schema registry with Confluent's HTTP API.

One request at a time, each with a deadline and a bound on its body. Credentials are read from their
files for each request, so that they can be replaced while the broker runs.

https://docs.confluent.io/platform/current/schema-registry/develop/api.html
"""

from __future__ import annotations

import base64
import http
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from sparklog import errors
from sparklog.broker import http_client
from sparklog.broker.http_client import ClientTls, Response
from sparklog.formats.values.registered import (
    AVRO,
    SCHEMA_BYTES_MAX,
    Referenced,
    RegisteredSchema,
    is_too_large,
)
from sparklog.settings import RegistrySettings

_BODY_BYTES_MAX: Final = 2 * SCHEMA_BYTES_MAX
"""JSON escapes the quotes of a schema's text."""
_SECRET_BYTES_MAX: Final = 64 * 1024
_LEVELS_MAX: Final = 16
"""References of references."""
_UNKNOWN: Final = (40401, 40402, 40403)
"""The error codes for a subject, a version and a schema that do not exist."""

Get = Callable[[str], Response]


class SubjectVersion(NamedTuple):
    """A schema that is registered under a subject."""

    id: int
    schema: RegisteredSchema


class _Reference(msgspec.Struct):
    name: str
    subject: str
    version: int


class _Schema(msgspec.Struct, rename="camel"):
    schema: str
    id: int = -1
    schema_type: str | None = AVRO
    references: list[_Reference] | None = None


class _Subject(msgspec.Struct):
    subject: str


class _Error(msgspec.Struct):
    error_code: int = 0
    message: str = ""


# Before several threads decode: see `flight_messages`.
_schema_decoder: Final = msgspec.json.Decoder(_Schema)
_subjects_decoder: Final = msgspec.json.Decoder(list[_Subject])
_error_decoder: Final = msgspec.json.Decoder(_Error)


class SchemaRegistry:
    """A registry at an address. Every call raises `RegistryUnavailable`."""

    def __init__(self, settings: RegistrySettings, *, get: Get | None = None) -> None:
        """`get` returns the response to a GET request for a URL; None: over the network."""
        self.url = settings.url.rstrip("/")
        self._settings = settings
        self._get = get or self._request
        self.requests = 0
        """Requests since the start of the broker."""
        self.failures = 0
        """Those of them without an answer that could be used."""

    def schema(self, schema_id: int) -> RegisteredSchema | None:
        """Returns the schema with an id; None if the registry has none."""
        found = self._ask(f"schemas/ids/{schema_id}", _schema_decoder)
        return None if found is None else self._whole(found)

    def subjects(self, schema_id: int) -> frozenset[str] | None:
        """Returns the subjects that a schema is registered under; None if that is unknown.

        Registries before Confluent 5.5 cannot say.
        """
        found = self._ask(f"schemas/ids/{schema_id}/versions", _subjects_decoder)
        return None if found is None else frozenset(each.subject for each in found)

    def latest(self, subject: str) -> SubjectVersion | None:
        """Returns the latest version of a subject; None if there is none."""
        found = self._ask(f"subjects/{quote(subject, safe='')}/versions/latest", _schema_decoder)
        return None if found is None else SubjectVersion(found.id, self._whole(found))

    # -------------------------------------------------------------------------- references

    def _whole(self, found: _Schema) -> RegisteredSchema:
        """Returns a schema with the texts that it refers to."""
        texts: dict[tuple[str, int], Referenced] = {}
        self._add_references(found, texts, 0)
        return RegisteredSchema(
            schema=found.schema,
            type=found.schema_type or AVRO,
            references=tuple(texts.values()),
        )

    def _add_references(
        self, found: _Schema, texts: dict[tuple[str, int], Referenced], level: int
    ) -> None:
        for each in found.references or ():
            key = each.subject, each.version
            if key in texts:
                continue
            path = f"subjects/{quote(each.subject, safe='')}/versions/{each.version}"
            inner = self._ask(path, _schema_decoder)
            if inner is None or level == _LEVELS_MAX:
                why = "does not exist" if inner is None else f"is at level {level} of references"
                raise self._unusable(f"version {each.version} of {each.subject} {why}")
            self._add_references(inner, texts, level + 1)
            texts[key] = Referenced(each.name, inner.schema)
            if is_too_large(found.schema, texts.values()):
                raise self._unusable("a schema and its references are too large")

    # -------------------------------------------------------------------------- requests

    def _ask(self, path: str, decoder: msgspec.json.Decoder[Any]) -> Any:
        """Returns the decoded answer; None if the registry says that there is none."""
        self.requests += 1
        try:
            response = self._get(f"{self.url}/{path}")
            if len(response.body) > _BODY_BYTES_MAX:
                raise ValueError(f"its answer has more than {_BODY_BYTES_MAX:,} bytes")
            if response.status == http.HTTPStatus.NOT_FOUND:
                if _is_unknown(response.body):
                    return None
                raise ValueError("it answers 404 without an error code: check registry.url")
            if response.status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
                raise ValueError(f"it refuses the credentials ({response.status})")
            if response.status != http.HTTPStatus.OK:
                raise ValueError(f"it answers {response.status}; redirects are not followed")
            return decoder.decode(response.body)
        except http_client.FAILURES as error:  # msgspec's errors are ValueErrors
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            raise self._unusable(reason) from None

    def _unusable(self, reason: str) -> errors.RegistryUnavailable:
        self.failures += 1
        return errors.RegistryUnavailable(url=self.url, reason=reason)

    def _request(self, url: str) -> Response:
        settings = self._settings
        tls = ClientTls(settings.ca, settings.certificate, settings.key)
        return http_client.get(
            url,
            most_bytes=_BODY_BYTES_MAX,
            seconds=settings.timeout_seconds,
            tls=tls,
            headers={
                "Accept": "application/vnd.schemaregistry.v1+json, application/json",
                **self._authorization(),
            },
        )

    def _authorization(self) -> dict[str, str]:
        """Returns the header with the credentials, if there are any. Raises OSError."""
        settings = self._settings
        if settings.user_file:
            user = base64.b64encode(_secret(settings.user_file)).decode()
            return {"Authorization": f"Basic {user}"}
        if settings.token_file:
            return {"Authorization": f"Bearer {_secret(settings.token_file).decode('ascii')}"}
        return {}


def _secret(path: str) -> bytes:
    with Path(path).open("rb") as file:
        found = file.read(_SECRET_BYTES_MAX).strip()
    if not found or b"\n" in found or b"\r" in found:
        raise ValueError(f"{path} does not contain one line")
    return found


def _is_unknown(body: bytes) -> bool:
    try:
        return _error_decoder.decode(body).error_code in _UNKNOWN
    except msgspec.MsgspecError:
        return False
