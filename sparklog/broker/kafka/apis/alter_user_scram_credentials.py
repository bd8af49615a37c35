"""AlterUserScramCredentials (51): adds users, changes their passwords, removes them (KIP-554).

The checks and their codes are those of Kafka's `ScramControlManager`. A user whose last credential
is removed is removed itself, and loses its connections.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka import acls, scram_credentials
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.security_admin import CHANGED_USERS
from sparklog.security.users import USERS_MAX, Change

_Error = tuple[ErrorCode, str | None]
_NO_ERROR: Final[_Error] = (ErrorCode.none, None)
_TWICE: Final[_Error] = (
    ErrorCode.duplicate_resource,
    "A user credential cannot be altered twice in the same request",  # Kafka's text
)
_UNKNOWN_MECHANISM: Final[_Error] = (
    ErrorCode.unsupported_sasl_mechanism,
    f"expected one of {', '.join(scram_credentials.MECHANISMS.values())}",
)


@serves(51, "alter_user_scram_credentials", max_version=0)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    count = len(body.deletions) + len(body.upsertions)
    asked = itertools.chain(body.deletions, body.upsertions)
    names = [each.name for each in itertools.islice(asked, USERS_MAX)]
    admin = acls.admin_of(context, request.access)
    if admin is None:
        return _same(names, (ErrorCode.security_disabled, acls.DISABLED_MESSAGE))
    try:
        await request.access.check_security_change()
        if count > CHANGED_USERS:
            reason = f"{count:,} credentials; at most {CHANGED_USERS} are changed by one request"
            raise errors.BadRequest(reason=reason)
        found = _checked(request)
        changes = {name: each for name, each in found.items() if not isinstance(each, tuple)}
        if changes:
            outcomes = await context.run_blocking(
                WorkerPool.CHANGE, admin.change_users, request.access.administrator, changes
            )
            found |= {name: _error_of(each) for name, each in outcomes.items()}
    except errors.SecurityNotRead:
        raise
    except errors.SparklogError as error:
        return _same(names, _error_of(error))
    return _reply({name: each for name, each in found.items() if isinstance(each, tuple)})


def _checked(request: Request) -> dict[str, Change | _Error]:
    """Returns the change of each user, or the reason for which it is invalid."""
    body = request.body
    asked = [*body.deletions, *body.upsertions]
    twice = scram_credentials.repeated(each.name for each in asked)
    found: dict[str, Change | _Error] = {}
    for index, each in enumerate(asked):
        if each.name in twice:
            found[each.name] = _TWICE
        elif each.mechanism not in scram_credentials.MECHANISMS:
            found[each.name] = _UNKNOWN_MECHANISM
        elif index < len(body.deletions):
            found[each.name] = scram_credentials.deletion_of(each)
        else:
            try:
                found[each.name] = scram_credentials.upsertion_of(each, request.listener)
            except errors.BadOption as error:
                found[each.name] = _error_of(error)
    return found


def _error_of(error: errors.SparklogError | None) -> _Error:
    if error is None:
        return _NO_ERROR
    is_unacceptable = isinstance(error, errors.BadOption)
    return ErrorCode.unacceptable_credential if is_unacceptable else code_of(error), str(error)


def _same(names: list[str], error: _Error) -> Reply:
    return _reply(dict.fromkeys(names, error))


def _reply(results: Mapping[str, _Error]) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "results": [
            {"user": name, "error_code": code, "error_message": message}
            for name, (code, message) in results.items()
        ],
    }
