"""Secrets that cannot be printed, encoded or pickled by accident.

A password that a settings file or an option contains ends up in logs, plans, checkpoints and error
reports as soon as some object that holds it is formatted or serialised. A `Secret` prints as "…",
has no encoding, and is pickled only if it is a reference to a file or an environment variable: the
process that unpickles it then reads the secret itself.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from sparklog import errors

_SHOWN: Final = "…"
SECRET_BYTES_MAX: Final = 65_536


class Secret:
    """A credential, given as a string or as a reference to where it is.

    A reference is read at each `reveal`, so that a rotated secret needs no restart.
    """

    __slots__ = ("_reference", "_reveal")

    def __init__(self, value: str) -> None:
        self._reference: tuple[str, str] | None = None
        self._reveal: Callable[[], str] = lambda: value

    @classmethod
    def from_file(cls, path: str | Path) -> Secret:
        """Returns the secret in a file, without the newline at its end."""
        return _referring("file", str(path), lambda: _read(Path(path)))

    @classmethod
    def from_variable(cls, name: str) -> Secret:
        """Returns the secret in an environment variable."""
        return _referring("variable", name, lambda: _read_variable(name))

    def reveal(self) -> str:
        """Returns the secret itself.

        Raises `BadOption` if the file or the variable that it refers to cannot be read.
        """
        return self._reveal()

    @property
    def source(self) -> str:
        """The place of the secret, for messages: "file …", "variable …", or "given"."""
        return " ".join(self._reference) if self._reference is not None else "given"

    def __repr__(self) -> str:
        return f"Secret({_SHOWN})"

    def __str__(self) -> str:
        return _SHOWN

    def __format__(self, _: str) -> str:
        return _SHOWN

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        """Compares in constant time."""
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self.reveal().encode(), other.reveal().encode())

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _: object) -> Secret:
        return self

    def __reduce__(self) -> tuple[Callable[[str, str], Secret], tuple[str, str]]:
        if self._reference is None:
            raise TypeError(
                "a secret is not pickled: name the file or environment variable that contains it"
            )
        return _restored, self._reference

    def __getstate__(self) -> NoReturn:
        raise TypeError("a secret has no state to save")


def _referring(kind: str, name: str, reveal: Callable[[], str]) -> Secret:
    secret = Secret("")
    secret._reference, secret._reveal = (kind, name), reveal
    return secret


def _restored(kind: str, name: str) -> Secret:
    return Secret.from_file(name) if kind == "file" else Secret.from_variable(name)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        reason = f"the file cannot be read: {error.strerror or error}"
        raise errors.BadOption(option="secret", value=str(path), reason=reason) from None
    if len(content) > SECRET_BYTES_MAX:
        reason = f"the file has more than {SECRET_BYTES_MAX} bytes, and cannot be that of a secret"
        raise errors.BadOption(option="secret", value=str(path), reason=reason)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        reason = "the file is not UTF-8"
        raise errors.BadOption(option="secret", value=str(path), reason=reason) from None
    return text.removesuffix("\n").removesuffix("\r")


def _read_variable(name: str) -> str:
    found = os.environ.get(name)
    if not found:
        reason = "the environment variable is not set, or is empty"
        raise errors.BadOption(option="secret", value=name, reason=reason)
    return found
