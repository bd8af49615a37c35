"""The threads that work alongside the loops of a broker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

_FILES = 2
_FILES_REMOTE = 8
_PUBLISHERS = 2
_PUBLISHERS_REMOTE = 8
_COMPACTORS = 1


class Pools:
    """Pools of threads, which wait for the store more than they compute."""

    def __init__(self, *, is_local: bool) -> None:
        """`is_local`: the store is a disk, which many requests at once make no faster."""
        self.files = ThreadPoolExecutor(
            _FILES if is_local else _FILES_REMOTE, thread_name_prefix="sparklog-files"
        )
        """Writes the files of large commits."""
        self.publishers = ThreadPoolExecutor(
            _PUBLISHERS if is_local else _PUBLISHERS_REMOTE, thread_name_prefix="sparklog-publish"
        )
        """Publishes topics alongside the others, because they have much."""
        self.compactors = ThreadPoolExecutor(_COMPACTORS, thread_name_prefix="sparklog-compact")
        """Compacts tables by key, alongside the janitor."""

    def close(self) -> None:
        """Waits for the work that has begun or is queued."""
        self.compactors.shutdown()
        self.publishers.shutdown()  # their work uses the files' pool
        self.files.shutdown()
