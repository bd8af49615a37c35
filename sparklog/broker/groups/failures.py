"""The errors that clients get for records of a group that were not stored."""

from __future__ import annotations

from sparklog import errors
from sparklog.broker.groups.messages import GroupError


def group_error_of(failure: Exception) -> GroupError:
    """Returns the error for a request whose record was not stored because of `failure`."""
    if isinstance(failure, errors.Fenced | errors.BrokerClosing):
        return GroupError.NOT_COORDINATOR
    too_large = isinstance(failure, errors.RecordTooLarge | errors.BatchTooLarge)
    if too_large or not isinstance(failure, errors.SparklogError | OSError):
        return GroupError.UNKNOWN_SERVER_ERROR
    return GroupError.COORDINATOR_NOT_AVAILABLE
