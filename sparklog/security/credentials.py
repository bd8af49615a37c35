"""The client's side of a connection: the brokers that it trusts, and how it proves who it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from sparklog import errors

VARIABLES: Final = {
    "ca": "SPARKLOG_CLIENT_CA",
    "certificate": "SPARKLOG_CLIENT_CERTIFICATE",
    "key": "SPARKLOG_CLIENT_KEY",
    "user": "SPARKLOG_CLIENT_USER",
    "password_file": "SPARKLOG_CLIENT_PASSWORD_FILE",
    "token_file": "SPARKLOG_CLIENT_TOKEN_FILE",
}
"""Environment variables by the field of `Security` that they set."""
PASSWORD_VARIABLE: Final = "SPARKLOG_CLIENT_PASSWORD"
"""Has the password itself, if there is no file."""

TokenSource = Callable[[], str]
"""Returns the value of the header `authorization` for the next call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The security of the connections to brokers. It names files, and contains no secret.

    ```python
    security = sparklog.Security(ca="ca.pem", user="alice", password_file="alice.password")
    log = sparklog.connect("tls://k1:8815", security=security)
    ```
    """

    ca: str | None = None
    """A PEM file with the CAs of brokers; None: the CAs that this machine trusts."""
    certificate: str | None = None
    """A PEM file with the client's certificate, for brokers that require one."""
    key: str | None = None
    """A PEM file with the key of `certificate`."""
    user: str | None = None
    """The user to log in as, for brokers that ask for a login."""
    password_file: str | None = None
    """A file with its password; None: the variable `SPARKLOG_CLIENT_PASSWORD`."""
    token_file: str | None = None
    """A file with a token of an OAuth issuer, instead of `user`. It is read again whenever it
    changes: replace it before the token expires."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            name, other = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise errors.BadOption(
                option=name,
                value=getattr(self, name),
                reason=f"set {other} (or {VARIABLES[other]}) too",
            )
        if self.password_file is not None and self.user is None:
            reason = f"set user (or {VARIABLES['user']}) too"
            raise errors.BadOption(option="password_file", value=self.password_file, reason=reason)
        if self.token_file is not None and self.user is not None:
            reason = "the token names the client: leave out user, or token_file"
            raise errors.BadOption(option="token_file", value=self.token_file, reason=reason)

    @property
    def logs_in(self) -> bool:
        """True if calls need a token."""
        return self.user is not None or self.token_file is not None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Security:
        """Returns the security that the variables `SPARKLOG_CLIENT_…` describe.

        `environment`: None: this process's own. Raises `BadOption`.
        """
        given = os.environ if environment is None else environment
        try:
            return cls(
                **{
                    name: given[variable]
                    for name, variable in VARIABLES.items()
                    if given.get(variable)
                }
            )
        except errors.BadOption as error:
            raise errors.BadOption(
                option=VARIABLES[error.option], value=error.value, reason=error.reason
            ) from None

    def tls(self) -> TlsMaterial:
        """Reads the files. Raises `BadOption` for one that cannot be read or is not PEM."""
        return TlsMaterial(
            ca=_pem("ca", self.ca),
            certificate=_pem("certificate", self.certificate),
            key=_pem("key", self.key),
            files=(self.certificate, self.key) if self.certificate and self.key else None,
        )

    def password(self) -> str:
        """Returns the password of `user`. Raises `BadOption` if there is none."""
        if self.password_file is None:
            if found := os.environ.get(PASSWORD_VARIABLE):
                return found
            reason = f"its password is missing: set password_file, or {PASSWORD_VARIABLE}"
            raise errors.BadOption(option="user", value=self.user, reason=reason)
        return password_in(_text("password_file", self.password_file))

    def token(self) -> str:
        """Returns the token in `token_file`. Raises `BadOption` if there is none."""
        assert self.token_file is not None
        token = _text("token_file", self.token_file).strip()
        if not token.isascii() or not token.isprintable() or " " in token:
            token = ""
        if not token:
            reason = "the file has to contain a token, and nothing else"
            raise errors.BadOption(option="token_file", value=self.token_file, reason=reason)
        return token


def password_in(text: str) -> str:
    """Returns the password in the text of a file: without the line break at its end."""
    return text.removesuffix("\n").removesuffix("\r")


class TlsMaterial(NamedTuple):
    """The content of a client's PEM files; None for those that it does not have."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    files: tuple[str, str] | None = None
    """The paths of `certificate` and `key`."""


class Credentials(Protocol):
    """The certificates that a client trusts and has, and its tokens."""

    def tls(self) -> TlsMaterial:
        """Returns what a connection to an address `tls://…` needs. Raises `BadOption`."""
        ...

    def token_source(self, address: str) -> TokenSource | None:
        """Returns a source of tokens for the broker at a Flight address. May log in.

        None if its calls need none, or if this process cannot get any. Raises what logging in
        raises.
        """
        ...

    def after_fork(self) -> None:
        """Prepares for use in a forked child: a thread of the parent may have held a lock."""
        ...

    def new_token_source(self, address: str) -> TokenSource | None:
        """Returns a source of new tokens, after the broker has refused the last, or asked for one.

        May log in. Raises what logging in raises.
        """
        ...


def _text(name: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"the file cannot be read: {getattr(error, 'strerror', None) or error}"
        raise errors.BadOption(option=name, value=path, reason=reason) from None


def _pem(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        reason = f"the file cannot be read: {error.strerror or error}"
        raise errors.BadOption(option=name, value=path, reason=reason) from None
    if b"-----BEGIN " not in content:
        raise errors.BadOption(option=name, value=path, reason="the file is not PEM")
    return content
