"""The ways to log in other than by a password, as users list them."""

from __future__ import annotations

import enum


class LoginMethod(enum.StrEnum):
    """The kind of a credential that another party has issued to a client."""

    CERTIFICATE = "certificate"
    """A certificate for TLS, signed by a CA in `tls.ca`."""
    OAUTH = "oauth"
    """A token of the issuer in `oauth.issuer`."""
