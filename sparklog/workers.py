"""Errors in Spark's Python workers.

A worker hands an exception to Spark as the text of its traceback, frames first. A `SparklogError`
says by itself what happened, to what, and what to do; after a screen of frames nobody finds that
sentence. So the frames are left out, by Spark's own switch for it (`SPARK_HIDE_TRACEBACK`, which
`spark.sql.execution.pyspark.udf.hideTraceback.enabled` sets for all errors). A worker ends after an
exception, so nothing else of the session is affected. Other exceptions keep their frames.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

from sparklog import errors

_log = logging.getLogger("sparklog.workers")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_SWITCH: Final = "SPARK_HIDE_TRACEBACK"


def sentence_first(called: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps what Spark calls in a worker: of an error of ours, Spark shows the sentence alone."""

    @functools.wraps(called)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return called(*args, **kwargs)
        except errors.SparklogError:
            _hide_frames()
            raise

    return told


def rows_sentence_first(called: Callable[_P, Iterator[_T]]) -> Callable[_P, Iterator[_T]]:
    """The same for an iterator, whose errors come while Spark takes from it."""

    @functools.wraps(called)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        try:
            yield from called(*args, **kwargs)
        except errors.SparklogError:
            _hide_frames()
            raise

    return told


def _hide_frames() -> None:
    if any(name.startswith("PYTHON_WORKER_FACTORY_") for name in os.environ):
        _log.debug("an error that Spark shows without its frames", exc_info=True)
        os.environ[_SWITCH] = "1"
