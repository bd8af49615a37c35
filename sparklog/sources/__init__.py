"""The Spark source: batch and streaming reads of topics, from nothing but the root."""

from sparklog.sources.native import dataframe, foreach_dataframe
from sparklog.sources.query_lag import LagListener, QueryLag, lag
from sparklog.sources.sql_functions import register_functions

__all__ = ["LagListener", "QueryLag", "dataframe", "foreach_dataframe", "lag", "register_functions"]


def __dir__() -> list[str]:
    return sorted(__all__)
