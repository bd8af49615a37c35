"""Compares the responses of our brokers and of a real Kafka to the same requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Answers: TypeAlias = Iterator[tuple[str, object]]
"""By name, in the order of the requests."""


@dataclass(frozen=True, slots=True)
class Differs:
    """Both responses, and why they differ."""

    ours: object
    theirs: object
    why: str


def check_answers(
    ours: Iterable[tuple[str, object]],
    theirs: Iterable[tuple[str, object]],
    different: Mapping[str, Differs],
) -> None:
    """Checks that both agree, except for known differences."""
    found = dict(ours), dict(theirs)
    assert found[0].keys() == found[1].keys()
    assert different.keys() <= found[0].keys(), "nothing is compared with that"
    differences = {}
    for name, our_answer in found[0].items():
        their_answer = found[1][name]
        known = different.get(name, Differs(their_answer, their_answer, ""))
        if (our_answer, their_answer) != (known.ours, known.theirs):
            differences[name] = {"ours": our_answer, "theirs": their_answer}
    assert not differences, json.dumps(differences, indent=1, default=str)


def name_of(code: Any) -> str:
    """Returns an error's name."""
    return str(code.name)


def metadata_fields(topics: Sequence[Any] | None, **more: Any) -> dict[str, Any]:
    """Fields of a Metadata request; topics are given by name or by fields."""
    wanted = None
    if topics is not None:
        named = [each if isinstance(each, dict) else {"name": each} for each in topics]
        wanted = [{"topic_id": None, **each} for each in named]
    return {
        "topics": wanted,
        "allow_auto_topic_creation": False,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
        **more,
    }
