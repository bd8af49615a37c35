"""Checks what listens at an address before gRPC connects, which would only keep waiting.

The errors name the cause: nothing listens, the port is another one of the broker's, the address has
TLS and the port has not, or the certificate is not accepted.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sparklog import errors, limits
from sparklog.formats import flight_messages
from sparklog.listeners import TLS_SCHEME, host_of
from sparklog.security.credentials import Credentials, TlsMaterial

# RFC 9113, 3.4: a client's preface and its empty SETTINGS frame; a server's begins with SETTINGS.
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES: Final = 9
_SETTINGS_FRAME: Final = 4
_GOAWAY_FRAME: Final = bytes((7,))
_GOAWAY_TEXT: Final = 9 + 8
"""The position of its text, after its header, the last stream and the error code."""
_WRONG_PORT: Final = flight_messages.WRONG_PORT.encode()
_HINT_BYTES: Final = 300
"""More than the length of the line with the Flight address."""


def probe(
    address: str, timeout_seconds: float, answered: set[str], credentials: Credentials
) -> None:
    """Raises an error immediately, if gRPC would only keep waiting.

    A stopping broker may close a connection without answering, as may any other program. So such a
    port counts as wrong only if no broker has answered there before.

    Args:
        address: `host:port`, or `tls://host:port`.
        timeout_seconds: for each step.
        answered: addresses at which a broker has answered; this one is added if one answers.
        credentials: the CAs of brokers.

    Raises:
        errors.BrokerUnavailable: nothing answers.
        errors.WrongPort: the port is not that of Flight, or does not use TLS as the address says.
        errors.BrokerNotTrusted: one side does not accept the other's certificate.
    """
    host, port = host_of(address), address.rpartition(":")[2]
    if not host or not port.isdecimal():
        raise errors.BadOption(option="address", value=address, reason="expected host:port")
    tls = _tls_context(credentials.tls()) if address.startswith(TLS_SCHEME) else None
    answer = _answer(address, timeout_seconds, tls)
    if len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS_FRAME:
        answered.add(address)
        return
    if len(answer) < _FRAME_HEADER_BYTES and address in answered:
        reason = "it closed the connection without a response"
        raise errors.BrokerUnavailable(address=address, reason=reason)
    if answer.startswith(_WRONG_PORT):
        flight = answer.removeprefix(_WRONG_PORT).decode(errors="replace").strip()
        reason = f"it is the Kafka port; Flight is at {flight}: connect there"
    elif answer[3:4] == _GOAWAY_FRAME:
        reason = answer[_GOAWAY_TEXT:].decode(errors="replace")
    elif answer.startswith(b"HTTP/1"):
        reason = "it speaks HTTP/1; is this the console's port?"
    else:
        reason = "it is open but does not speak gRPC; is this the Kafka port?"
    raise errors.WrongPort(address=address, reason=reason)


def _answer(address: str, timeout_seconds: float, tls: ssl.SSLContext | None) -> bytes:
    """Returns the first bytes of the answer to HTTP/2. Raises what `probe` raises."""
    host, port = host_of(address), address.rpartition(":")[2]
    try:
        with _connected(host, int(port), timeout_seconds, tls) as peer:
            peer.sendall(_HTTP2_PREFACE)
            answer = _receive(peer, _FRAME_HEADER_BYTES)
            if answer == _WRONG_PORT[:_FRAME_HEADER_BYTES]:
                answer += _receive(peer, _HINT_BYTES)
            elif answer[3:4] == _GOAWAY_FRAME:
                answer += _receive(peer, int.from_bytes(answer[:3], "big"))
    except ssl.SSLCertVerificationError as error:
        raise errors.BrokerNotTrusted(address=address, reason=_distrust(error, host)) from error
    except ssl.SSLError as error:
        raise _tls_failed(error, address) from error
    except TimeoutError as error:
        reason = f"silent for {timeout_seconds} s; it hangs, or this is not its Flight port"
        raise errors.BrokerUnavailable(address=address, reason=reason) from error
    except OSError as error:
        reason = _unreached(error, host)
        raise errors.BrokerUnavailable(address=address, reason=reason) from error
    return answer


@contextlib.contextmanager
def _connected(
    host: str, port: int, timeout_seconds: float, tls: ssl.SSLContext | None
) -> Iterator[socket.socket]:
    with socket.create_connection((host, port), timeout_seconds) as peer:
        if tls is None:
            yield peer
            return
        with tls.wrap_socket(peer, server_hostname=host) as encrypted:
            yield encrypted


def _tls_context(tls: TlsMaterial) -> ssl.SSLContext:
    """Raises `BadOption` for PEM files without a valid certificate."""
    try:
        context = ssl.create_default_context(cadata=tls.ca.decode() if tls.ca else None)
    except (ssl.SSLError, ValueError) as error:
        reason = "the file of the CA contains no valid certificate"
        raise errors.BadOption(option="ca", value="…", reason=reason) from error
    if tls.files is not None:
        try:
            context.load_cert_chain(*tls.files)
        except ssl.SSLError as error:
            reason = f"it and its key do not belong together, or are not valid: {error.reason}"
            raise errors.BadOption(
                option="certificate", value=tls.files[0], reason=reason
            ) from error
    context.set_alpn_protocols(["h2"])
    return context


def _distrust(error: ssl.SSLCertVerificationError, host: str) -> str:
    """Returns the reason that a certificate is not accepted, and the remedy."""
    if "self-signed" in error.verify_message or "local issuer" in error.verify_message:
        remedy = (
            "name the file of its CA (Security(ca=…), the option ca in Spark, SPARKLOG_CLIENT_CA),"
            " or store it in the root, for programs that open that (`sparklog security set-ca`)"
        )
    elif "mismatch" in error.verify_message or "not valid for" in error.verify_message:
        remedy = f"connect by a name that it has, or have {host} added to it"
    else:
        remedy = "replace it at the broker"
    return f"{error.verify_message}; {remedy}"


def _tls_failed(error: ssl.SSLError, address: str) -> errors.SparklogError:
    reason = error.reason or ""
    if "ALERT" in reason:  # the broker refuses the client, such as one without a certificate
        text = reason.lower().replace("_", " ")
        return errors.BrokerNotTrusted(address=address, reason=f"it refuses this client: {text}")
    plain = address.removeprefix(TLS_SCHEME)
    text = f"it does not use TLS, or is not a Flight port: connect to {plain} without {TLS_SCHEME}"
    return errors.WrongPort(address=address, reason=text)


def first_that_answers(
    addresses: Sequence[str], answered: set[str], credentials: Credentials
) -> str:
    """Returns the first of the addresses at which a broker answers.

    Raises `BrokerUnavailable` if any may answer later, or else the error of the first.
    """
    failures: list[errors.SparklogError] = []
    for address in addresses:
        try:
            probe(address, limits.PROBE_TIMEOUT_SECONDS, answered, credentials)
            return address
        except (errors.BrokerUnavailable, errors.BrokerNotTrusted, errors.WrongPort) as error:
            failures.append(error)
    may_answer_later = any(isinstance(each, errors.Retriable) for each in failures)
    kind: Any = errors.BrokerUnavailable if may_answer_later else type(failures[0])
    reasons = (
        f"{address}: {each.facts['reason']}"
        for address, each in zip(addresses, failures, strict=True)
    )
    raise kind(address=",".join(addresses), reason="; ".join(reasons))


def _unreached(error: OSError, host: str) -> str:
    """Returns the reason that an address cannot be reached, and the remedy."""
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} cannot be resolved ({reason}); check its spelling"
    if isinstance(error, ConnectionRefusedError):
        return f"{reason}; start a broker there, or correct the address"
    return reason


def _receive(peer: socket.socket, count: int) -> bytes:
    """Returns `count` bytes, or fewer if the peer closes. Raises `TimeoutError`."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while len(received) < count and (piece := peer.recv(count - len(received))):
            received += piece
    return received
