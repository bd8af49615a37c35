"""The identity of a write inside `foreachBatch`, in classic Spark and in Spark Connect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkAttributeError

from sparklog import errors
from sparklog.sinks import foreach_batch, write_batch
from sparklog.sinks.foreach import QUERY_ID


class Classic:
    """A session on whose thread a query runs, or none."""

    def __init__(self, query_id: str | None) -> None:
        properties = {QUERY_ID: query_id}
        self.sparkContext = SimpleNamespace(getLocalProperty=properties.get)


class Connect:
    """A session of Spark Connect, with its active queries as (name, id)."""

    def __init__(self, *queries: tuple[str | None, str]) -> None:
        active = [SimpleNamespace(name=name, id=id_) for name, id_ in queries]
        self.streams = SimpleNamespace(active=active)

    @property
    def sparkContext(self) -> Any:  # noqa: N802
        raise PySparkAttributeError(
            errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED",
            messageParameters={"attr_name": "sparkContext"},
        )


class Frame:
    """A data frame that remembers how it was written."""

    def __init__(self, session: Any) -> None:
        self.sparkSession = session
        self.given: dict[str, str] = {}
        self.saved: list[tuple[str, str]] = []

    @property
    def write(self) -> Self:
        return self

    def format(self, name: str) -> Self:
        self._format = name
        return self

    def mode(self, name: str) -> Self:
        self._mode = name
        return self

    def option(self, name: str, value: str) -> Self:
        self.given[name] = value
        return self

    def save(self) -> None:
        self.saved.append((self._format, self._mode))


def test_a_write_is_known_by_name_query_and_batch() -> None:
    """The query's id is part of it, so that a deleted checkpoint begins a new series of batches."""
    frame: Any = Frame(Classic("1f-2e"))
    write_batch(frame, 7, name="copy", root="/log", topic="t", valueFormat="json")
    assert frame.given == {
        "root": "/log",
        "topic": "t",
        "valueFormat": "json",
        "failOnDifferentRerun": "true",  # a micro-batch has the same rows when it is repeated
        "txnAppId": "copy.1f-2e",
        "txnVersion": "7",
    }
    assert frame.saved == [("sparklog", "append")]


def test_what_is_not_given_is_left_to_the_sink() -> None:
    """The root may come from the environment, and the topic from each row."""
    frame: Any = Frame(Classic("1f"))
    foreach_batch(name="copy", failOnDifferentRerun="false")(frame, 0)
    assert sorted(frame.given) == ["failOnDifferentRerun", "txnAppId", "txnVersion"]
    assert frame.given["failOnDifferentRerun"] == "false"


@pytest.mark.parametrize("option", ["txnAppId", "txnversion", "idempotencyKey"])
def test_options_that_identify_a_write_are_refused(option: str) -> None:
    """The helper identifies the write by itself: an option of the caller would have no effect."""
    frame: Any = Frame(Classic("1f"))
    with pytest.raises(errors.BadOption, match=f"{option} = 'x'.*identify the write: remove"):
        foreach_batch(name="copy", **{option: "x"})
    with pytest.raises(errors.BadOption, match=f"{option} = 'x'"):
        write_batch(frame, 0, name="copy", **{option: "x"})
    assert frame.saved == []


def test_in_spark_connect_the_name_tells_which_query_it_is() -> None:
    """By its `queryName`, whatever else runs in the session."""
    session = Connect((None, "0"), ("copy", "1f"), ("other", "2e"))
    for given, app in (
        ({"name": "copy"}, "copy.1f"),
        ({"name": "late", "query_name": "other"}, "late.2e"),
    ):
        frame: Any = Frame(session)
        write_batch(frame, 7, **given)
        assert frame.given["txnAppId"] == app


@pytest.mark.parametrize(
    ("session", "message"),
    [
        (Classic(None), "no streaming query runs on this thread"),
        (Connect((None, "0"), ("other", "2e")), r"queryName\('copy'\)"),
    ],
)
def test_a_write_of_no_query_is_refused(session: Any, message: str) -> None:
    """Without the query's id, a deleted checkpoint would be taken for a rerun and skipped."""
    frame: Any = Frame(session)
    with pytest.raises(errors.BadRequest, match=message):
        write_batch(frame, 0, name="copy")
    assert frame.saved == []


def test_spark_connect_can_send_it_to_its_server() -> None:
    """The function is pickled, with all that it was given."""
    frame: Any = Frame(Connect(("copy", "1f")))
    sent = cloudpickle.dumps(foreach_batch(name="copy", topic="t"))  # type: ignore[no-untyped-call]
    cloudpickle.loads(sent)(frame, 3)
    assert frame.given["topic"] == "t"
    assert (frame.given["txnAppId"], frame.given["txnVersion"]) == ("copy.1f", "3")
