"""SCRAM credentials of users in Kafka's messages (KIP-554)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sparklog import errors
from sparklog.listeners import Listener
from sparklog.security import users
from sparklog.security.scram import ITERATIONS_MAX, ITERATIONS_MIN, Mechanism, verifier_of_salted
from sparklog.security.users import Change

MECHANISMS: Final[Mapping[int, Mechanism]] = {1: Mechanism.SHA_256, 2: Mechanism.SHA_512}
"""Mechanisms by their numbers in messages."""
_SALT_BYTES_MAX: Final = 256


def repeated(names: Iterable[str]) -> set[str]:
    """Returns the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def upsertion_of(asked: Any, listener: Listener) -> Change:
    """Returns the change that sets a credential.

    Raises `BadOption`, for a request whose bytes others on the network could have read too.
    """
    users.check_name(asked.name)
    if not (listener.has_tls or listener.is_loopback):
        reason = "others on the network can read it: set it at a listener with TLS"
        raise _bad("password", "…", reason)
    mechanism = MECHANISMS[asked.mechanism]
    if not ITERATIONS_MIN <= asked.iterations <= ITERATIONS_MAX:
        reason = f"expected {ITERATIONS_MIN:,} to {ITERATIONS_MAX:,}"
        raise _bad("iterations", asked.iterations, reason)
    if not 0 < len(asked.salt) <= _SALT_BYTES_MAX:
        raise _bad("salt", f"{len(asked.salt)} bytes", f"expected 1 to {_SALT_BYTES_MAX}")
    if len(asked.salted_password) != mechanism.digest_bytes:
        reason = f"{mechanism} needs {mechanism.digest_bytes} bytes"
        raise _bad("salted password", f"{len(asked.salted_password)} bytes", reason)
    verifier = verifier_of_salted(
        mechanism, asked.salted_password, salt=asked.salt, iterations=asked.iterations
    )
    return users.with_credential(asked.name, mechanism, verifier)


def deletion_of(asked: Any) -> Change:
    """Returns the change that removes a credential."""
    return users.without_credential(asked.name, MECHANISMS[asked.mechanism])


def _bad(option: str, value: Any, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=value, reason=reason)
