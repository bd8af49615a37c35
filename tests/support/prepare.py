"""Prepares what many processes of the tests need: `python -m tests.support.prepare loops|spark`.

Otherwise each process that needs compiled loops in a new checkout compiles them, and the first
tests of Spark wait for its packages and its class archive.
"""

from __future__ import annotations

import importlib.util
import sys


def main(what: str) -> None:
    """Compiles the loops, or prepares Spark; does nothing without numba, or without Spark."""
    if what == "loops" and importlib.util.find_spec("numba") is not None:
        from sparklog.formats import record_batch
        from sparklog.formats.values.avro import loops

        record_batch.compile_loops()
        loops.load()
    elif what == "spark" and importlib.util.find_spec("pyspark") is not None:
        from tests.support import spark_jars

        spark_jars.prepare()


if __name__ == "__main__":
    main(sys.argv[1])
