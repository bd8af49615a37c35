"""The store that is a bucket: S3, Google Cloud Storage or Azure, through obstore.

Rules of this room:

- `put_new` is one request, never more: a repetition inside the client could not tell its own first
  try from somebody else's object, nor a refusal from one that came too late. `claim` repeats.
- All else may be repeated, and is, by the client.
- No error names a credential: of a message only the first line is kept, and no query of a URL.
- Durable is what a store has answered for, so there is nothing to settle.

S3 may answer 409 to a conditional put while nothing stands at its path
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html). The client shows
that as "exists", like Azure's 409, which means it; hence the wording of `ObjectExists`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import obstore
import pyarrow as pa
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from sparklog import errors, limits
from sparklog.storage.objects.base import (
    ObjectExists,
    ObjectMissing,
    Payload,
    PutUnresolved,
    Stat,
    checked_folder,
    checked_path,
    open_by_ranges,
    pieces,
)

_CLIENT_OPTIONS: Final = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
}
"""Options of obstore's HTTP client; it panics where they come among those of the store."""

_DENIED: Final = re.compile(r"status code: (401|403|404)")
"""How a refused listing or batch reads, for which obstore has no exception; 404: no such bucket."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_DELETES_PER_REQUEST: Final = 1_000


class RemoteStore:
    """The objects of a bucket under a prefix.

    `options` are obstore's configuration keys, in any case, such as `aws_endpoint`, and those of
    its HTTP client, such as `allow_http`; what they leave open comes from the usual environment.
    """

    is_local = False

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        self.uri = uri
        config, client = _split(options or {})
        patience: Any = {
            "max_retries": limits.REMOTE_RETRIES,
            "retry_timeout": timedelta(seconds=limits.REMOTE_RETRY_SECONDS),
        }
        try:
            self._store = from_url(uri, config=config, client_options=client, retry_config=patience)
            self._once = from_url(
                uri, config=config, client_options=client, retry_config={"max_retries": 0}
            )
        except (BaseError, ValueError) as error:
            raise errors.BadOption(option="root", value=uri, reason=_reason(error)) from None

    # -------------------------------------------------------------------------- writing

    def put_new(self, path: str, data: Payload) -> None:
        with self._writing(path):
            # The client takes the pieces as they are, and joins nothing either.
            obstore.put(self._once, checked_path(path), pieces(data) or b"", mode="create")

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        del durable  # a bucket knows no other
        with self._writing(path):
            content = pieces(data) or b""
            obstore.put(self._store, checked_path(path), content, use_multipart=False)

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise ObjectExists(path) from None
        except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError) as error:
            raise errors.RootNotWritable(root=self.uri, reason=_reason(error)) from None
        except NotSupportedError as error:
            reason = f"it cannot put if absent ({_reason(error)})"
            raise errors.RootNotWritable(root=self.uri, reason=reason) from None
        except BaseError as error:
            raise PutUnresolved(path, _reason(error)) from None

    # -------------------------------------------------------------------------- reading

    def get(self, path: str) -> pa.Buffer:
        with self._asking("get", path):
            return pa.py_buffer(obstore.get(self._store, checked_path(path)).bytes())

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        if length > 0:
            try:
                return self._get_range(path, start, length)
            except errors.StorageUnavailable:
                # A range that begins at the end is refused, as any other failure would be.
                if start < self.stat(path).size_bytes:
                    raise
        else:
            self.stat(path)
        return pa.py_buffer(b"")

    def _get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        with self._asking("get", path):
            found = obstore.get_range(self._store, checked_path(path), start=start, length=length)
            return pa.py_buffer(found)

    def open(self, path: str) -> pa.NativeFile:
        return open_by_ranges(self, path)

    def stat(self, path: str) -> Stat:
        with self._asking("stat", path):
            return _stat(path, obstore.head(self._store, checked_path(path)))

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        checked_folder(folder)
        within = f"{folder}/" if folder else ""
        with self._asking("list", folder):
            found: Iterable[Any]
            if after:
                # Only this request can begin in the middle; it also lists what lies deeper.
                found = obstore.list(self._store, folder or None, offset=within + after).collect()
            else:
                found = obstore.list_with_delimiter(self._store, folder or None)["objects"]
        listed = [_stat(meta["path"].removeprefix(within), meta) for meta in found]
        return sorted(
            (entry for entry in listed if "/" not in entry.name and entry.name > after),
            key=lambda entry: entry.name,
        )

    def folders(self, folder: str) -> list[str]:
        checked_folder(folder)
        with self._asking("list", folder):
            found = obstore.list_with_delimiter(self._store, folder or None)["common_prefixes"]
        return sorted(prefix.rpartition("/")[2] for prefix in found)

    def walk(self, folder: str) -> Iterator[Stat]:
        checked_folder(folder)
        within = f"{folder}/" if folder else ""
        with self._asking("list", folder):
            for chunk in obstore.list(self._store, folder or None, chunk_size=1_000):
                for meta in chunk:
                    yield _stat(meta["path"].removeprefix(within), meta)

    @contextlib.contextmanager
    def _asking(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise ObjectMissing(path) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise errors.RootNotWritable(root=self.uri, reason=_reason(error)) from None
        except BaseError as error:
            reason = _reason(error)
            if _DENIED.search(reason):
                raise errors.RootNotWritable(root=self.uri, reason=reason) from None
            raise errors.StorageUnavailable(operation=operation, path=path, reason=reason) from None

    # -------------------------------------------------------------------------- keeping

    def delete(self, paths: Iterable[str]) -> None:
        doomed = [checked_path(path) for path in paths]
        for first in range(0, len(doomed), _DELETES_PER_REQUEST):
            some = doomed[first : first + _DELETES_PER_REQUEST]
            try:
                self._delete(some)
            except ObjectMissing:
                # Some stores stop at the first that is missing.
                for path in some:
                    with contextlib.suppress(ObjectMissing):
                        self._delete([path])

    def _delete(self, paths: list[str]) -> None:
        with self._asking("delete", paths[0]):
            obstore.delete(self._store, paths)

    def settle(self, folder: str) -> None:
        checked_folder(folder)

    def harden(self, paths: Iterable[str]) -> None:
        for path in paths:
            checked_path(path)

    def remove_folder(self, folder: str) -> None:
        checked_path(folder)  # there are no folders but in the names of objects

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        del older_than_us  # a put that was cut short leaves nothing that could be seen
        checked_folder(folder)
        return 0

    def free_bytes(self) -> int | None:
        return None


def _split(options: Mapping[str, str]) -> tuple[Any, Any]:
    """Options of the store, and of its HTTP client, which need no prefix but may bear one."""
    config, client = {}, {}
    for option, value in options.items():
        name = option.lower()
        bare = re.sub("^(aws|azure|google)_", "", name)
        if bare in _CLIENT_OPTIONS:
            client[bare] = value
        else:
            config[name] = value
    return config, client


def _reason(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return re.sub(r"\?\S*", "?…", first)


def _stat(name: str, meta: Any) -> Stat:
    modified_us = (meta["last_modified"] - _EPOCH) // _MICROSECOND
    return Stat(name=name, size_bytes=meta["size"], modified_us=modified_us)
