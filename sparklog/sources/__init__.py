"""The Spark source: batch and streaming reads of topics, from nothing but the root."""

from sparklog.sources.native import dataframe

__all__ = ["dataframe"]
