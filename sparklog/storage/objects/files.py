"""Port for files of a local root that several processes append to concurrently.

Objects are written once, as a whole. The files here grow, such as a segment of the write-ahead log.
They are created, listed and deleted through the `Store` under the same paths (`put_new` makes the
bytes of a file durable before it becomes visible); this port opens existing ones.

A file's bytes go through two states, and everything that uses the port relies on these guarantees:

- Bytes are *visible* once any process can read them, through any descriptor. An append becomes
  visible as one run of bytes at the current end of the file, whatever other processes append
  concurrently: appends never overlap or overwrite. While it runs, a reader may see any part of it.
  A process killed during an append leaves some prefix of it, possibly nothing.
- Bytes are *durable* if they survive a power cut. Visible bytes become durable with the next sync
  of the file, by any process and through any descriptor. After a power cut the file may end at any
  byte between its durable and its visible size. Each of its pages that was not durable contains
  its bytes, zeros, or old bytes of another file, whether or not earlier pages survived.
- After a failed sync, bytes that were visible but not durable can never become durable: the kernel
  may mark the lost pages as clean, show them until they leave its cache, and let later syncs
  succeed (https://www.usenix.org/conference/atc20/presentation/rebello).
- A deleted file remains usable through its open descriptors.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from sparklog.storage.objects.base import Store

BLOCK_BYTES: Final = 4_096
"""The unit of direct writes, and the size of a page in the page cache."""


class Access(enum.Enum):
    """Access modes of an open file."""

    READ = enum.auto()
    """`read`, `sync` and `drop_cached` only."""
    FENCE = enum.auto()
    """Also `append`, which makes its bytes visible but not durable."""
    WRITE = enum.auto()
    """Also `append`, which makes its bytes durable, and `append_part`."""


class FileId(NamedTuple):
    """The identity of a file, independent of its name."""

    device: int
    inode: int


class Appended(NamedTuple):
    """The effect of an append: `written_bytes` are visible, and end at `end`.

    On a full disk only a prefix of the given bytes may be written.
    """

    written_bytes: int
    end: int


class LogFile(Protocol):
    """One open file. Not thread-safe, except that reads may run concurrently with anything."""

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
        """Appends the pieces as one run of bytes, in one system call.

        With `Access.WRITE`, the bytes are durable when this returns. If this raises OSError and the
        size has not grown, nothing was written; if it has grown, the bytes are visible, and whether
        they are or will be durable is unknown.
        """
        ...

    def append_part(self, pieces: Sequence[memoryview]) -> Appended:
        """Appends part of a large run, bypassing the page cache if the file system allows it.

        For whole blocks at a multiple of `BLOCK_BYTES`, up to `limits.DIRECT_BUFFER_BYTES`. They
        are visible when this returns; `sync` makes them durable. Other processes may append between
        two parts, so the caller must check the positions. Raises OSError as `append` does.
        """
        ...

    def sync(self) -> bool:
        """Makes all bytes durable that were visible when this began, whichever process wrote them.

        Returns False if this process cannot sync the file; durability is then unknown. Raises
        `SyncFailed`.
        """
        ...

    def drop_cached(self, start: int = 0, length: int = 0) -> None:
        """Asks the system to drop durable pages from its cache; a length of 0: all to the end.

        Otherwise pages that a failed sync has lost may remain visible. Non-durable pages stay.
        """
        ...

    def allocate(self, end: int) -> None:
        """Reserves space up to the position `end`, without changing the size or any byte.

        Does nothing on a file system that does not support this. Raises OSError if there is no
        space.
        """
        ...

    def close(self) -> None:
        """Closes the file; does nothing if it is already closed."""
        ...


class LogFiles(Protocol):
    """The files of one root. Thread-safe."""

    def open(self, path: str, access: Access) -> LogFile:
        """Opens an existing file. Raises `ObjectMissing`, `RootNotWritable`, OSError."""
        ...

    def identity(self, path: str) -> FileId | None:
        """Returns the identity of the file or folder with this name; None if there is none.

        The empty path is the root.
        """
        ...

    def is_shared(self, path: str) -> bool:
        """Returns whether the file has other names too, as in a hard-linked copy."""
        ...


@runtime_checkable
class _HasFiles(Protocol):
    files: LogFiles | None


def files_of(store: Store) -> LogFiles | None:
    """Returns the files of a root; None if its store does not support appending to files."""
    return store.files if isinstance(store, _HasFiles) else None
