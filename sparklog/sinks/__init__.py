"""The Spark sink: batch and streaming writes to topics, each batch exactly once."""

from __future__ import annotations

from sparklog.sinks.foreach import foreach_batch, write_batch

__all__ = ["foreach_batch", "write_batch"]


def __dir__() -> list[str]:
    return sorted(__all__)
