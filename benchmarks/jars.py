"""The jars of Delta, Spark's Kafka connector and a Kafka broker, from Spark's Ivy and its cache.

A separate JVM resolves them before Spark starts: Spark does not start if it is configured with a
package that cannot be resolved. `spark.jars.ivySettings` in Spark's defaults sets the repositories.
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
_TOKENS_VERSION = "4.0.0"  # no later one is on every mirror, and it works with later connectors
_CONNECTORS = {"4.0.5": "4.0.4", "4.1.4": "4.1.3"}  # likewise, by Spark version
_LOGGING = "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3"  # or a broker would fail silently
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Jars:
    """Paths of jars. Those that cannot be resolved have none, and a line in `missing`."""

    delta: tuple[str, ...] = ()
    connector: tuple[str, ...] = ()
    broker: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def of_spark(self) -> tuple[str, ...]:
        """The jars for Spark's JVM; a Kafka broker runs in its own JVM."""
        return tuple(dict.fromkeys(self.delta + self.connector))


@functools.cache
def find() -> Jars:
    """Returns the jars that can be resolved; asks Ivy once per process."""
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
    """Returns Kafka's command line tools, or another artifact; asks Ivy once per process for each.

    Raises RuntimeError if they cannot be resolved.
    """
    tools = f"org.apache.kafka:{artifact}:{version}"
    with doing(f"looking for Kafka's {artifact}; the first time it is downloaded"), _jvm() as jvm:
        try:
            return _resolve(jvm, (tools, f"{_LOGGING}?transitive=false"))
        except Exception as error:
            raise RuntimeError(f"Kafka's {artifact} {version}: {_reason(error)}") from error


def _wanted() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (field of `Jars`, display name, coordinates with Ivy's options)."""
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
    """Yields a JVM with Spark's classes and settings, which exits with the context."""
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
        process.stdin.close()  # the JVM exits when its standard input closes
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
    """Returns the Scala library that Spark runs on, which its Ivy always excludes."""
    where = jvm.java.lang.Class.forName("scala.Option").getProtectionDomain().getCodeSource()
    return str(where.getLocation().getPath())


def _reason(error: Exception) -> str:
    """Returns the first line of Ivy's message, or a note that it did not answer."""
    of_java = getattr(error, "java_exception", None)
    said = f"Spark's Ivy did not answer: {error}" if of_java is None else of_java.getMessage()
    return str(said).strip().partition("\n")[0]
