"""The staged batch of a Spark query: the files of its tasks, and the manifest that commits them.

Rules:

- Tasks put files under `staging/<query>/<batch>/` with random names. A task that runs twice stages
  twice; a file that the manifest does not name does not count.
- The manifest in the same folder is put only if absent, and names the files that count. It is the
  decision: any process that finds it completes the batch, and ignores other files. A manifest that
  *refuses* the batch, put by a sweeper, prevents a late driver from deciding otherwise.
- A refusal ends one *attempt* at the batch, along with the files staged for it. A task that starts
  later stages for the next attempt, whose files and manifest have its number in their names. So a
  query can resume after any pause, and only the abandoned driver is refused. Attempts are refused
  in order, and refusals are removed starting with the last: the first attempt without one is open.
- A section is an Arrow IPC stream of exactly one record batch, a payload of one partition. It is
  read by its byte range alone, like an entry of the write-ahead log, and becomes one.
- If several brokers lead the partitions, the driver puts a *receipt* next to the manifest once all
  of them have appended their sections. Both are kept until a later batch of the query is staged,
  even after the files are removed, so that a rerun finds nothing left to do.
- A manifest names the ids of its topics. A topic that was deleted and recreated is a different one:
  rows staged for the first are not written to the second. An attempt whose topics are all gone is
  *void*, and ends like a refused one: a rerun stages for the topics that exist.
- A batch that keeps the offsets of its rows records which offsets each section covers. A section
  without rows or bytes covers offsets that have no rows.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from sparklog import arrow, errors, limits
from sparklog.clock import Clock
from sparklog.formats.record import OFFSET, count_keyless
from sparklog.storage import wal
from sparklog.storage.metadata.model import TopicMetadata
from sparklog.storage.objects import ObjectMissing, Store, claim
from sparklog.storage.snapshot import BatchId, BatchKind, StagedRef

STAGED_SECTION_ROWS = 131_072
_STAGED_SECTION_BYTES = 32 * limits.MIB
_STAGED_FILE_BYTES = 64 * limits.MIB

NAME: Final = "manifest.json"
"""The file name of the first attempt's manifest; `name` returns that of any attempt."""
FOLDER: Final = "staging"
_QUERY = re.compile(r"(?!\.)[a-zA-Z0-9._@-]{1,250}")
_MANIFEST = re.compile(r"manifest(?:-([1-9]\d*))?\.json")
_RECEIPT = re.compile(r"appended(?:-([1-9]\d*))?\.json")
_MANIFEST_PATH = re.compile(rf"{FOLDER}/([^/]+)/(0|[1-9]\d*)/{_MANIFEST.pattern}")
_STAGED = re.compile(r"([1-9]\d*)-[0-9a-f]{32}\.arrow")

_Natural = Annotated[int, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The byte range of rows of one partition. Timestamps are those of rows that have one."""

    topic: str
    partition: _Natural
    rows: Annotated[int, Meta(ge=0, le=STAGED_SECTION_ROWS)]
    path: str = ""
    start: _Natural = 0
    length: _Natural = 0
    crc32c: _Natural = 0
    min_timestamp_us: int | None = None
    max_timestamp_us: int | None = None
    keyless: _Natural = 0
    """The number of rows without a key."""
    offsets: tuple[_Natural, _Natural] | None = None
    """The offsets that the section covers, first and end, if it keeps its rows' offsets."""

    @property
    def count(self) -> int:
        """The number of offsets that it takes up."""
        return self.rows if self.offsets is None else self.offsets[1] - self.offsets[0]

    def ref(self) -> StagedRef | None:
        """Returns the place of its rows, if it has any."""
        if not self.rows:
            return None
        return StagedRef(self.path, self.start, self.length, self.crc32c)

    def check(self) -> None:
        """Raises `BadRequest` if its rows, bytes and offsets are inconsistent."""
        reason = ""
        if bool(self.rows) != bool(self.length) or bool(self.rows) != bool(self.path):
            reason = "has rows without bytes, or bytes without rows"
        elif self.offsets is None and not self.rows:
            reason = "has neither rows nor offsets"
        elif self.offsets is not None and not max(self.rows, 1) <= self.count:
            reason = f"has {self.rows} rows for offsets {self.offsets[0]} to {self.offsets[1]}"
        elif self.offsets is not None and self.offsets[1] > limits.OFFSET_MAX:
            reason = f"ends at {self.offsets[1]}, but the highest offset is {limits.OFFSET_MAX - 1}"
        if reason:
            raise errors.BadRequest(
                reason=f"a section of {self.topic}-{self.partition} {reason}: {self}"
            )


class Destination(NamedTuple):
    """A topic that rows are staged for."""

    topic_id: str
    partitions: int


Destinations = Mapping[str, Destination]
"""By topic name."""


def destinations(topics: Mapping[str, TopicMetadata]) -> Destinations:
    """Returns topics of the metadata as destinations."""
    return {name: Destination(each.topic_id, each.partition_count) for name, each in topics.items()}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The sections of batch `batch` of `query`; `refused`: this attempt at it is abandoned."""

    query: str
    batch: _Natural
    sections: tuple[Section, ...] = ()
    refused: bool = False
    kind: BatchKind = BatchKind.NUMBERED
    attempt: _Natural = 0
    topic_ids: dict[str, str] = {}
    """By topic name; empty if an older release put the manifest and there is no receipt."""
    run: str = ""
    """The query's run that decided it (`query_run`); empty if unknown."""

    @property
    def path(self) -> str:
        return f"{folder(self.query, self.batch)}/{name(self.attempt)}"

    @property
    def batch_id(self) -> BatchId:
        return BatchId(self.query, self.batch)

    def topics_gone(self, topics: Destinations) -> set[str]:
        """Returns the names of the topics that it was staged for but that are not among `topics`.

        If it lacks a topic's id, a missing partition shows that a topic is gone: topics never lose
        partitions.
        """
        return {
            each.topic for each in self.sections if not self._is_for(topics.get(each.topic), each)
        }

    def _is_for(self, known: Destination | None, section: Section) -> bool:
        if known is None:
            return False
        topic_id = self.topic_ids.get(section.topic)
        if topic_id is None:
            return section.partition < known.partitions
        return topic_id == known.topic_id

    def is_void(self, topics: Destinations) -> bool:
        """Returns whether it was staged for none of `topics`, the existing ones."""
        gone = self.topics_gone(topics)
        return bool(gone) and all(each.topic in gone for each in self.sections)

    def check_files(self, store: Store, sections: Iterable[Section]) -> None:
        """Checks with one listing that the file of each of `sections` exists and is long enough.

        Raises `MissingObject` and `CorruptObject`, which name the file.
        """
        within = folder(self.query, self.batch)
        sizes = {f"{within}/{stat.name}": stat.size_bytes for stat in store.list_after(within)}
        for section in sections:
            if not section.rows:
                continue
            size = sizes.get(section.path)
            if size is None:
                raise errors.MissingObject(path=section.path, reason=f"{self.path} names it")
            if section.start + section.length > size:
                raise errors.CorruptObject(
                    path=section.path,
                    check=(
                        f"it is {size} bytes long, but {self.path} names bytes"
                        f" {section.start} to {section.start + section.length}"
                    ),
                )


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets of all sections of a batch that several leaders have appended."""

    ranges: dict[str, dict[int, tuple[int, int]]]
    """First offset and count, by topic and partition."""
    topic_ids: dict[str, str]

    def holders(self, topics: Destinations) -> set[str]:
        """Returns the topics that contain rows of the batch and are among the existing `topics`."""
        ids = {name: each.topic_id for name, each in topics.items()}
        return {name for name in self.ranges if ids.get(name, "") == self.topic_ids.get(name)}

    def put(self, store: Store, of: Manifest, clock: Clock) -> None:
        """Puts it alongside the manifest. Raises what `claim` raises."""
        path = f"{folder(of.query, of.batch)}/{receipt_name(of.attempt)}"
        claim(store, path, msgspec.json.encode(self), clock=clock)


_receipt_decoder = msgspec.json.Decoder(Receipt)
_manifest_decoder = msgspec.json.Decoder(Manifest)


def find_receipt(store: Store, of: Manifest) -> Receipt | None:
    """Returns the receipt of a batch, if there is one. Raises `CorruptObject`.

    Older releases put the receipt of any attempt under the name of the first attempt's.
    """
    for attempt in dict.fromkeys((of.attempt, 0)):
        path = f"{folder(of.query, of.batch)}/{receipt_name(attempt)}"
        try:
            found = _receipt_decoder.decode(store.get(path))
        except ObjectMissing:
            continue
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=path, check=str(error)) from error
        if attempt == of.attempt or of.topic_ids in ({}, found.topic_ids):
            return found
    return None


def folder(query: str, batch: int) -> str:
    """Returns the folder of a batch. Raises `BadRequest` if the query is not a valid name."""
    return f"{query_folder(query)}/{batch}"


def query_folder(query: str) -> str:
    """Returns the folder of a query. Raises `BadRequest` if it is not a valid name."""
    if not _QUERY.fullmatch(query):
        raise errors.BadRequest(
            reason=f"The query name {query!r} is invalid: use 1–250 of [a-zA-Z0-9._@-], and no"
            " '.' at the start."
        )
    return f"{FOLDER}/{query}"


# ------------------------------------------------------------------------------ attempts


def name(attempt: int) -> str:
    """Returns the name of an attempt's manifest in the folder of its batch."""
    return f"manifest-{attempt}.json" if attempt else NAME


def is_manifest(name: str) -> bool:
    """Returns whether the name, in the folder of a batch, is that of an attempt's manifest."""
    return _MANIFEST.fullmatch(name) is not None


def receipt_name(attempt: int) -> str:
    """Returns the name of the receipt of an attempt that all leaders have appended."""
    return f"appended-{attempt}.json" if attempt else "appended.json"


def is_receipt(name: str) -> bool:
    """Returns whether the name, in the folder of a batch, is that of a `Receipt`."""
    return _RECEIPT.fullmatch(name) is not None


def attempt_of(name: str) -> int:
    """Returns the attempt to which a manifest, receipt or staged file belongs, by name or path."""
    name = name.rpartition("/")[2]
    for pattern in (_MANIFEST, _STAGED, _RECEIPT):
        named = pattern.fullmatch(name)
        if named is not None:
            return int(named[1] or 0)
    return 0


def open_attempt(store: Store, query: str, batch: int, topics: Destinations) -> int:
    """Returns the first attempt at the batch that is neither refused nor void for `topics`.

    Raises what `load` raises.
    """
    within, attempt = folder(query, batch), 0
    while True:
        path = f"{within}/{name(attempt)}"
        try:
            store.stat(path)
        except ObjectMissing:
            return attempt
        found = load(store, path)
        if not found.refused and not found.is_void(topics):
            return attempt
        attempt += 1


# ------------------------------------------------------------------------------ the decision


def write(store: Store, manifest: Manifest, clock: Clock) -> Manifest:
    """Puts `manifest` if its batch has none; returns the batch's manifest, ours or an earlier one.

    Raises `BadRequest` if a sweeper has refused the batch, and what `claim` raises.
    """
    if claim(store, manifest.path, msgspec.json.encode(manifest), clock=clock):
        return manifest
    return read(store, manifest.path)


def refuse(store: Store, within: str, *, clock: Clock, attempt: int = 0) -> bool:
    """Refuses the attempt at the batch in the folder. Returns False if it has a manifest."""
    query, batch = within.split("/")[1:]
    refusal = Manifest(query=query, batch=int(batch), refused=True, attempt=attempt)
    return claim(store, refusal.path, msgspec.json.encode(refusal), clock=clock)


def read(store: Store, path: str) -> Manifest:
    """Reads a manifest for completion. Raises `BadRequest` if refused, malformed or missing."""
    found = load(store, path)
    if found.refused:
        raise errors.BadRequest(
            reason=f"Batch {found.batch} of query {found.query} was staged but not committed for"
            f" so long that it was abandoned ({path}), and its files were removed. Start the query"
            " again; it will stage the batch again."
        )
    return found


def batch_of(path: str) -> BatchId:
    """Returns the batch of a manifest's path. Raises `BadRequest` for any other path."""
    named = _MANIFEST_PATH.fullmatch(path)
    if named is None:
        raise errors.BadRequest(reason=f"{path!r} is not the path of a manifest")
    return BatchId(named[1], int(named[2]))


def load(store: Store, path: str) -> Manifest:
    """Reads the manifest at `path`. Raises `BadRequest` if it is malformed or missing."""
    batch_id = batch_of(path)
    within = folder(batch_id.query, batch_id.batch)
    try:
        found = _manifest_decoder.decode(store.get(path))
    except ObjectMissing:
        raise errors.BadRequest(reason=f"{path} does not exist") from None
    except msgspec.MsgspecError as error:
        raise errors.BadRequest(reason=f"{path} is not a manifest: {error}") from error
    if found.path != path:
        raise errors.BadRequest(reason=f"{path} says that it is {found.path}")
    for section in found.sections:
        section.check()
        if not section.rows:
            continue
        file = section.path.removeprefix(f"{within}/")
        if file == section.path or "/" in file:
            raise errors.BadRequest(reason=f"{path} names {section.path}, outside its folder")
        if attempt_of(file) != found.attempt:
            raise errors.BadRequest(reason=f"{path} names {section.path}, of another attempt")
    if found.topic_ids or found.refused:
        return found
    receipt = find_receipt(store, found)
    return found if receipt is None else msgspec.structs.replace(found, topic_ids=receipt.topic_ids)


# ------------------------------------------------------------------------------ staging


class StagingWriter:
    """Stages the rows of one task in as few files as bounded memory allows; not thread-safe.

    Call `add` for each batch, and `finish` at the end; call `discard` if the task fails.
    """

    def __init__(
        self,
        store: Store,
        *,
        query: str,
        batch: int,
        clock: Clock,
        attempt: int = 0,
        file_bytes: int = _STAGED_FILE_BYTES,
        section_rows: int = STAGED_SECTION_ROWS,
        section_bytes: int = _STAGED_SECTION_BYTES,
    ) -> None:
        self._store = store
        self._prefix = f"{folder(query, batch)}/" + (f"{attempt}-" if attempt else "")
        self._clock = clock
        self._file_bytes = file_bytes
        self._section_rows = section_rows
        self._section_bytes = section_bytes
        self._open_sections: dict[tuple[str, int], _OpenSection] = {}
        self._open_bytes = 0
        self._file = _File(self._new_path())
        self._sections: list[Section] = []
        self._put: list[str] = []

    def add(self, topic: str, partition: int, payload: pa.RecordBatch) -> None:
        """Adds rows of one partition, in order, with exactly the types of `PAYLOAD_SCHEMA`.

        Their offsets are kept if they have a column `OFFSET`, which must be increasing. Puts a file
        when the memory bound is reached, and then raises what `claim` raises.
        """
        key = topic, partition
        for piece in self._cut(payload):
            section = self._open_sections.get(key)
            if section is not None and not self._fits(section, piece):
                self._close_section(key)
                section = None
            if section is None:
                section = self._open_sections[key] = _OpenSection()
            section.add(piece)
            self._open_bytes += piece.nbytes
        if self._open_bytes + self._file.size >= self._file_bytes:
            self._close_file()

    def _fits(self, section: _OpenSection, piece: pa.RecordBatch) -> bool:
        return (
            section.rows + piece.num_rows <= self._section_rows
            and section.bytes + piece.nbytes <= self._section_bytes
            and section.pieces[0].schema.names == piece.schema.names
            and _continues(section.pieces[-1], piece)
        )

    def _cut(self, payload: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yields the payload in pieces no larger than a section, except for a larger single row."""
        at = 0
        while at < payload.num_rows:
            piece = payload.slice(at, self._section_rows)
            while piece.num_rows > 1 and piece.nbytes > self._section_bytes:
                piece = piece.slice(0, piece.num_rows // 2)
            yield piece
            at += piece.num_rows

    def _close_section(self, key: tuple[str, int]) -> None:
        section = self._open_sections.pop(key)
        self._open_bytes -= section.bytes
        batch = pa.concat_batches(section.pieces)
        offsets = _offsets(batch)
        if offsets is not None and offsets[1] - offsets[0] == batch.num_rows:
            batch = batch.drop_columns([OFFSET.name])  # without gaps it is like any other
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
                offsets=offsets,
            )
        )
        self._file.add(payload)

    def _close_file(self) -> None:
        for key in list(self._open_sections):
            self._close_section(key)
        if self._file.size:
            # Recorded first: a failed put may still take effect, and its file must be discarded.
            self._put.append(self._file.path)
            claim(self._store, self._file.path, self._file.pieces, clock=self._clock)
            self._file = _File(self._new_path())

    def _new_path(self) -> str:
        return f"{self._prefix}{secrets.token_hex(16)}.arrow"

    def finish(self) -> list[Section]:
        """Puts the last file, and returns all sections. Raises what `claim` raises."""
        self._close_file()
        return self._sections

    def discard(self) -> None:
        """Removes the files staged so far."""
        self._store.delete(self._put)


class _OpenSection:
    """Rows of one partition that are not yet a section."""

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


def _offsets(payload: pa.RecordBatch) -> tuple[int, int] | None:
    """Returns the first and the end offset of the rows, if they keep their offsets."""
    at = payload.schema.get_field_index(OFFSET.name)
    if at < 0:
        return None
    offsets = arrow.as_numpy(payload.column(at))
    return int(offsets[0]), int(offsets[-1]) + 1


def _continues(before: pa.RecordBatch, after: pa.RecordBatch) -> bool:
    """Returns whether offsets rise from one batch to the next, if they are kept."""
    ends, begins = _offsets(before), _offsets(after)
    return ends is None or begins is None or ends[1] <= begins[0]


def _timestamps_us(payload: pa.RecordBatch) -> tuple[int | None, int | None]:
    """Returns the minimum and maximum timestamp of the rows that have one."""
    index = payload.schema.get_field_index("timestamp")
    if index < 0:
        return None, None
    bounds = pc.min_max(payload.column(index).view(pa.int64()))
    return bounds["min"].as_py(), bounds["max"].as_py()
