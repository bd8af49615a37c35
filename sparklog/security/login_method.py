"""The ways to log in other than by a password, as users list them."""

from __future__ import annotations

import enum


class LoginMethod(enum.StrEnum):
    """A proof of who a client is that others have issued: sparklog knows no password for it."""

    CERTIFICATE = "certificate"
    """Of TLS, signed by a CA in `tls.ca`."""
    OAUTH = "oauth"
    """A token of the issuer in `oauth.issuer`."""
