"""Tokens that a holder of a key signs, and another holder of the key verifies.

A token is the value of the header `authorization`: a scheme, and JSON and its signature in base64.
Each scheme signs with a key of its own, which is derived from the given one.
"""

from __future__ import annotations

import base64
import hmac
from typing import Final, Generic, TypeVar

import msgspec

_Claims = TypeVar("_Claims", bound=msgspec.Struct)
_SIZE_MAX: Final = 8_192


class BadToken(ValueError):
    """A token is not accepted; the message is the reason."""


class TokenScheme(Generic[_Claims]):
    """Signs and verifies the tokens of one kind."""

    def __init__(self, scheme: str, use: bytes, claims: type[_Claims]) -> None:
        """Creates a scheme.

        Args:
            scheme: the beginning of the header.
            use: derives the key of this scheme; no two schemes have the same.
            claims: the content of a token.
        """
        self._scheme = scheme
        self._use = use
        self._decoder = msgspec.json.Decoder(claims)

    def sign(self, key: bytes, claims: _Claims) -> str:
        """Returns the value of the header `authorization`."""
        content = msgspec.json.encode(claims)
        return f"{self._scheme}{_text(content)}.{_text(self._signature(key, content))}"

    def matches(self, header: str) -> bool:
        """Returns whether a header contains a token of this scheme, whether it is valid or not."""
        return header.startswith(self._scheme) and len(header) <= _SIZE_MAX

    def verify(self, key: bytes, header: str) -> _Claims:
        """Returns the claims of a token. Raises `BadToken`.

        `key`: if it is empty, no token is valid.
        """
        if not self.matches(header):
            raise BadToken("the header authorization has no token of a broker")
        content_text, _, signature_text = header.removeprefix(self._scheme).partition(".")
        try:
            content, signature = _bytes(content_text), _bytes(signature_text)
        except ValueError:
            raise BadToken("its token is malformed") from None
        if not key or not hmac.compare_digest(signature, self._signature(key, content)):
            raise BadToken("its token was signed with another key")
        try:
            return self._decoder.decode(content)
        except msgspec.MsgspecError:
            raise BadToken("its token is of another release") from None

    def _signature(self, key: bytes, content: bytes) -> bytes:
        return hmac.digest(hmac.digest(key, self._use, "sha256"), content, "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode(), altchars=b"-_", validate=True)
