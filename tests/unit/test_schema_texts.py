"""The schemas of a root: one text for each id, forever."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.formats.values.registered import RegisteredSchema
from sparklog.storage.objects import MemoryStore, ScriptedFaults
from sparklog.storage.objects.faults import Fault
from sparklog.storage.schema_texts import SchemasOfFile, SchemaTexts, path_of
from tests.support.registry import record


def schema(*fields: str) -> RegisteredSchema:
    """A schema with these fields."""
    return RegisteredSchema(schema=json.dumps(record("Order", *fields)))


def test_a_text_is_put_once(store: MemoryStore, clock: ManualClock) -> None:
    """A repeated put, as after a crash, changes nothing; another text is marked, and neither is
    used from then on, also by programs that start later.
    """
    texts = SchemaTexts(store)
    one, other = schema("a:string"), schema("b:string")
    assert texts.put(7, one, clock=clock)
    assert SchemaTexts(store).put(7, one, clock=clock)
    assert texts.find([7, 8]).keys() == {7}
    assert texts.conflicts() == []
    assert not texts.put(7, other, clock=clock)
    for each in (texts, SchemaTexts(store)):
        assert each.find([7]) == {}
        assert (each.text(7), each.conflict(7), each.conflicts()) == (one, other, [7])


def test_known_schemas_cost_no_request(store: MemoryStore, clock: ManualClock) -> None:
    """Unknown ones cost one for each file; garbage that looks like a thousand ids a listing."""
    texts = SchemaTexts(store)
    texts.put(3, schema("a:string"), clock=clock)
    texts.find([3])
    asked: list[str] = []

    class Watching:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                asked.append(name)
                return getattr(store, name)(*arguments)

            return call if name in ("get", "list_after") else getattr(store, name)

    watched = SchemaTexts(Watching())
    watched.find([3])
    assert asked == ["get", "get"]  # the text, and whether it is in doubt
    of_file = SchemasOfFile(watched, tolerates=False)
    assert of_file([3, 4]).keys() == of_file([4, 3]).keys() == {3}
    assert asked == ["get"] * 3
    assert watched.find([*range(1_000)]).keys() == {3}
    assert asked == [*["get"] * 3, "list_after"]


def test_a_store_that_refuses(store: MemoryStore, clock: ManualClock) -> None:
    """New records are written without its schemas; a rewrite fails instead of losing columns."""
    SchemaTexts(store).put(1, schema("a:string"), clock=clock)
    down = errors.StorageUnavailable(operation="get", path="schemas", reason="denied")

    def refusing() -> SchemaTexts:
        fault = Fault(operation="get", error=down, prefix="schemas/")
        return SchemaTexts(store.view(ScriptedFaults(fault)))

    assert SchemasOfFile(refusing(), tolerates=True)([1]) == {}
    with pytest.raises(errors.StorageUnavailable):
        SchemasOfFile(refusing(), tolerates=False)([1])


def test_a_damaged_text_is_named(store: MemoryStore) -> None:
    """It is neither a schema nor an unknown one."""
    store.put_new(path_of(1), b"{")
    with pytest.raises(errors.CorruptObject, match=path_of(1)):
        SchemaTexts(store).find([1])
