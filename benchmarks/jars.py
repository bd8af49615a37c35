"""Delta, Spark's Kafka connector and a Kafka broker as jars, from Spark's own Ivy and its cache.

They are looked for before Spark starts, by a JVM of its own: a Spark that is asked for a package
which cannot be got does not start. `spark.jars.ivySettings` of Spark's defaults says where to look.
"""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.progress import doing

KAFKA_VERSION: Final = "4.1.1"

_SCALA = "2.13"
_TOKENS = f"org.apache.spark:spark-token-provider-kafka-0-10_{_SCALA}"
_TOKENS_VERSION = "4.0.0"  # no later one is to be had everywhere, and it goes with later connectors
_CONNECTORS = {"4.0.5": "4.0.4", "4.1.4": "4.1.3"}  # likewise, by the version of Spark
_LOGGING = "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3"  # or a broker would fail in silence
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Jars:
    """Paths of jars. A jar that cannot be resolved has none, and `missing` gives the reason by
    name.
    """

    delta: tuple[str, ...] = ()
    connector: tuple[str, ...] = ()
    broker: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def of_spark(self) -> tuple[str, ...]:
        """Jars for Spark's JVM; a Kafka broker runs in its own."""
        return tuple(dict.fromkeys(self.delta + self.connector))


@functools.cache
def find() -> Jars:
    """The jars that there are; asks Ivy once a process."""
    with (
        doing("looking for the jars of Delta and Kafka; the first time they are downloaded"),
        _jvm() as jvm,
    ):
        found: dict[str, tuple[str, ...]] = {}
        missing = []
        for name, what, coordinates in _wanted():
            try:
                found[name] = _resolve(jvm, coordinates)
            except Exception as error:
                missing.append(f"{what}: {_reason(error)}")
        if "broker" in found:
            found["broker"] += (_scala(jvm),)
    return Jars(**found, missing=tuple(missing))


@functools.cache
def find_tools(artifact: str = "kafka-tools", version: str = KAFKA_VERSION) -> tuple[str, ...]:
    """Kafka's command line tools, or another part of it; asks Ivy once a process and part.

    Raises RuntimeError without them.
    """
    tools = f"org.apache.kafka:{artifact}:{version}"
    with doing(f"looking for Kafka's {artifact}; the first time it is downloaded"), _jvm() as jvm:
        try:
            return _resolve(jvm, (tools, f"{_LOGGING}?transitive=false"))
        except Exception as error:
            raise RuntimeError(f"Kafka's {artifact} {version}: {_reason(error)}") from error


def _wanted() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(field of `Jars`, what it is to people, coordinates with Ivy's options)."""
    spark = importlib.metadata.version("pyspark")
    of_spark = ".".join(spark.split(".")[:2])
    of_connector = _CONNECTORS.get(spark, spark)
    connector = f"org.apache.spark:spark-sql-kafka-0-10_{_SCALA}:{of_connector}"
    try:
        delta = importlib.metadata.version("delta-spark")
    except importlib.metadata.PackageNotFoundError:
        delta = "4.4.0"
    yield "delta", f"Delta {delta}", (f"io.delta:delta-spark_{of_spark}_{_SCALA}:{delta}",)
    yield (
        "connector",
        f"Spark's Kafka connector {of_connector}",
        (
            f"{connector}?transitive=true&exclude={_TOKENS}",
            f"{_TOKENS}:{_TOKENS_VERSION}?transitive=false",
        ),
    )
    yield (
        "broker",
        f"Kafka {KAFKA_VERSION}",
        (f"org.apache.kafka:kafka_{_SCALA}:{KAFKA_VERSION}", f"{_LOGGING}?transitive=false"),
    )


@contextmanager
def _jvm() -> Iterator[Any]:
    """Yields a JVM with Spark's classes and settings, which ends with the context."""
    from pyspark.conf import SparkConf
    from pyspark.java_gateway import launch_gateway

    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    gateway: Any = launch_gateway(SparkConf(), popen_kwargs=silent)  # type: ignore[no-untyped-call]
    process: subprocess.Popen[bytes] = gateway.proc
    patience = threading.Timer(_PATIENCE_SECONDS, process.kill)
    patience.start()
    try:
        yield gateway.jvm
    finally:
        patience.cancel()
        gateway.shutdown()
        assert process.stdin is not None
        process.stdin.close()  # a JVM without its reader ends
        process.wait()


def _resolve(jvm: Any, coordinates: tuple[str, ...]) -> tuple[str, ...]:
    paths: dict[str, None] = {}
    for each in coordinates:
        uri = f"ivy://{each}" if "?" in each else f"ivy://{each}?transitive=true"
        found = jvm.org.apache.spark.util.DependencyUtils.resolveMavenDependencies(
            jvm.java.net.URI(uri)
        )
        paths |= dict.fromkeys(found.apply(number) for number in range(found.size()))
    return tuple(paths)


def _scala(jvm: Any) -> str:
    """The library of Scala that Spark runs on, which its Ivy leaves out everywhere."""
    where = jvm.java.lang.Class.forName("scala.Option").getProtectionDomain().getCodeSource()
    return str(where.getLocation().getPath())


def _reason(error: Exception) -> str:
    """One line of what Ivy said, or that it said nothing."""
    of_java = getattr(error, "java_exception", None)
    said = f"Spark's Ivy did not answer: {error}" if of_java is None else of_java.getMessage()
    return str(said).strip().partition("\n")[0]
