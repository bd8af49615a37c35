"""DescribeUserScramCredentials (50): the users, and the mechanisms that they can use (KIP-554)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka import acls, scram_credentials
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation
from sparklog.security.state import User
from sparklog.security.users import USERS_MAX

_Error = tuple[ErrorCode, str | None]
_NO_ERROR: Final[_Error] = (ErrorCode.none, None)
_TWICE: Final[_Error] = (ErrorCode.duplicate_resource, "a user is described once in a request")
_MISSING: Final[_Error] = (ErrorCode.resource_not_found, "the user does not exist")


@serves(50, "describe_user_scram_credentials", max_version=0, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    asked = request.body.users or ()
    names = [each.name for each in asked[:USERS_MAX]]
    admin = acls.admin_of(context, request.access)
    if admin is None:
        return _refusal(names, (ErrorCode.security_disabled, acls.DISABLED_MESSAGE))
    try:
        await request.access.check(Operation.DESCRIBE)
        if len(asked) > USERS_MAX:
            raise errors.BadRequest(reason=f"{len(asked):,} users; at most {USERS_MAX:,}")
    except errors.SecurityNotRead:
        raise
    except errors.SparklogError as error:
        return _refusal(names, (code_of(error), str(error)))
    users = {name: user for name, user in admin.state.users.items() if user.credentials}
    repeated = scram_credentials.repeated(names)

    def result(name: str) -> Fields:
        user = users.get(name)
        if name in repeated or user is None:
            return _fields(name, _TWICE if name in repeated else _MISSING)
        return _fields(name, _NO_ERROR, _credentials(user))

    return _reply(_NO_ERROR, LazyArray(result, list(dict.fromkeys(names)) or sorted(users)))


def _credentials(user: User) -> list[Fields]:
    return [
        {"mechanism": number, "iterations": user.credentials[mechanism].iterations}
        for number, mechanism in scram_credentials.MECHANISMS.items()
        if mechanism in user.credentials
    ]


def _refusal(names: Iterable[str], error: _Error) -> Reply:
    """Returns the reply to a request that is refused as a whole, with each user, as in Kafka."""
    return _reply(error, LazyArray(lambda name: _fields(name, error), list(dict.fromkeys(names))))


def _reply(error: _Error, results: LazyArray[str]) -> Reply:
    code, message = error
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "error_message": message,
        "results": results,
    }


def _fields(name: str, error: _Error, credentials: Sequence[Fields] = ()) -> Fields:
    code, message = error
    return {
        "user": name,
        "error_code": code,
        "error_message": message,
        "credential_infos": credentials,
    }
