"""Port for files of a local root to which several processes append at the same time.

Objects are written whole, once. The files here grow: a write-ahead log's segment is one. They are
created, listed and deleted through the `Store` under the same paths (`put_new` makes a file durable
under its name before it shows it); this port opens existing ones.

Bytes of a file go through two states, and everything that uses the port relies on these promises:

- Bytes are *visible* when any process, through any descriptor, reads them. One append becomes
  visible as one run of bytes at the end of the file as it was, whatever other processes append at
  the same time: appends never overlap, and never overwrite. While it runs, a reader may see any
  part of it. A process that is killed in an append leaves any prefix of it, nothing included.
- Bytes are *durable* when they survive a power cut. Visible bytes become durable with the next sync
  of the file, by any process and through any descriptor. After a power cut the file ends anywhere
  between its durable and its visible size, at any byte. Each page of it that was not durable has
  its bytes, zeros, or old bytes of another file, whether or not pages before it were kept.
- After a sync that failed, nothing that was visible and not durable can become durable: the kernel
  may count the lost pages as written, show them until they leave its cache, and let later syncs
  succeed (https://www.usenix.org/conference/atc20/presentation/rebello).
- A file that was deleted remains usable through its open descriptors.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from sparklog.storage.objects.base import Store

BLOCK_BYTES: Final = 4_096
"""The unit of direct writes, which is also the size of a page in the page cache."""


class Access(enum.Enum):
    """Uses of an open file."""

    READ = enum.auto()
    """`read`, `sync` and `drop_cached` only."""
    FENCE = enum.auto()
    """Also `append`, which makes its bytes visible, and not durable."""
    WRITE = enum.auto()
    """Also `append`, which makes its bytes durable, and `append_part`."""


class FileId(NamedTuple):
    """The identity of a file, whatever its name."""

    device: int
    inode: int


class Appended(NamedTuple):
    """The effect of an append: `written_bytes` are visible, and the last of them ends at `end`.

    On a full disk fewer bytes may be written than were given; they are a prefix.
    """

    written_bytes: int
    end: int


class LogFile(Protocol):
    """One open file. Not thread-safe, except that reads may run alongside anything."""

    @property
    def identity(self) -> FileId: ...

    def size_bytes(self) -> int:
        """Returns the visible size; space that is only allocated does not count."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """Returns the visible bytes from `start`, at most `length`; fewer at the end of the file.

        Raises OSError.
        """
        ...

    def append(self, pieces: Sequence[memoryview]) -> Appended:
        """Appends the pieces as one run of bytes, in one call of the system.

        With `Access.WRITE`, the bytes are durable when this returns. If this raises OSError, and
        the size has not grown, nothing was written; if it has, the bytes are visible, and nothing
        is known about their durability, now or later.
        """
        ...

    def append_part(self, pieces: Sequence[memoryview]) -> Appended:
        """Appends a part of a large run past the page cache, where the file system allows it.

        For whole blocks at a multiple of `BLOCK_BYTES`, up to `limits.DIRECT_BUFFER_BYTES`. They
        are visible when this returns; `sync` makes them durable. Other processes may append between
        two parts, so the caller compares the positions. Raises OSError as `append` does.
        """
        ...

    def sync(self) -> bool:
        """Makes all bytes durable that were visible when this began, whichever process wrote them.

        Returns False if this process cannot sync the file, so that nothing is known. Raises
        `SyncFailed`.
        """
        ...

    def drop_cached(self, start: int = 0, length: int = 0) -> None:
        """Asks the system to read durable pages from the disk again; a length of 0: all to the end.

        Without it, pages that a failed sync has lost may still be visible. Not durable pages stay.
        """
        ...

    def allocate(self, end: int) -> None:
        """Reserves space up to the position `end`; the size remains, and so do all bytes.

        Does nothing on a file system that cannot. Raises OSError if there is no space.
        """
        ...

    def close(self) -> None:
        """Closes the file; the second time it does nothing."""
        ...


class LogFiles(Protocol):
    """The files of one root. Thread-safe."""

    def open(self, path: str, access: Access) -> LogFile:
        """Opens an existing file. Raises `ObjectMissing`, `RootNotWritable`, OSError."""
        ...

    def identity(self, path: str) -> FileId | None:
        """Returns the identity of the file or folder of this name; None if there is none.

        The empty path is the root.
        """
        ...

    def is_shared(self, path: str) -> bool:
        """Returns whether the file has other names too, as in a copy by hard links."""
        ...


@runtime_checkable
class _HasFiles(Protocol):
    files: LogFiles | None


def files_of(store: Store) -> LogFiles | None:
    """Returns the files of a root; None if its store has none that can be appended to."""
    return store.files if isinstance(store, _HasFiles) else None
