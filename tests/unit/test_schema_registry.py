"""The client of an outside schema registry, against one that misbehaves."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest

from sparklog import errors
from sparklog.broker.schema_registry import SchemaRegistry
from sparklog.formats.values import registered
from sparklog.formats.values.registered import Referenced, RegisteredSchema
from sparklog.settings import RegistrySettings, load_settings
from tests.support.registry import FakeRegistry, record, registry

ROOT = {"root": "./data"}
ORDER = record("Order", "customer:string")


@pytest.fixture
def known() -> Iterator[FakeRegistry]:
    """A registry without schemas."""
    with registry() as found:
        yield found


def client(known: FakeRegistry, **settings: Any) -> SchemaRegistry:
    """A client of the registry."""
    return SchemaRegistry(RegistrySettings(url=known.url, **settings))


def test_schemas_are_found_by_id_and_by_subject(known: FakeRegistry) -> None:
    """With the subjects that they are registered under; unknown ones are None, not failures."""
    first = known.register("a b/c", ORDER)
    asked = client(known)
    found = asked.schema(first)
    assert found == RegisteredSchema(schema=json.dumps(ORDER))
    assert asked.subjects(first) == frozenset({"a b/c"})
    latest = asked.latest("a b/c")
    assert latest is not None
    assert (latest.id, latest.schema) == (first, found)
    assert [asked.schema(99), asked.subjects(99), asked.latest("none")] == [None] * 3
    assert (asked.requests, asked.failures) == (6, 0)
    known.register("p", 'syntax = "proto3";', kind="PROTOBUF", schema_id=7)
    other = asked.schema(7)
    assert other is not None
    assert other.parsed() == "a schema of type PROTOBUF"


def test_references_come_with_their_schema(known: FakeRegistry) -> None:
    """References of any depth, each before those that refer to it, are one schema with it."""
    known.register("city", record("City", "name:string", namespace="geo"))
    place = record("Place", "city:geo.City", "old:geo.City", namespace="geo")
    city = {"name": "geo.City", "subject": "city", "version": 1}
    known.register("place", place, references=[city])
    order = record("Order", "to:geo.Place", "home:geo.City", namespace="shop")
    number = known.register(
        "order",
        order,
        references=[{"name": "geo.Place", "subject": "place", "version": 1}, city],
    )
    found = client(known).schema(number)
    assert found is not None
    assert [each.name for each in found.references] == ["geo.City", "geo.Place"]
    assert registered.decode(found.encode()) == found
    parsed = found.parsed()
    assert not isinstance(parsed, str), parsed
    expected: dict[str, Any] = {}
    for each in (*(json.loads(each.schema) for each in found.references), order):
        fastavro.parse_schema(each, named_schemas=expected)
    inlined: dict[str, Any] = {}
    fastavro.parse_schema(json.loads(parsed.text), named_schemas=inlined)
    assert inlined.keys() == expected.keys() == {"geo.City", "geo.Place", "shop.Order"}


def test_a_referenced_type_without_a_namespace_keeps_its_name() -> None:
    """It does not inherit the namespace of the record that it is written into."""
    schema = RegisteredSchema(
        schema=json.dumps(record("Order", "city:City", namespace="shop")),
        references=(Referenced("City", json.dumps(record("City", "name:string"))),),
    )
    parsed = schema.parsed()
    assert not isinstance(parsed, str), parsed
    inlined: dict[str, Any] = {}
    fastavro.parse_schema(json.loads(parsed.text), named_schemas=inlined)
    assert inlined.keys() == {"City", "shop.Order"}


def test_a_missing_or_endless_reference_is_a_failure(known: FakeRegistry) -> None:
    """A registry that is wrong about references gives no answer that can be used."""
    missing = known.register("a", ORDER, references=[{"name": "x", "subject": "x", "version": 1}])
    for name, to in (("one", "two"), ("two", "one")):
        to_other = [{"name": to, "subject": to, "version": 1}]
        number = known.register(name, ORDER, references=to_other, schema_id=len(known.schemas) + 1)
    for each in (missing, number):
        with pytest.raises(errors.RegistryUnavailable, match="version 1 of"):
            client(known).schema(each)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, b"{}"), "answers 500"),
        ((302, b""), "redirects are not followed"),
        ((401, b"{}"), "refuses the credentials"),
        ((404, b"<html>"), "check registry.url"),
        ((404, b'{"error_code": 404}'), "check registry.url"),
        ((200, b"<html>"), "malformed"),
        ((200, b'{"schema": 1}'), "Expected `str`"),
        ((200, b" " * (3 << 20)), "more than"),
    ],
)
def test_answers_that_cannot_be_used(
    known: FakeRegistry, answer: tuple[int, bytes], reason: str
) -> None:
    """Name the fault, and count as failures; none is taken for an unknown schema."""
    known.answer = lambda _: answer
    asked = client(known)
    with pytest.raises(errors.RegistryUnavailable, match=reason):
        asked.schema(1)
    assert (asked.requests, asked.failures) == (1, 1)


def test_a_slow_registry_and_none_at_all(known: FakeRegistry) -> None:
    """A request ends after its time-out."""
    known.may_answer.clear()
    with pytest.raises(errors.RegistryUnavailable, match=r"no complete response within 0\.2 s"):
        client(known, timeout_seconds=0.2).schema(1)
    nowhere = SchemaRegistry(RegistrySettings(url="http://127.0.0.1:9"))
    with pytest.raises(errors.RegistryUnavailable, match="refused"):
        nowhere.schema(1)


def test_credentials_are_read_for_each_request(known: FakeRegistry, tmp_path: Path) -> None:
    """They can be replaced while the broker runs; a file that is empty is a failure."""
    known.register("s", ORDER)
    file = tmp_path / "secret"
    file.write_text("alice:söcret\n", "utf-8")
    user = base64.b64encode("alice:söcret".encode()).decode()
    client(known, user_file=str(file)).schema(1)
    asked = client(known, token_file=str(file))
    for token in ("one", "two"):
        file.write_text(token)
        asked.schema(1)
    assert known.authorizations == {f"Basic {user}", "Bearer one", "Bearer two"}
    file.write_text("\n")
    with pytest.raises(errors.RegistryUnavailable, match="one line"):
        asked.schema(1)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"user_file": "f"}, "registry.user_file"),
        ({"url": "ftp://host"}, "registry.url"),
        ({"url": "https://user:secret@host"}, "registry.url"),
        ({"url": "http://host:8081", "user_file": "f"}, "registry.user_file"),
        ({"url": "https://host", "user_file": "f", "token_file": "g"}, "registry.token_file"),
        ({"url": "http://127.0.0.1:8081", "ca": "f"}, "registry.ca"),
        ({"url": "https://host", "key": "f"}, "registry.key"),
    ],
)
def test_settings_that_do_not_fit_together(given: dict[str, str], option: str) -> None:
    """Each is refused by its name; a secret is never sent where it can be read."""
    with pytest.raises(errors.BadOption) as refused:
        load_settings(None, {}, {f"registry.{key}": value for key, value in given.items()} | ROOT)
    assert refused.value.option == option
