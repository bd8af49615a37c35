"""The messages of the SASL mechanism OAUTHBEARER; pure.

The client sends one message with its token. If the server refuses it, it answers with a JSON object
that has the reason, the client answers with one byte, and the login fails.

Sources: RFC 7628; `OAuthBearerClientInitialResponse` and `OAuthBearerSaslServer` of Kafka 4.1.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

OAUTHBEARER: Final = "OAUTHBEARER"
"""The name of the mechanism."""
CLIENT_FAILED: Final = b"\x01"
"""The client's answer to a refusal."""
_BYTES_MAX: Final = 24 * 1024
"""The token (`jwt.TOKEN_BYTES_MAX`), and extensions."""
_SEPARATOR: Final = "\x01"
_AUTH: Final = "auth"
_GS2_HEADER: Final = re.compile(r"n,(?:a=((?:[\x01-\x2b\x2d-\x3c\x3e-\x7f]|=2C|=3D)+))?,")
"""No channel binding, and the authorization identity, if there is one (RFC 5801)."""
_KEY: Final = re.compile(r"[A-Za-z]+")
_VALUE: Final = re.compile(r"[\x21-\x7e \t\r\n]+")
_BEARER: Final = re.compile(r"bearer +([-_.a-zA-Z0-9]+)", re.IGNORECASE)


class ClientResponse(NamedTuple):
    """The client's message."""

    token: str
    authzid: str
    """The authorization identity, the name that the client acts as; empty: its own."""


def read_response(message: bytes) -> ClientResponse:
    """Returns the content of the client's message. Extensions are checked, and not used (KIP-342).

    Raises ValueError with the reason.
    """
    if len(message) > _BYTES_MAX:
        raise ValueError(f"the message has {len(message)} bytes")
    try:
        begin, _, rest = message.decode("ascii").partition(_SEPARATOR)
    except UnicodeDecodeError:
        raise ValueError("the message is not ASCII") from None
    found = _GS2_HEADER.fullmatch(begin)
    if found is None or not rest.endswith(2 * _SEPARATOR):
        raise ValueError("the message is malformed")
    values: dict[str, str] = {}
    for pair in rest[:-2].split(_SEPARATOR):
        key, is_pair, value = pair.partition("=")
        if not (is_pair and _KEY.fullmatch(key) and _VALUE.fullmatch(value)):
            raise ValueError("an extension is malformed")
        if key in values:
            raise ValueError(f"it has {key[:20]!r} twice")
        values[key] = value
    bearer = _BEARER.fullmatch(values.get(_AUTH, ""))
    if bearer is None:
        raise ValueError("it has no token of the type Bearer")
    authzid = (found[1] or "").replace("=2C", ",").replace("=3D", "=")
    return ClientResponse(bearer[1], authzid)


def refusal(reason: str) -> str:
    """Returns the server's answer to a token that it refuses: that of Kafka, and the reason."""
    return json.dumps({"status": "invalid_token", "error_description": reason})
