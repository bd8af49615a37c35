"""The parts that all jobs share: the Spark session, exit codes, progress, stopping."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparklog import errors
from sparklog.display import counted
from sparklog.terminal.commands import Command, ExitCode, exit_codes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STDERR: Final = 2
_PIPE_BYTES: Final = 65_536
_END_OF_START: Final = b"\0sparklog: Spark has started\0"
"""Separates the output of a JVM's start from what follows."""
_LOOK_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 30.0
"""Time between two lines of progress if no terminal shows a bar."""
_CAUSE: Final = re.compile(r"^Caused by: (.*)", re.MULTILINE)
_DELTA: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",  # a local session has few cores
}


class _JobCommand(Command):
    """A job's only command."""

    def invoke(self, ctx: Any) -> Any:
        with exit_codes():
            return super().invoke(ctx)


class _SparkJobCommand(Command):
    """The only command of a Spark job, whose Spark errors also become a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with exit_codes(), _spark_errors():
            return super().invoke(ctx)


def run(job: Callable[..., None], name: str, *, needs_spark: bool = True) -> None:
    """Runs a job with the arguments of the process, and exits with its code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: cluster managers send it
    app_of(job, needs_spark=needs_spark)(prog_name=f"sparklog.jobs.{name}")


def app_of(job: Callable[..., None], *, needs_spark: bool = True) -> typer.Typer:
    """Returns the command line of a job, which is its only command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=_SparkJobCommand if needs_spark else _JobCommand)(job)
    return app


@contextlib.contextmanager
def _spark_errors() -> Iterator[None]:
    try:
        from pyspark.logger import PySparkLogger

        kinds = spark_error_kinds()
    except ModuleNotFoundError as error:
        raise errors.NotInstalled(
            what="jobs",
            missing=error.name,
            hint="run the job with spark-submit, or pip install 'sparklog[spark,local-spark]'",
        ) from None
    # It would print the stack of each error as JSON.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield
    except kinds as error:
        typer.echo(f"sparklog: {sentence(error)}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None


def spark_error_kinds() -> tuple[type[Exception], ...]:
    """Returns the exceptions that Spark raises."""
    from pyspark.errors import PySparkException

    with contextlib.suppress(ModuleNotFoundError):  # Spark Connect's own client has no JVM
        from py4j.protocol import Py4JJavaError

        return PySparkException, Py4JJavaError
    return (PySparkException,)


def sentence(error: Exception) -> str:
    """Returns the message of a Spark error, without stack frames, query plan and SQLSTATE.

    A sparklog error is at the end of a Python worker's traceback. JVM errors that PySpark does not
    convert, such as file system errors, state the reason in their last cause.
    """
    whole = str(error)
    text = whole.partition("\nJVM stacktrace:")[0].partition("\n\tat ")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("sparklog.errors.")]
    if ours:
        return ours[-1].partition(": ")[2]
    if not lines:
        return type(error).__name__
    if not lines[0].startswith("An error occurred while calling ") or len(lines) == 1:
        return lines[0].partition(" SQLSTATE:")[0]
    said = lines[1].removeprefix(": ").partition(" SQLSTATE:")[0]
    causes = _CAUSE.findall(whole)
    return f"{said} ({causes[-1]})" if causes and causes[-1] not in said else said


def echo(text: str) -> None:
    """Prints a line that is not the job's result."""
    typer.echo(text, err=True)


# ------------------------------------------------------------------------------ the session


def spark_session(name: str, *, with_delta: bool, packages: Sequence[str] = ()) -> SparkSession:
    """Returns the session of `spark-submit` or of Spark Connect, or starts a local one.

    A local one is quiet: the job prints its errors, in one line, and its progress.

    `with_delta`: include Delta in a local one, if delta-spark is installed. `packages`: Maven
    coordinates of packages to include in a local one without Delta.
    """
    from pyspark.sql import SparkSession

    # If unset, Spark's workers would run whatever `python3` is on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    starts = SparkSession.getActiveSession() is None and not is_submitted
    if starts:
        has_delta = with_delta and importlib.util.find_spec("delta") is not None
        downloads = ", which downloads packages the first time" if packages or has_delta else ""
        echo(f"starting Spark{downloads}")
        builder = builder.config("spark.log.level", "FATAL")  # each failed task logs a stack
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        if packages:
            builder = builder.config("spark.jars.packages", ",".join(packages))
        if has_delta:
            from delta import configure_spark_with_delta_pip

            for key, value in _DELTA.items():
                builder = builder.config(key, value)
            builder = configure_spark_with_delta_pip(builder)
    quiet = _quiet_start() if starts else contextlib.nullcontext()
    with quiet, signals_deferred():  # a JVM stopped during its start would remain
        return builder.getOrCreate()


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Drops the standard error of a JVM that starts in this block; prints it if the start fails.

    Ivy writes a hundred lines there, and no Spark setting prevents it. After the start, a thread
    forwards the JVM's output to the standard error of this process.
    """
    if sys.stderr is None:  # it was closed before this process began
        yield
        return
    sys.stderr.flush()
    own = os.dup(_STDERR)
    reader, writer = os.pipe()
    os.dup2(writer, _STDERR)
    os.close(writer)
    output = _StartOutput(own)
    thread = threading.Thread(target=output.forward, args=(reader,), name="sparklog-jvm")
    thread.daemon = True
    thread.start()
    try:
        yield
    except Exception:
        output.is_wanted = True
        raise
    finally:
        sys.stderr.flush()
        os.write(_STDERR, _END_OF_START)
        os.dup2(own, _STDERR)
        output.is_over.wait()


class _StartOutput:
    """Standard error of a JVM: the output of its start is held back, and the rest is forwarded."""

    def __init__(self, target: int) -> None:
        """`target`: the descriptor that bytes are forwarded to."""
        self._target = target
        self.is_wanted = False
        """True if the output of the start is to be printed once it is over."""
        self.is_over = threading.Event()

    def forward(self, reader: int) -> None:
        """Reads the descriptor until its end."""
        kept = b""
        while data := os.read(reader, _PIPE_BYTES):
            if not self.is_over.is_set():
                kept, end, data = (kept + data).partition(_END_OF_START)
                if not end:
                    continue
                self._write(kept if self.is_wanted else b"")
                self.is_over.set()
            self._write(data)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the JVM must not wait for a reader that is gone
            os.write(self._target, data)


@contextlib.contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Changes a setting of the session until the end of the block."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


def parallelism(spark: SparkSession) -> int:
    """Returns how many tasks the session runs at a time; 8 with Spark Connect."""
    try:
        return spark.sparkContext.defaultParallelism
    except Exception:  # Spark Connect raises its own error for what it lacks
        return 8


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defers SIGINT and SIGTERM to the block's end, as KeyboardInterrupt, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda found, _: seen.append(found))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if seen:
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------ progress


@contextlib.contextmanager
def progress(spark: SparkSession, what: str) -> Iterator[None]:
    """Shows how many Spark tasks are done: a bar on a terminal, otherwise occasional lines.

    Spark Connect does not report this; its own client shows a bar.
    """
    try:
        tracker = spark.sparkContext.statusTracker()
    except Exception:  # Spark Connect raises its own error for what it lacks
        yield
        return
    is_over = threading.Event()
    watching = threading.Thread(target=_watch, args=(tracker, what, is_over), daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()


def _watch(tracker: Any, what: str, is_over: threading.Event) -> None:
    if not sys.stderr.isatty():
        while not is_over.wait(_LINE_SECONDS):
            done, total = _tasks(tracker)
            echo(f"{what}: {done:,} of {counted(total, 'task')}")
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        while not is_over.wait(_LOOK_SECONDS):
            done, total = _tasks(tracker)
            if total:
                bar.update(task, completed=done, total=total)


def _tasks(tracker: Any) -> tuple[int, int]:
    """Returns how many tasks of the running stages are done, and how many there are."""
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    known = [stage for stage in stages if stage is not None]
    return sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known)
