"""Identity of a root: `cluster.json`, which is created once; only its format version rises.

The format version keeps out releases that cannot read the root. 2: a broker's log may be in
segments. 3: the metadata is stored as deltas and snapshots (`storage/metadata/format.py`). 4: the
root may have feature level 2, whose first version says so in a way that older releases reject. 5:
and 6: the same for levels 3 and 4.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.objects import ObjectMissing, Store, claim

_PATH: Final = "cluster.json"
_FORMAT_OF_LEVEL: Final = {1: 3, 2: 4, 3: 5, 4: 6}
"""The format version of a root by its feature level: older releases can return to level 1."""
_OWN_FOLDERS: Final = ("meta", "heartbeats", "wal", "topics", "staging", "security")
_IGNORED: Final = ("doctor", "lost+found", "desktop.ini", "Thumbs.db")
_NAMES_SHOWN: Final = 3
_PAGE: Final = 1_000
_LOST: Final = (
    f"These belong to a log that has lost its {_PATH}: restore that file from a backup. Without"
    " one, `sparklog broker --allow-non-empty` continues the log under a new cluster id"
)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `cluster.json`."""

    cluster_id: Annotated[str, msgspec.Meta(min_length=1)]
    format_version: Annotated[int, msgspec.Meta(ge=1)]


def open_cluster(
    store: Store,
    *,
    clock: Clock,
    create: bool,
    allow_non_empty: bool = False,
    on_created: Callable[[], object] = lambda: None,
) -> Cluster:
    """Checks the root's format; with `create`, turns an empty folder into a root.

    With `allow_non_empty`, also a folder with other programs' files. Calls `on_created` if this
    call created the root and no other program was faster. Raises `NotARoot`, `RootNotEmpty`,
    `FormatTooNew`, `RootNotWritable`, `CorruptObject`.
    """
    if create and not _exists(store):
        if not allow_non_empty:
            check_empty(store)
        created = Cluster(
            cluster_id=secrets.token_urlsafe(16), format_version=_FORMAT_OF_LEVEL[limits.LEVEL]
        )
        if claim(store, _PATH, msgspec.json.encode(created), clock=clock):
            on_created()
    return read_cluster(store)


def read_cluster(store: Store) -> Cluster:
    """Returns the identity of an existing root.

    Raises `NotARoot`, `FormatTooNew`, `CorruptObject`.
    """
    try:
        data = store.get(_PATH)
    except ObjectMissing:
        raise errors.NotARoot(root=store.uri, reason=f"it has no {_PATH}") from None
    cluster = _decode(store, data)
    if cluster.format_version > limits.FORMAT_VERSION:
        raise errors.FormatTooNew(
            root=store.uri, found=cluster.format_version, known=limits.FORMAT_VERSION
        )
    return cluster


def raise_format(store: Store, level: int, *, clock: Clock) -> Cluster:
    """Makes releases that do not support a feature level refuse the root from now on.

    Durable when this returns, so call it before writing anything that they cannot read. Of two
    concurrent calls the lower version may remain; the metadata keeps those releases out too. Raises
    what `open_cluster` raises.
    """
    cluster = open_cluster(store, clock=clock, create=False)
    wanted = _FORMAT_OF_LEVEL[level]
    if cluster.format_version < wanted:
        cluster = msgspec.structs.replace(cluster, format_version=wanted)
        store.put(_PATH, msgspec.json.encode(cluster))
    return cluster


def level_of_new(cluster: Cluster) -> int:
    """Returns the feature level of a root without metadata: the highest that its format allows."""
    return max(
        level
        for level, version in _FORMAT_OF_LEVEL.items()
        if level <= limits.LEVEL and version <= cluster.format_version
    )


def check_empty(store: Store) -> None:
    """Raises `RootNotEmpty` if a folder that is not a root contains files of other programs."""
    found = _foreign_names(store)
    # Another process may have created the root by now.
    if not found or _exists(store):
        return
    shown = ", ".join(found[:_NAMES_SHOWN])
    more = len(found) - _NAMES_SHOWN
    raise errors.RootNotEmpty(
        root=store.uri,
        found=f"{shown} and {more} more" if more > 0 else shown,
        **({"advice": _LOST} if {"meta", "wal"} & set(found) else {}),
    )


def _exists(store: Store) -> bool:
    try:
        store.get(_PATH)
    except ObjectMissing:
        return False
    return True


_decoder = msgspec.json.Decoder(Cluster)


def _decode(store: Store, data: pa.Buffer) -> Cluster:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        check = (
            f"it does not describe a sparklog root ({error}); if another program made it, use"
            " another folder as root"
        )
        raise errors.CorruptObject(path=f"{store.uri}/{_PATH}", check=check) from error


def _foreign_names(store: Store) -> list[str]:
    """Returns the names in a folder that prevent it from becoming a root.

    Ignores hidden files (including the temporary file of a killed first start), files that file
    systems and the doctor create, and empty folders of a root. Checks only the first page of a
    bucket, which may contain any number of objects.
    """
    if store.is_local:
        names = {stat.name for stat in store.list_after("")}
        for folder in store.folders(""):
            if folder not in _OWN_FOLDERS or not _is_empty(store, folder):
                names.add(folder)
    else:
        page = itertools.islice(store.walk(""), _PAGE)
        names = {stat.name.partition("/")[0] for stat in page if stat.size_bytes}
    return sorted(name for name in names if name not in _IGNORED and not _is_hidden(name))


def _is_empty(store: Store, folder: str) -> bool:
    return all(_is_hidden(stat.name.rpartition("/")[2]) for stat in store.walk(folder))


def _is_hidden(name: str) -> bool:
    return name.startswith(".")
