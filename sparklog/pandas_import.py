"""Keeps pandas out of the processes of brokers and commands, which have no use for it.

pyarrow imports pandas, if it is installed, with its first scalar or array
(https://github.com/apache/arrow/issues/34994). That takes 0.3 s and 60 MB: it would slow down the
start of a command, and delay a broker's ack.
"""

from __future__ import annotations

import importlib.abc
import sys


def block() -> None:
    """Makes every later import of pandas in this process fail, as if it were not installed."""
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas())


class _NoPandas(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used by this process", name=name)
