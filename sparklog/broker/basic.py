"""The header `authorization: Basic …` with a user and a password (RFC 7617)."""

from __future__ import annotations

import base64
import binascii
from typing import Final

_SCHEME: Final = "basic "


def is_basic(header: str) -> bool:
    """Returns whether a header has this form; the name of a scheme has no case."""
    return header[: len(_SCHEME)].lower() == _SCHEME


def credentials_in(header: str) -> tuple[str, str]:
    """Returns the user and the password; empty ones if the header is malformed."""
    try:
        text = base64.b64decode(header[len(_SCHEME) :].strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    user, _, password = text.partition(":")
    return user, password
