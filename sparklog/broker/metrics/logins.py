"""Logins of programs that scrape the metrics: users of the root, by HTTP Basic (RFC 7617).

While ACLs are evaluated, the metrics need DESCRIBE on the cluster, as they name all topics and
groups. They are served while the users cannot be read, by those that are known: the metrics show
that something is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import structlog

from sparklog import errors
from sparklog.broker.audit import ListenerAudit
from sparklog.broker.authentication import Authentication, Identity
from sparklog.broker.authorization import Authorization, ClientRights
from sparklog.broker.basic import credentials_in, is_basic
from sparklog.broker.login_failures import FailureDelays
from sparklog.broker.peers import network_of
from sparklog.security.acl import Operation
from sparklog.security.scram import PLAIN, WRONG
from sparklog.security.users import NAME_BYTES_MAX

_log = structlog.get_logger("sparklog.metrics")
_SHOWN: Final = 64
"""The maximum length of a user's name in a log line."""
_ASK: Final = {"www-authenticate": 'Basic realm="sparklog", charset="UTF-8"'}
_LOGGED_SECONDS: Final = 1.0
"""The minimum time between two log lines of logins that have failed."""


class ErrorResponse(NamedTuple):
    """The HTTP response to a request without the right to the metrics."""

    status: int
    reason: str
    headers: Mapping[str, str] = {}


class MetricsLogins:
    """Checks the logins of one port, in its event loop."""

    def __init__(
        self,
        authentication: Authentication,
        authorization: Authorization,
        *,
        audit: ListenerAudit,
        delays: FailureDelays,
    ) -> None:
        """Creates the logins.

        Args:
            authentication: the users.
            authorization: the ACLs.
            audit: notes logins.
            delays: those of failed logins at all listeners.
        """
        self._authentication = authentication
        self._authorization = authorization
        self._audit = audit
        self._delays = delays
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sparklog-metrics-logins")
        """Checks passwords and rights: it computes, or waits for the store."""
        self._logged_at = float("-inf")

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._pool.shutdown()

    async def refusal(self, header: str, host: str) -> ErrorResponse | None:
        """Returns the response to a request that may not get the metrics; None if it may.

        `header`: its `authorization`. `host`: the client's address.
        """
        if not is_basic(header):
            return ErrorResponse(401, "a login is needed: the user and the password of Basic", _ASK)
        if self._authorization.watch.is_unread:
            return ErrorResponse(503, "the users of the root have not been read yet")
        user, password = credentials_in(header)
        identity = await self._log_in(user, password)
        if identity is None:
            return await self._failed(user, host)
        rights = ClientRights(self._authorization, identity.principal, host)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._pool, rights.check_one, Operation.DESCRIBE)
        except errors.NotAuthorized as error:
            return ErrorResponse(403, str(error))
        except errors.SecurityNotRead as error:
            return ErrorResponse(503, str(error))
        self._audit.logged_in(PLAIN, identity.principal, host, is_repeated=True)
        return None

    async def _log_in(self, user: str, password: str) -> Identity | None:
        if not user or not password or len(user.encode()) > NAME_BYTES_MAX:
            return None
        known = self._authentication.remembered(user, password)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._authentication.log_in, user, password)

    async def _failed(self, user: str, host: str) -> ErrorResponse:
        """Logs a login that has failed, and waits."""
        self._audit.login_failed(PLAIN, user, host, WRONG)
        loop = asyncio.get_running_loop()
        if (now := loop.time()) - self._logged_at >= _LOGGED_SECONDS:
            self._logged_at = now
            _log.warning("a login has failed", peer=host, reason=f"user {user[:_SHOWN]!a}: {WRONG}")
        await asyncio.sleep(self._delays.next_seconds(network_of(host), user))
        return ErrorResponse(401, "the user name or the password is wrong", _ASK)
