"""The lag of a streaming query, made from its progress."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sparklog.sources import LagListener, QueryLag, lag

AT = "2013-01-01T00:10:00.000Z"
AT_MS = 1_356_999_000_000


def topic(*ends: int, more: dict[str, Any] | None = None, id: str = "id") -> dict[str, Any]:
    """A topic in an offset of the source."""
    return {"id": id, "offsets": {str(number): end for number, end in enumerate(ends)}} | (
        more or {}
    )


def progress(*sources: tuple[Any, Any], name: str | None = "copy") -> dict[str, Any]:
    """The parts of a progress that matter; sources are (end of the batch, end of the log)."""
    return {
        "id": "1f-2e",
        "name": name,
        "batchId": 7,
        "timestamp": AT,
        "sources": [
            {"endOffset": json.dumps(end), "latestOffset": json.dumps(latest)}
            for end, latest in sources
        ],
    }


def test_the_figures_are_those_of_the_kafka_source() -> None:
    """Offsets behind the end of the log as least, greatest and mean, and the age of the oldest."""
    since = {"unreadSince": {"0": AT_MS - 60_000, "1": AT_MS - 90_500}}
    end = {"a": topic(5, 7, more={"from": {"0": 1}}), "b": topic(4)}
    found = lag(progress((end, {"a": topic(6, 12, more=since), "b": topic(4)})))
    assert found is not None
    assert found.metrics() == {
        "minOffsetsBehindLatest": 0,
        "maxOffsetsBehindLatest": 5,
        "avgOffsetsBehindLatest": 2,
        "lagSeconds": 90.5,
    }
    assert (found.query, found.batch, found.total) == ("copy", 7, 6)
    places = [(each.topic, each.partition, each.committed, each.end) for each in found.partitions]
    assert places == [("a", 0, 5, 6), ("a", 1, 7, 12), ("b", 0, 4, 4)]


def test_partitions_of_all_sources_count() -> None:
    """A join reads several; another source, such as Kafka's or one without offsets, is left out."""
    both = (({"a": topic(5)}, {"a": topic(6)}), ({"b": topic(1)}, {"b": topic(4)}))
    others = (({"k": {"0": 1}}, {"k": {"0": 9}}), (None, None), (3, 4))
    found = lag(progress(*both, *others, name=None))
    assert found is not None
    assert [each.lag for each in found.partitions] == [1, 3]
    assert found.query == "1f-2e"
    assert lag(progress(*others)) is None
    assert lag(progress()) is None


def test_a_new_partition_or_topic_is_unread_from_its_start() -> None:
    """The batch was planned without it."""
    end = {"a": topic(5), "b": topic(9, id="old")}
    found = lag(progress((end, {"a": topic(5, 2), "b": topic(3, id="new")})))
    assert found is not None
    assert [each.lag for each in found.partitions] == [0, 2, 3]


def test_an_age_that_is_unknown_is_not_guessed() -> None:
    """Through a broker no times are known; without unread records the age is 0."""
    unknown, read = (lag(progress(({"a": topic(5)}, {"a": topic(end)}))) for end in (6, 5))
    assert unknown is not None
    assert unknown.lag_seconds is None
    assert "lagSeconds" not in unknown.metrics()
    assert read is not None
    assert read.lag_seconds == 0


@pytest.mark.parametrize("newest", [None, progress(({"a": topic(5)}, {"a": topic(6)}))])
def test_a_query_has_the_lag_of_its_newest_progress(newest: dict[str, Any] | None) -> None:
    """None before the first one."""
    query: Any = SimpleNamespace(lastProgress=newest)
    found = lag(query)
    assert (found.total if found else None) == (1 if newest else None)


def test_a_listener_passes_on_the_lag_of_queries_that_read_topics() -> None:
    """And of no others."""
    found: list[QueryLag] = []
    listener = LagListener(found.append)
    for sources in ([({"a": topic(5)}, {"a": topic(6)})], [({"k": {"0": 1}}, {"k": {"0": 9}})]):
        event: Any = SimpleNamespace(progress=progress(*sources))
        listener.onQueryProgress(event)
    assert [each.total for each in found] == [1]
