"""The Spark source: batch and streaming reads of topics, with only the root needed.

A name in `__all__` loads the module that defines it on first use (PEP 562), because these modules
need pyspark, and the others in this package do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sparklog.sources.native import dataframe as dataframe
    from sparklog.sources.native import foreach_dataframe as foreach_dataframe
    from sparklog.sources.query_lag import LagListener as LagListener
    from sparklog.sources.query_lag import QueryLag as QueryLag
    from sparklog.sources.query_lag import lag as lag
    from sparklog.sources.sql_functions import register_functions as register_functions

__all__ = ["LagListener", "QueryLag", "dataframe", "foreach_dataframe", "lag", "register_functions"]

_MODULE_OF: Final = {
    "LagListener": "sparklog.sources.query_lag",
    "QueryLag": "sparklog.sources.query_lag",
    "dataframe": "sparklog.sources.native",
    "foreach_dataframe": "sparklog.sources.native",
    "lag": "sparklog.sources.query_lag",
    "register_functions": "sparklog.sources.sql_functions",
}

if not TYPE_CHECKING:  # with a visible `__getattr__`, type checkers accept every name

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
