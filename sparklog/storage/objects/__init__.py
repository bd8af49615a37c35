"""Object stores of a root: a folder, a bucket, or memory. `base` defines their common contract.

Only `open_store` maps URIs to stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from sparklog import errors
from sparklog.storage.objects.base import (
    ObjectExists,
    ObjectMissing,
    Payload,
    Piece,
    PutAllNew,
    PutUnresolved,
    Stat,
    Store,
    SyncFailed,
    backoff_seconds,
    claim,
    claim_all,
    put_together,
    shortage,
)
from sparklog.storage.objects.faults import DelayFaults, Fault, Faults, NoFaults, ScriptedFaults
from sparklog.storage.objects.local import LocalStore
from sparklog.storage.objects.memory import DelayedStore, MemoryStore, named_store
from sparklog.storage.objects.parallel import in_parallel
from sparklog.storage.objects.usage import (
    CountingStore,
    CountsRequests,
    Purpose,
    Usage,
    counted,
    total,
    usages,
)

__all__ = [
    "CountingStore",
    "CountsRequests",
    "DelayFaults",
    "DelayedStore",
    "Fault",
    "Faults",
    "LocalStore",
    "MemoryStore",
    "NoFaults",
    "ObjectExists",
    "ObjectMissing",
    "Payload",
    "Piece",
    "Purpose",
    "PutAllNew",
    "PutUnresolved",
    "ScriptedFaults",
    "Stat",
    "Store",
    "SyncFailed",
    "Usage",
    "backoff_seconds",
    "claim",
    "claim_all",
    "counted",
    "in_parallel",
    "open_store",
    "put_together",
    "shortage",
    "total",
    "usages",
]


def open_store(uri: str, options: Mapping[str, str] | None = None) -> Store:
    """Returns the store of a root without making a request to it; creates nothing.

    `uri` is a folder's path, `file:///…`, `s3://bucket/…` (or `s3a`), `gs://bucket/…`,
    `az://container/…`, or `memory://name`, which all threads of a process share. `options` are for
    buckets: credentials and endpoints, under obstore's names. Raises `BadOption`.
    """
    if "://" not in uri and not uri.startswith("file:"):
        return LocalStore(_without(options, uri))
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(_without(options, unquote(parts.path)))
    if parts.scheme == "memory":
        return named_store(_without(options, (parts.netloc + parts.path).strip("/")))
    if parts.scheme in ("s3", "s3a", "gs", "az"):
        from sparklog.storage.objects.remote import RemoteStore

        return RemoteStore(_bucket_uri(parts), options)
    raise errors.BadOption(
        option="root",
        value=parts.scheme + "://…",
        reason="a root is a folder, or begins with file:///, s3://, gs://, az:// or memory://",
    )


def _without(options: Mapping[str, str] | None, location: str) -> str:
    if not location:
        raise errors.BadOption(option="root", value=location, reason="it names no folder")
    if options:
        raise errors.BadOption(
            option="storage_options",
            value=sorted(options),
            reason=f"the root {location} is not a bucket, and only buckets have options: omit them",
        )
    return location


def _bucket_uri(parts: SplitResult) -> str:
    """Returns the canonical URI. Rejects credentials in it, which would appear in logs."""
    scheme = "s3" if parts.scheme == "s3a" else parts.scheme
    prefix = [part for part in parts.path.split("/") if part]
    plain = "/".join([f"{scheme}://{parts.hostname}", *prefix])
    if not parts.hostname:
        raise errors.BadOption(option="root", value=f"{scheme}://", reason="it names no bucket")
    has_key = ":" in parts.netloc or "@" in parts.netloc  # a key with a / runs into the path
    if has_key or parts.query or parts.fragment or ".." in prefix:
        raise errors.BadOption(
            option="root",
            value=f"{scheme}://…" if has_key else plain,
            reason="a root consists of scheme, bucket and folders only",
        )
    return plain
