"""The cost of OAuth tokens: of logins to the Kafka listener, and of calls of Flight clients."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow.flight as flight
from joserfc import jwt
from joserfc.jwk import RSAKey

from benchmarks.processes import cpu_seconds
from benchmarks.progress import doing
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.security.oauth_bearer import OAUTHBEARER

_TIMES: Final = 1_000
_ISSUER: Final = "https://issuer.example.org/"
_HANDSHAKE, _AUTHENTICATE = 17, 36


class _Issuer:
    """An issuer with an RSA key of 2,048 bits, as most have."""

    def __init__(self) -> None:
        self._key = RSAKey.generate_key(2_048, {"kid": "k"})

    def settings(self, folder: Path) -> dict[str, str]:
        """The environment variables of a broker that accepts its tokens."""
        path = folder / "jwks.json"
        path.write_text(json.dumps({"keys": [self._key.as_dict(private=False)]}))
        return {
            "SPARKLOG_OAUTH_JWKS": str(path),
            "SPARKLOG_OAUTH_ISSUER": _ISSUER,
            "SPARKLOG_OAUTH_AUDIENCE": "sparklog",
        }

    def token(self, number: int) -> str:
        claims = {"iss": _ISSUER, "aud": "sparklog", "sub": "app", "exp": time.time() + 3_600}
        header = {"alg": "RS256", "kid": "k"}
        return jwt.encode(header, claims | {"jti": str(number)}, self._key, algorithms=["RS256"])


def oauth(options: BenchOptions) -> Iterator[Measurement]:
    """Measures logins and calls with tokens that were verified before, and with others."""
    issuer = _Issuer()
    with FreshRoot(options.folder) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        process = BrokerProcess(
            folder / "root",
            issuer.settings(folder),
            kafka="SASL_PLAINTEXT://127.0.0.1:0",
            flight="SASL_PLAINTEXT://127.0.0.1:0",
        )
        new = [issuer.token(number) for number in range(2 * _TIMES)]
        known = [issuer.token(-1)] * _TIMES
        with process, doing("logins and calls with OAuth tokens"):
            yield from _compared(
                "Kafka, login by OAUTHBEARER",
                process.pid,
                lambda token: _log_in(process.kafka_address, token),
                known,
                new[:_TIMES],
                most_ms=10,
            )
            with flight.FlightClient(f"grpc://{process.address}") as client:
                yield from _compared(
                    "Flight, call with an OAuth token",
                    process.pid,
                    lambda token: _call(client, token),
                    known,
                    new[_TIMES:],
                    most_ms=2,
                )


def _compared(
    what: str,
    pid: int,
    use: Callable[[str], None],
    known: Sequence[str],
    new: Sequence[str],
    *,
    most_ms: float,
) -> Iterator[Measurement]:
    use(known[0])
    spent = {}
    for name, tokens in (("verified before", known), ("new", new)):
        before = cpu_seconds(pid)[pid]
        for each in tokens:
            use(each)
        spent[name] = (cpu_seconds(pid)[pid] - before) / len(tokens) * 1e3
    for name, each_ms in spent.items():
        yield Measurement(
            name=f"{what}, {name}: processor time of the broker",
            value=f"{each_ms:.2f} ms",
            target=f"≤ {most_ms} ms",
            met=each_ms <= most_ms,
        )


def _log_in(address: str, token: str) -> None:
    host, _, port = address.rpartition(":")
    message = f"n,,\x01auth=Bearer {token}\x01\x01".encode()
    mechanism = OAUTHBEARER.encode()
    with socket.create_connection((host, int(port))) as connection:
        for api, body in (
            (_HANDSHAKE, struct.pack(">h", len(mechanism)) + mechanism),
            (_AUTHENTICATE, struct.pack(">i", len(message)) + message),
        ):
            request = struct.pack(">hhih", api, 1, 1, -1) + body
            connection.sendall(struct.pack(">i", len(request)) + request)
            (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            reply = connection.recv(size, socket.MSG_WAITALL)
            assert reply[4:6] == b"\0\0", reply


def _call(client: flight.FlightClient, token: str) -> None:
    headers = [(b"authorization", f"Bearer {token}".encode())]
    action = flight.Action("topics.list", b"{}")
    assert list(client.do_action(action, flight.FlightCallOptions(headers=headers)))
