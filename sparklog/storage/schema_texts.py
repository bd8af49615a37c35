"""Schemas of a registry as the root has them: `schemas/remote/<id>`, put if absent, never changed.

Any program of the root reads them here: brokers, jobs, Spark's executors. So values are decoded
without the registry, and by the same text forever. If the registry later has another text under an
id, a mark beside the text says so: values with the id wait until a person has decided, because it
is unknown by which of the two they were written.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from sparklog import errors
from sparklog.clock import Clock
from sparklog.formats.values import registered
from sparklog.formats.values.columns import AVRO, Plan
from sparklog.formats.values.registered import RegisteredSchema
from sparklog.formats.values.typed import Schemas, no_schemas
from sparklog.storage.objects import (
    CountingStore,
    ObjectMissing,
    Purpose,
    Store,
    claim,
    counted,
    in_parallel,
)

if TYPE_CHECKING:
    from sparklog.formats.values.avro.schema import AvroSchema

FOLDER: Final = "schemas/remote"
_MARK: Final = ".conflict"
_REMEMBERED: Final = 1_000
"""Schemas in memory, parsed."""
_GETS_MAX: Final = 16
"""Unknown schemas that are asked for one at a time; more are looked up in a listing first."""
_ID_MAX: Final = 2**31
_SHARED: Final = "schemas"


def path_of(schema_id: int) -> str:
    """Returns the path of a schema's text."""
    return f"{FOLDER}/{schema_id:010}"


class SchemaTexts:
    """The schemas of one root. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[int, AvroSchema | str] = OrderedDict()
        """Parsed, the longest unused first."""

    def find(self, schema_ids: Iterable[int]) -> dict[int, AvroSchema | str]:
        """Returns the schemas that the root has, one request for each that is not in memory yet.

        Many unknown ones cost a listing instead: garbage may look like thousands of ids. Raises the
        store's errors, and `CorruptObject`.
        """
        wanted = {each for each in schema_ids if 0 <= each < _ID_MAX}
        found: dict[int, AvroSchema | str] = {}
        with self._lock:
            for each in wanted:
                known = self._known.get(each)
                if known is not None:
                    self._known.move_to_end(each)
                    found[each] = known
        left = sorted(wanted - found.keys())
        if len(left) > _GETS_MAX:
            names = {each.name for each in self._store.list_after(FOLDER)}
            left = [each for each in left if f"{each:010}" in names]
        for each, text in zip(left, in_parallel(self._store, self._read, left), strict=True):
            if text is not None:
                found[each] = text
                self._remember(each, text)
        return found

    def _remember(self, schema_id: int, schema: AvroSchema | str) -> None:
        with self._lock:
            self._known[schema_id] = schema
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def _read(self, schema_id: int) -> AvroSchema | str | None:
        text = self.text(schema_id)
        return None if text is None or self.conflict(schema_id) is not None else text.parsed()

    def text(self, schema_id: int) -> RegisteredSchema | None:
        """Returns the stored text; None if there is none. Raises what `find` raises."""
        return self._get(path_of(schema_id))

    def stored(self, schema_ids: Iterable[int]) -> dict[int, str]:
        """Returns the stored forms of the schemas that values are decoded by.

        Raises what `find` raises.
        """
        return {
            each: text.encode().decode()
            for each in self.find(schema_ids)
            if (text := self.text(each)) is not None
        }

    def conflict(self, schema_id: int) -> RegisteredSchema | None:
        """Returns the other text that the registry had; None if it had none."""
        return self._get(path_of(schema_id) + _MARK)

    def _get(self, path: str) -> RegisteredSchema | None:
        try:
            return registered.decode(memoryview(self._store.get(path)))
        except ObjectMissing:
            return None
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=path, check=f"it is not a schema: {error}") from None

    def put(self, schema_id: int, schema: RegisteredSchema, *, clock: Clock) -> bool:
        """Stores a schema. Returns false if the root has another text under the id, and marks it.

        Raises what `claim` raises.
        """
        is_same = claim(self._store, path_of(schema_id), schema.encode(), clock=clock)
        if not is_same:
            claim(self._store, path_of(schema_id) + _MARK, schema.encode(), clock=clock)
            with self._lock:
                self._known.pop(schema_id, None)
        return is_same

    def conflicts(self) -> list[int]:
        """Returns the ids under which the registry has had another text."""
        names = (each.name for each in self._store.list_after(FOLDER))
        return [int(name.removesuffix(_MARK)) for name in names if name.endswith(_MARK)]


class SchemasOfFile:
    """The schemas for one file that is being written: each unknown one is asked for once."""

    def __init__(self, texts: SchemaTexts, *, tolerates: bool) -> None:
        """`tolerates`: a store that refuses to answer counts as one without the schemas."""
        self._texts = texts
        self._tolerates = tolerates
        self._asked: set[int] = set()
        self._found: dict[int, AvroSchema | str] = {}

    def __call__(self, schema_ids: Iterable[int]) -> Mapping[int, AvroSchema | str]:
        """Returns the known ones. Raises what `SchemaTexts.find` raises, unless it tolerates it."""
        left = set(schema_ids) - self._asked
        if left:
            try:
                self._found |= self._texts.find(left)
            except errors.SparklogError:
                if not self._tolerates:
                    raise
            self._asked |= left
        return self._found


def of(store: Store) -> SchemaTexts:
    """Returns the schemas of a root, the same object for all views of its store."""
    if not isinstance(store, CountingStore):
        return SchemaTexts(store)
    found = store.shared.get(_SHARED)
    if found is None:
        found = SchemaTexts(counted(store, Purpose.METADATA))
        found = store.shared.setdefault(_SHARED, found)
    assert isinstance(found, SchemaTexts)
    return found


def for_new_file(store: Store, plan: Plan | None) -> Schemas:
    """Returns the schemas for a file with new records, which no failure of the store delays."""
    return SchemasOfFile(of(store), tolerates=True) if _is_needed(plan) else no_schemas


def for_rewrite(store: Store, plan: Plan | None) -> Schemas:
    """Returns the schemas for a file that replaces others, which must lose none of its columns."""
    return SchemasOfFile(of(store), tolerates=False) if _is_needed(plan) else no_schemas


def _is_needed(plan: Plan | None) -> bool:
    return plan is not None and AVRO in plan.formats
