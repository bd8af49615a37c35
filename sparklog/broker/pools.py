"""The threads that work alongside a broker's loops."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

_FILES = 2
_FILES_REMOTE = 8
_PUBLISHERS = 2
_PUBLISHERS_REMOTE = 8
_COMPACTORS = 1


class Pools:
    """Thread pools, whose work mostly waits for the store."""

    def __init__(self, *, is_local: bool) -> None:
        """`is_local`: the store is a disk, which gains nothing from many concurrent requests."""
        self.files = ThreadPoolExecutor(
            _FILES if is_local else _FILES_REMOTE, thread_name_prefix="sparklog-files"
        )
        """Writes the files of large commits."""
        self.publishers = ThreadPoolExecutor(
            _PUBLISHERS if is_local else _PUBLISHERS_REMOTE, thread_name_prefix="sparklog-publish"
        )
        """Publishes topics with many records alongside the others."""
        self.compactors = ThreadPoolExecutor(_COMPACTORS, thread_name_prefix="sparklog-compact")
        """Runs key compactions of tables, alongside the janitor."""

    def close(self) -> None:
        """Waits for running and queued work."""
        self.compactors.shutdown()
        self.publishers.shutdown()  # their work uses the files' pool
        self.files.shutdown()
