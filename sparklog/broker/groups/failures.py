"""The errors returned to clients when records of a group were not stored."""

from __future__ import annotations

from typing import Final

import structlog

from sparklog import errors
from sparklog.broker.groups.messages import GroupError

_log = structlog.get_logger("sparklog.groups")

_MOVES: Final = (errors.BrokerClosing, errors.Fenced, errors.NotLeader)
"""Another broker coordinates the group, or is about to."""


def logged_error(failure: Exception, *, group_id: str = "") -> GroupError:
    """Logs why a group's record is not stored, and returns the error for the client.

    A group's move to another coordinator does not merit a warning.
    """
    facts = {"group": group_id} if group_id else {}
    if isinstance(failure, _MOVES):
        _log.info("a group's record is left to its next coordinator", reason=str(failure), **facts)
        return GroupError.NOT_COORDINATOR
    if not isinstance(failure, errors.SparklogError | OSError):
        _log.error("a group's record cannot be written", exc_info=failure, **facts)
        return GroupError.UNKNOWN_SERVER_ERROR
    _log.warning("a group's record is not durable", reason=str(failure), **facts)
    if isinstance(failure, errors.RecordTooLarge | errors.BatchTooLarge):
        return GroupError.UNKNOWN_SERVER_ERROR
    return GroupError.COORDINATOR_NOT_AVAILABLE
