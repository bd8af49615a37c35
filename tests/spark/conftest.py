"""Fixtures of Spark's tests: a root, and a log on it that this process serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import sparklog
from sparklog.client.log import Log


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(name="log")
def _log(root: Path) -> Iterator[Log]:
    """With topic t of two partitions."""
    with sparklog.connect(root) as log:
        log.create_topic("t", partitions=2)
        yield log
