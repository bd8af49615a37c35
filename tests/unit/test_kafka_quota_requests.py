"""Requests for quotas that are much larger than those of any client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.apis import alter_client_quotas, describe_client_quotas
from sparklog.broker.kafka.scheduler import LoopScheduler
from tests.support.turns import in_turns

MANY = 50_000


def handled(api: Any, **body: Any) -> tuple[Any, int]:
    """Returns the reply to a request, and the turns of the event loop that others had meanwhile."""
    request = mock.Mock(body=SimpleNamespace(**body), access=mock.AsyncMock())

    def handle(scheduler: LoopScheduler) -> Any:
        return api._handle(mock.Mock(scheduler=scheduler, security_admin=None), request)

    return in_turns(handle)


def entry(count: int, name: str = "x") -> Any:
    """Returns an entry for an entity with so many parts."""
    parts = [SimpleNamespace(entity_type=f"t{each}", entity_name=name) for each in range(count)]
    return SimpleNamespace(entity=parts, ops=())


def test_many_changes_let_others_continue() -> None:
    """Promise: a request with tens of thousands of entities, all refused, is handled in turns."""
    entries = [entry(1, str(number)) for number in range(MANY)]
    reply, turns = handled(alter_client_quotas, entries=entries, validate_only=False)
    assert {each["error_code"] for each in reply["entries"]} == {ErrorCode.invalid_request}
    assert len(reply["entries"]) == MANY
    assert turns > 10


def test_an_entity_has_few_parts() -> None:
    """Promise: parts of an entity that no client sends end the connection before they are read."""
    with pytest.raises(errors.BadRequest, match="at most 3 parts"):
        handled(alter_client_quotas, entries=[entry(MANY)], validate_only=False)


def test_a_filter_has_few_components() -> None:
    """Promise: a filter with components that no client sends is refused before they are read."""
    components = [SimpleNamespace(entity_type=f"t{each}") for each in range(MANY)]
    reply, _ = handled(describe_client_quotas, components=components, strict=False)
    assert reply["error_code"] is ErrorCode.invalid_request
    assert "at most 3 components" in reply["error_message"]
