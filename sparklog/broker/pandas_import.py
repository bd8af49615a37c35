"""Keeps pandas out of a broker's process.

pyarrow imports pandas, where it is installed, with its first scalar or array
(https://github.com/apache/arrow/issues/34994). That takes 60 MB and delays an ack by a second.
"""

from __future__ import annotations

import importlib.abc
import sys

import pyarrow as pa


def block() -> None:
    """Keeps pyarrow from importing pandas, which it tries once."""
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas())
        pa.scalar(0)
        del sys.meta_path[0]


class _NoPandas(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
