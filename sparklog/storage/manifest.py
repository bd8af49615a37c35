"""The staged batch of a Spark query: what its tasks put aside, and the manifest that decides.

Rules of this room:

- Tasks put files under `staging/<query>/<batch>/`, under random names: a task that runs twice
  stages twice, and what nobody names does not count.
- The manifest in the same folder is put only if absent, and names what counts. It is the decision:
  whoever meets it drives it to its end, and ignores what else was staged. A manifest that *refuses*
  the batch, put by a sweeper, keeps a driver that comes too late from deciding otherwise.
- A refusal ends one *attempt* at the batch, and what was staged for it. A task that begins after it
  stages for the next attempt, whose files and whose manifest have its number in their names. So a
  query may resume after any pause, and only the driver that was given up is refused. Attempts are
  refused in order, and refusals removed from the last: the first attempt without one is the open
  one.
- A section is one Arrow IPC stream of exactly one record batch, a payload of one partition. It is
  read by its byte range alone, as an entry of the write-ahead log is, and becomes one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.record import count_keyless
from sparklog.storage import wal
from sparklog.storage.objects import ObjectMissing, Store, claim
from sparklog.storage.snapshot import BatchId, BatchKind, StagedRef

NAME: Final = "manifest.json"
"""Of the first attempt; `name` gives that of any."""
_FOLDER: Final = "staging"
_QUERY = re.compile(r"(?!\.)[a-zA-Z0-9._@-]{1,250}")
_MANIFEST = re.compile(r"manifest(?:-([1-9]\d*))?\.json")
_MANIFEST_PATH = re.compile(rf"{_FOLDER}/([^/]+)/(0|[1-9]\d*)/{_MANIFEST.pattern}")
_STAGED = re.compile(r"([1-9]\d*)-[0-9a-f]{32}\.arrow")

_Count = Annotated[int, Meta(ge=1)]
_Place = Annotated[int, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one partition, and where they lie. Times are of the rows that brought one."""

    topic: str
    partition: _Place
    rows: Annotated[int, Meta(ge=1, le=limits.STAGED_SECTION_ROWS)]
    path: str
    start: _Place
    length: _Count
    crc32c: _Place
    min_timestamp_us: int | None = None
    max_timestamp_us: int | None = None
    keyless: _Place = 0
    """How many of the rows have no key."""

    def ref(self) -> StagedRef:
        return StagedRef(self.path, self.start, self.length, self.crc32c)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What batch `batch` of `query` consists of; `refused`: this attempt at it is given up."""

    query: str
    batch: _Place
    sections: tuple[Section, ...] = ()
    refused: bool = False
    kind: BatchKind = BatchKind.NUMBERED
    attempt: _Place = 0

    @property
    def path(self) -> str:
        return f"{folder(self.query, self.batch)}/{name(self.attempt)}"

    def check_files(self, store: Store) -> None:
        """That every section's file is there and long enough; costs one listing, reads no rows.

        Raises `MissingObject` and `CorruptObject`, which name the file.
        """
        within = folder(self.query, self.batch)
        sizes = {f"{within}/{stat.name}": stat.size_bytes for stat in store.list_after(within)}
        for section in self.sections:
            size = sizes.get(section.path)
            if size is None:
                raise errors.MissingObject(path=section.path, reason=f"{self.path} names it")
            if section.start + section.length > size:
                raise errors.CorruptObject(
                    path=section.path,
                    check=(
                        f"{size} bytes, where {self.path} names"
                        f" {section.start} to {section.start + section.length}"
                    ),
                )


def folder(query: str, batch: int) -> str:
    """Where a batch is staged. Raises `BadRequest` for a query that makes no name."""
    if not _QUERY.fullmatch(query):
        raise errors.BadRequest(
            reason=f"{query!r} does not name a query: 1 to 250 of [a-zA-Z0-9._@-], no '.' first"
        )
    return f"{_FOLDER}/{query}/{batch}"


# ------------------------------------------------------------------------------ attempts


def name(attempt: int) -> str:
    """What an attempt's manifest is called, in the folder of its batch."""
    return f"manifest-{attempt}.json" if attempt else NAME


def is_manifest(name: str) -> bool:
    """Whether an object of that name, in the folder of a batch, is a manifest of any attempt."""
    return _MANIFEST.fullmatch(name) is not None


def attempt_of(name: str) -> int:
    """The attempt that a manifest or a staged file is of, by its name or its path."""
    name = name.rpartition("/")[2]
    named = _MANIFEST.fullmatch(name) or _STAGED.fullmatch(name)
    return int(named[1] or 0) if named is not None else 0


def open_attempt(store: Store, query: str, batch: int) -> int:
    """The first attempt at the batch that is not refused. Raises what `load` raises."""
    within, attempt = folder(query, batch), 0
    while True:
        path = f"{within}/{name(attempt)}"
        try:
            store.stat(path)
        except ObjectMissing:
            return attempt
        if not load(store, path).refused:
            return attempt
        attempt += 1


# ------------------------------------------------------------------------------ the decision


def write(store: Store, manifest: Manifest, clock: Clock) -> Manifest:
    """Puts `manifest` if its batch has none, and gives the one that stands: ours or an earlier.

    Raises `BadRequest` where a sweeper has refused the batch, and what `claim` does.
    """
    if claim(store, manifest.path, msgspec.json.encode(manifest), clock=clock):
        return manifest
    return read(store, manifest.path)


def refuse(store: Store, within: str, *, clock: Clock, attempt: int = 0) -> bool:
    """Whether the attempt at the batch in the folder is given up: False where a manifest is."""
    query, batch = within.split("/")[1:]
    refusal = Manifest(query=query, batch=int(batch), refused=True, attempt=attempt)
    return claim(store, refusal.path, msgspec.json.encode(refusal), clock=clock)


def read(store: Store, path: str) -> Manifest:
    """A manifest to be driven. Raises `BadRequest` for a refused, malformed or missing one."""
    found = load(store, path)
    if found.refused:
        raise errors.BadRequest(
            reason=f"batch {found.batch} of query {found.query} was staged and not committed for"
            f" so long that it was given up ({path}), and its files are removed; start the query"
            " again, which stages the batch again"
        )
    return found


def batch_of(path: str) -> BatchId:
    """Whose manifest's path this is. Raises `BadRequest` for any other."""
    named = _MANIFEST_PATH.fullmatch(path)
    if named is None:
        raise errors.BadRequest(reason=f"{path!r} is no manifest's path")
    return BatchId(named[1], int(named[2]))


def load(store: Store, path: str) -> Manifest:
    """Whatever manifest stands at `path`. Raises `BadRequest` for a malformed or missing one."""
    batch_id = batch_of(path)
    within = folder(batch_id.query, batch_id.batch)
    try:
        found = msgspec.json.decode(store.get(path), type=Manifest)
    except ObjectMissing:
        raise errors.BadRequest(reason=f"there is no manifest at {path}") from None
    except msgspec.MsgspecError as error:
        raise errors.BadRequest(reason=f"{path} is no manifest: {error}") from error
    if found.path != path:
        raise errors.BadRequest(reason=f"{path} says that it is {found.path}")
    for section in found.sections:
        file = section.path.removeprefix(f"{within}/")
        if file == section.path or "/" in file:
            raise errors.BadRequest(reason=f"{path} names {section.path}, outside its folder")
        if attempt_of(file) != found.attempt:
            raise errors.BadRequest(reason=f"{path} names {section.path}, of another attempt")
    return found


# ------------------------------------------------------------------------------ staging


class StagingWriter:
    """Stages what one task writes, in as few files as bounded memory allows; not thread-safe.

    `add` what comes, then `finish`; `discard` where the task fails.
    """

    def __init__(
        self,
        store: Store,
        *,
        query: str,
        batch: int,
        clock: Clock,
        attempt: int = 0,
        file_bytes: int = limits.STAGED_FILE_BYTES,
        section_rows: int = limits.STAGED_SECTION_ROWS,
        section_bytes: int = limits.STAGED_SECTION_BYTES,
    ) -> None:
        self._store = store
        self._prefix = f"{folder(query, batch)}/" + (f"{attempt}-" if attempt else "")
        self._clock = clock
        self._file_bytes = file_bytes
        self._section_rows = section_rows
        self._section_bytes = section_bytes
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._waiting_bytes = 0
        self._file = _File(self._new_path())
        self._sections: list[Section] = []
        self._put: list[str] = []

    def add(self, topic: str, partition: int, payload: pa.RecordBatch) -> None:
        """Takes rows of one partition, of `PAYLOAD_SCHEMA`'s exact types; the order is kept.

        Raises what `claim` does, where memory is full and a file is put.
        """
        key = topic, partition
        for piece in self._cut(payload):
            waiting = self._waiting.get(key)
            if waiting is not None and not self._fits(waiting, piece):
                self._close_section(key)
                waiting = None
            if waiting is None:
                waiting = self._waiting[key] = _Waiting()
            waiting.add(piece)
            self._waiting_bytes += piece.nbytes
        if self._waiting_bytes + self._file.size >= self._file_bytes:
            self._close_file()

    def _fits(self, waiting: _Waiting, piece: pa.RecordBatch) -> bool:
        return (
            waiting.rows + piece.num_rows <= self._section_rows
            and waiting.bytes + piece.nbytes <= self._section_bytes
            and waiting.pieces[0].schema.names == piece.schema.names
        )

    def _cut(self, payload: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The payload in pieces, none larger than a section, unless it is one row that is."""
        at = 0
        while at < payload.num_rows:
            piece = payload.slice(at, self._section_rows)
            while piece.num_rows > 1 and piece.nbytes > self._section_bytes:
                piece = piece.slice(0, piece.num_rows // 2)
            yield piece
            at += piece.num_rows

    def _close_section(self, key: tuple[str, int]) -> None:
        waiting = self._waiting.pop(key)
        self._waiting_bytes -= waiting.bytes
        batch = pa.concat_batches(waiting.pieces)
        payload = wal.encode_payload(batch)
        low, high = _timestamps_us(batch)
        self._sections.append(
            Section(
                topic=key[0],
                partition=key[1],
                rows=batch.num_rows,
                path=self._file.path,
                start=self._file.size,
                length=payload.length,
                crc32c=payload.crc32c,
                min_timestamp_us=low,
                max_timestamp_us=high,
                keyless=count_keyless(batch),
            )
        )
        self._file.add(payload)

    def _close_file(self) -> None:
        for key in list(self._waiting):
            self._close_section(key)
        if self._file.size:
            # Remembered first: a put that fails may yet land, and is then to be discarded.
            self._put.append(self._file.path)
            claim(self._store, self._file.path, self._file.pieces, clock=self._clock)
            self._file = _File(self._new_path())

    def _new_path(self) -> str:
        return f"{self._prefix}{secrets.token_hex(16)}.arrow"

    def finish(self) -> list[Section]:
        """What was staged, durably. Raises what `claim` does."""
        self._close_file()
        return self._sections

    def discard(self) -> None:
        """Removes what was staged so far."""
        self._store.delete(self._put)


class _Waiting:
    """Rows of one partition that are no section yet."""

    def __init__(self) -> None:
        self.pieces: list[pa.RecordBatch] = []
        self.rows = 0
        self.bytes = 0

    def add(self, piece: pa.RecordBatch) -> None:
        self.pieces.append(piece)
        self.rows += piece.num_rows
        self.bytes += piece.nbytes


class _File:
    """A file to be put."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pieces: list[Any] = []
        self.size = 0

    def add(self, payload: wal.Payload) -> None:
        self.pieces.extend(payload.pieces)
        self.size += payload.length


def _timestamps_us(payload: pa.RecordBatch) -> tuple[int | None, int | None]:
    """Least and greatest timestamp of the rows that have one."""
    index = payload.schema.get_field_index("timestamp")
    if index < 0:
        return None, None
    bounds = pc.min_max(payload.column(index).view(pa.int64()))
    return bounds["min"].as_py(), bounds["max"].as_py()
