"""Object store in a bucket: S3, Google Cloud Storage or Azure, through obstore.

- `put_new` is exactly one request. If the client retried it, it could not tell its own first
  attempt from another writer's object. `claim` retries it instead.
- The client may retry all other requests, and does.
- No error contains credentials: only the first line of a message is kept, without URL queries or
  the values of secret options.
- An object is durable once the store has answered its put, so `sync_folder` has nothing to do.

S3 may answer a conditional put with 409 although no object exists at its path
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html). The client reports
that as "exists", like Azure's 409, which does mean that. `ObjectExists` covers both.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from sparklog.storage.objects.parallel import in_parallel
from sparklog.storage.objects.usage import CountingStore

REMOTE_RETRIES = 10
_REMOTE_RETRY_SECONDS = 10.0

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
"""Options of obstore's HTTP client; it panics if they are passed as store options."""

_SECRET: Final = re.compile(r"secret|password|token|[a-z]_key(?!_enabled)|account$|proxy_url")
"""Options whose values errors never show: `google_service_account` may hold a key, not a path."""
_SECRET_LENGTH: Final = 8
"""Shorter values come from test servers, and often occur in an error, as in its host name."""
_KEY_ID: Final = re.compile(r"(<AWSAccessKeyId>)[^<]*")
"""Part of S3's answer to a wrong signature, even if the key comes from the environment."""

_PROVIDER: Final = "credential_provider"
_FROM_PROVIDER: Final = " credential provider: "
"""Part of a credential provider's errors, which may be temporary; rejections do not contain it."""
_DENIED: Final = re.compile(r"status code: (401|403|404)")
"""Errors for a rejected listing or batch; obstore has no exception for it. 404: no such bucket."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_DELETES_PER_REQUEST: Final = 1_000
_PAGE: Final = 1_000
"""Entries of a listing that a bucket returns for one request."""


class RemoteStore(CountingStore):
    """The objects of a bucket under a prefix. Counts requests without the client's retries.

    `options` are obstore's configuration keys (case-insensitive), such as `aws_endpoint`, and those
    of its HTTP client, such as `allow_http`. The usual environment variables supply the others.
    `credential_provider` names a class or function, as `package.module:name`, that is called
    without arguments and returns an obstore credential provider. The store calls the provider again
    before its credentials expire (https://developmentseed.org/obstore/latest/authentication/).

    Raises `BadOption`.
    """

    is_local = False
    requests_at_once = limits.STORE_REQUESTS_AT_ONCE

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.uri = uri
        config, client = _split(options or {})
        self._secrets = _secrets({**config, **client})
        provider = _provider(config.pop(_PROVIDER, None))
        retry_config: Any = {
            "max_retries": REMOTE_RETRIES,
            "retry_timeout": timedelta(seconds=_REMOTE_RETRY_SECONDS),
        }
        try:
            self._store = from_url(
                uri,
                config=config,
                client_options=client,
                retry_config=retry_config,
                credential_provider=provider,
            )
            self._store_without_retries = from_url(
                uri,
                config=config,
                client_options=client,
                retry_config={"max_retries": 0},
                credential_provider=provider,
            )
        except (BaseError, ValueError) as error:
            raise errors.BadOption(option="root", value=uri, reason=self._reason(error)) from None

    # -------------------------------------------------------------------------- writing

    def put_new(self, path: str, data: Payload) -> None:
        content = self._counted_content("put_new", data)
        with self._translated_put_errors(path):
            obstore.put(self._store_without_retries, checked_path(path), content, mode="create")

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        def put(item: tuple[str, Payload]) -> Exception | None:
            try:
                self.put_new(*item)
            except Exception as error:
                return error
            return None

        return in_parallel(self, put, objects)

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        del durable  # in a bucket, every put is durable
        content = self._counted_content("put", data)
        with self._translated_put_errors(path):
            obstore.put(self._store, checked_path(path), content, use_multipart=False)

    def _counted_content(self, operation: str, data: Payload) -> Any:
        """Counts a put, and returns its content; the client sends pieces without joining them."""
        views = pieces(data)
        self.requests[operation] += 1
        self.usage.written_bytes += sum(map(len, views))
        return views or b""

    @contextlib.contextmanager
    def _translated_put_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise ObjectExists(path) from None
        except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError) as error:
            reason = self._reason(error)
            if _FROM_PROVIDER in reason:
                raise PutUnresolved(path, reason) from None
            raise errors.RootNotWritable(root=self.uri, reason=reason) from None
        except NotSupportedError as error:
            reason = f"it does not support conditional puts ({self._reason(error)})"
            raise errors.RootNotWritable(root=self.uri, reason=reason) from None
        except BaseError as error:
            raise PutUnresolved(path, self._reason(error)) from None

    # -------------------------------------------------------------------------- reading

    def get(self, path: str) -> pa.Buffer:
        self.requests["get"] += 1
        with self._translated_errors("get", path):
            found = pa.py_buffer(obstore.get(self._store, checked_path(path)).bytes())
        self.usage.read_bytes += found.size
        return found

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        if length > 0:
            try:
                return self._get_range(path, start, length)
            except errors.StorageUnavailable:
                # A range that starts at the end raises the same error as any other failure.
                if start < self.stat(path).size_bytes:
                    raise
        else:
            self.stat(path)
        return pa.py_buffer(b"")

    def _get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        self.requests["get_range"] += 1
        with self._translated_errors("get", path):
            range_ = obstore.get_range(self._store, checked_path(path), start=start, length=length)
        found = pa.py_buffer(range_)
        self.usage.read_bytes += found.size
        return found

    def open(self, path: str) -> pa.NativeFile:
        return open_by_ranges(self, path)

    def stat(self, path: str) -> Stat:
        self.requests["stat"] += 1
        with self._translated_errors("stat", path):
            return _stat(path, obstore.head(self._store, checked_path(path)))

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        checked_folder(folder)
        within = f"{folder}/" if folder else ""
        found: Sequence[Any]
        if after:
            self.requests["list_after"] += 1
            with self._translated_errors("list", folder):
                # Only this request can start after a name; it also lists objects in subfolders.
                found = obstore.list(self._store, folder or None, offset=within + after).collect()
            self._count_pages("list_after", len(found))
        else:
            found = self._list_folder("list_after", folder)["objects"]
        listed = [_stat(meta["path"].removeprefix(within), meta) for meta in found]
        return sorted(
            (entry for entry in listed if "/" not in entry.name and entry.name > after),
            key=lambda entry: entry.name,
        )

    def folders(self, folder: str) -> list[str]:
        found = self._list_folder("folders", folder)["common_prefixes"]
        return sorted(prefix.rpartition("/")[2] for prefix in found)

    def _list_folder(self, operation: str, folder: str) -> Any:
        """Returns the objects and the subfolders that are directly in the folder."""
        self.requests[operation] += 1
        checked_folder(folder)
        with self._translated_errors("list", folder):
            found = obstore.list_with_delimiter(self._store, folder or None)
        self._count_pages(operation, len(found["objects"]) + len(found["common_prefixes"]))
        return found

    def _count_pages(self, operation: str, entries: int) -> None:
        """Counts the requests of a listing after the first: one for each further page."""
        self.requests[operation] += max(entries - 1, 0) // _PAGE

    def walk(self, folder: str) -> Iterator[Stat]:
        checked_folder(folder)
        within = f"{folder}/" if folder else ""
        self.requests["walk"] += 1
        with self._translated_errors("list", folder):
            pages = obstore.list(self._store, folder or None, chunk_size=_PAGE)
            for number, page in enumerate(pages):
                self.requests["walk"] += number > 0
                for meta in page:
                    yield _stat(meta["path"].removeprefix(within), meta)

    @contextlib.contextmanager
    def _translated_errors(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise ObjectMissing(path) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            reason = self._reason(error)
            if _FROM_PROVIDER in reason:
                raise errors.StorageUnavailable(
                    operation=operation, path=path, reason=reason
                ) from None
            raise errors.RootNotWritable(root=self.uri, reason=reason) from None
        except BaseError as error:
            reason = self._reason(error)
            if _DENIED.search(reason):
                raise errors.RootNotWritable(root=self.uri, reason=reason) from None
            raise errors.StorageUnavailable(operation=operation, path=path, reason=reason) from None

    # -------------------------------------------------------------------------- maintenance

    def delete(self, paths: Iterable[str]) -> None:
        left = [checked_path(path) for path in paths]
        for first in range(0, len(left), _DELETES_PER_REQUEST):
            some = left[first : first + _DELETES_PER_REQUEST]
            try:
                self._delete(some)
            except ObjectMissing:
                # Some stores stop at the first missing object.
                for path in some:
                    with contextlib.suppress(ObjectMissing):
                        self._delete([path])

    def _delete(self, paths: list[str]) -> None:
        self.requests["delete"] += 1
        with self._translated_errors("delete", paths[0]):
            obstore.delete(self._store, paths)

    def sync_folder(self, folder: str) -> None:
        checked_folder(folder)

    def sync_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            checked_path(path)

    def remove_folder(self, folder: str) -> None:
        checked_path(folder)  # folders exist only in the names of objects

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        del older_than_us  # an interrupted put leaves nothing visible
        checked_folder(folder)
        return 0

    def free_bytes(self) -> int | None:
        return None

    def free_inodes(self) -> int | None:
        return None

    # -------------------------------------------------------------------------- errors

    def _reason(self, error: Exception) -> str:
        """Returns an error's message, on one line and without secrets."""
        return _reason(error, self._secrets)


def _split(options: Mapping[str, str]) -> tuple[Any, Any]:
    """Splits options into those of the store and, without prefix, those of its HTTP client."""
    config, client = {}, {}
    for option, value in options.items():
        name = option.lower()
        bare = re.sub("^(aws|azure|google)_", "", name)
        if bare in _CLIENT_OPTIONS:
            client[bare] = value
        else:
            config[name] = value
    return config, client


def _secrets(options: Mapping[str, str]) -> list[str]:
    """Returns the values that errors must not show."""
    return [
        value
        for name, value in options.items()
        if _SECRET.search(name) and len(value) >= _SECRET_LENGTH
    ]


def _provider(named: str | None) -> Any:
    """Creates a credential provider, given the name of its class or function; None if unnamed."""
    if named is None:
        return None
    module, _, name = named.partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except Exception as error:  # whatever the user's own code raises
        said = f"{type(error).__name__}: {_reason(error)}"  # may be a URL with a secret
        reason = f"expected package.module:name of an obstore credential provider: {said}"
        raise errors.BadOption(option=f"storage.{_PROVIDER}", value=named, reason=reason) from None


def _reason(error: Exception, secrets: Iterable[str] = ()) -> str:
    whole = str(error)
    for secret in secrets:
        whole = whole.replace(secret, "…")
    first = whole.partition("\n")[0]
    return _KEY_ID.sub(r"\1…", re.sub(r"\?\S*", "?…", first))


def _stat(name: str, meta: Any) -> Stat:
    modified_us = (meta["last_modified"] - _EPOCH) // _MICROSECOND
    return Stat(name=name, size_bytes=meta["size"], modified_us=modified_us)
