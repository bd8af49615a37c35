"""Errors in Spark's Python workers.

A worker passes an exception to Spark as the text of its traceback, frames first. The message of a
`SparklogError` says what happened, to what, and what to do; it is easily missed after a
screen of frames. So the frames are omitted, with Spark's own switch (`SPARK_HIDE_TRACEBACK`, which
`spark.sql.execution.pyspark.udf.hideTraceback.enabled` sets for all errors). A worker ends after an
exception, so nothing else in the session is affected. Other exceptions keep their frames.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

from sparklog import errors

_log = logging.getLogger("sparklog.spark_errors")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_SWITCH: Final = "SPARK_HIDE_TRACEBACK"


def sentence_first(called: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps a function that Spark calls in a worker: Spark shows our errors without frames."""

    @functools.wraps(called)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return called(*args, **kwargs)
        except errors.SparklogError:
            _hide_frames()
            raise

    return wrapped


def rows_sentence_first(called: Callable[_P, Iterator[_T]]) -> Callable[_P, Iterator[_T]]:
    """Like `sentence_first`, for a generator: errors are raised while Spark iterates over it."""

    @functools.wraps(called)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        try:
            yield from called(*args, **kwargs)
        except errors.SparklogError:
            _hide_frames()
            raise

    return wrapped


def _hide_frames() -> None:
    if any(name.startswith("PYTHON_WORKER_FACTORY_") for name in os.environ):
        _log.debug("an error that Spark shows without its frames", exc_info=True)
        os.environ[_SWITCH] = "1"
