"""Arrow's Flight client as this package uses it: its options, TLS, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as flight

from sparklog import errors, limits
from sparklog.formats import flight_messages
from sparklog.listeners import TLS_SCHEME
from sparklog.security.credentials import TlsMaterial

_OPTIONS: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A peer that hangs or is cut off breaks the channel; otherwise calls would block forever.
    ("grpc.keepalive_time_ms", round(limits.KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", round(limits.KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.http2.ping_timeout_ms", round(limits.KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    # Otherwise two connections to one address share a socket, and break together.
    ("grpc.use_local_subchannel_pool", 1),
]

_NOT_AUTHENTICATED: Final = errors.NotAuthenticated.template.partition("{")[0]
_BROKEN_TRANSPORT: Final = "Error in HTTP transport"


def open_client(address: str, tls: TlsMaterial | None, *, middleware: Sequence[Any] = ()) -> Any:
    """Returns a Flight client, which connects with its first call.

    `tls`: for an address `tls://…`; None for others. Raises what `failure_of` returns.
    """
    options: dict[str, Any] = {}
    if tls is not None:
        options = {
            "tls_root_certs": tls.ca,
            "cert_chain": tls.certificate,
            "private_key": tls.key,
        }
    try:
        return flight.FlightClient(
            f"grpc+{address}" if address.startswith(TLS_SCHEME) else f"grpc://{address}",
            generic_options=_OPTIONS,
            middleware=list(middleware),
            **{name: value for name, value in options.items() if value is not None},
        )
    except pa.ArrowException as error:
        raise failure_of(error, address) from error


def failure_of(error: BaseException, address: str) -> errors.SparklogError:
    """Converts a Flight error to one of `sparklog.errors`.

    A Flight error with an `ErrorReply` becomes that error; a broken transport `BrokerUnavailable`;
    gRPC without Flight `WrongPort`; any other a `SparklogError` with the peer's message.
    """
    if isinstance(error, errors.SparklogError):
        return error
    reply = getattr(error, "extra_info", None)
    if reply:
        try:
            return flight_messages.decode(flight_messages.ErrorReply, reply).exception()
        except errors.BadRequest:
            pass
    reason = str(error).partition(". gRPC client debug context")[0]
    reason = reason.rpartition("error, with message: ")[2].strip()
    if reason.startswith(_BROKEN_TRANSPORT):  # the rest is gRPC's internal state
        reason = "the connection broke"
    if isinstance(error, flight.FlightUnauthenticatedError):  # of a login, which has no reply
        return errors.NotAuthenticated(reason=reason.removeprefix(_NOT_AUTHENTICATED).rstrip("."))
    if isinstance(error, NotImplementedError):
        return errors.WrongPort(address=address, reason=f"it speaks gRPC but refuses: {reason}")
    unavailable = (
        flight.FlightUnavailableError,
        flight.FlightTimedOutError,
        flight.FlightCancelledError,
    )
    if isinstance(error, unavailable):
        return errors.BrokerUnavailable(address=address, reason=reason)
    return errors.UnexpectedError(reason=f"the broker at {address} failed: {reason}")
