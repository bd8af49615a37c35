"""SCRAM, the exchange of a login by password (RFC 5802, RFC 7677), on both sides.

Neither side sends the password. The server knows a *verifier* of it, which suffices to check a
client but not to log in as one, and proves at the end that it knows it: a program that listens on
the port of a dead broker learns nothing. The classes here take messages and return messages.

For a user that does not exist, the server answers with a salt and an iteration count that are
always the same for that name, and fails at the end, as it does for a wrong password. So a client
cannot find out which users exist. A real Kafka fails at once.

Differences from the RFC are those of Kafka's implementation: channel binding is not supported, and
the first message of a client may have extensions (`tokenauth`).
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

SALT_BYTES: Final = 20
NONCE_BYTES: Final = 18
ITERATIONS_DEFAULT: Final = 4096
ITERATIONS_MIN: Final = 4096
ITERATIONS_MAX: Final = 16_384
MESSAGE_BYTES_MAX: Final = 4096


class Mechanism(enum.StrEnum):
    """A SCRAM mechanism by its SASL name."""

    SHA_256 = "SCRAM-SHA-256"
    SHA_512 = "SCRAM-SHA-512"

    @property
    def digest(self) -> str:
        """The name of the hash function for `hashlib`."""
        return "sha256" if self is Mechanism.SHA_256 else "sha512"

    @property
    def digest_bytes(self) -> int:
        return hashlib.new(self.digest).digest_size


PLAIN: Final = "PLAIN"
"""The SASL mechanism that sends the password itself (RFC 4616); checked against a verifier."""
MECHANISMS: Final = (*Mechanism, PLAIN)


class Verifier(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of a SCRAM credential that a server stores (RFC 5802, section 3)."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"Verifier(…, iterations={self.iterations})"


WRONG: Final = "the password is wrong, or the user does not exist or is disabled"
"""The reason of a proof that does not fit, for the server's log."""


class ScramError(Exception):
    """The exchange has failed. The message is for the server's log, not for the client."""


def verifier_of(
    mechanism: Mechanism,
    password: str,
    *,
    iterations: int = ITERATIONS_DEFAULT,
    salt: bytes | None = None,
) -> Verifier:
    """Returns the verifier of a password, with a random salt unless one is given.

    Takes 1 to 7 ms of processor time; the GIL is released.
    """
    salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
    salted = hashlib.pbkdf2_hmac(mechanism.digest, password.encode(), salt, iterations)
    return verifier_of_salted(mechanism, salted, salt=salt, iterations=iterations)


def verifier_of_salted(
    mechanism: Mechanism, salted_password: bytes, *, salt: bytes, iterations: int
) -> Verifier:
    """Returns the verifier of a password that a client has salted (KIP-554)."""
    client_key = _hmac(mechanism, salted_password, b"Client Key")
    return Verifier(
        salt=salt,
        stored_key=hashlib.new(mechanism.digest, client_key).digest(),
        server_key=_hmac(mechanism, salted_password, b"Server Key"),
        iterations=iterations,
    )


def is_password(mechanism: Mechanism, verifier: Verifier, password: str) -> bool:
    """Returns whether a password, as SASL PLAIN sends it, is that of a verifier.

    Takes as long as `verifier_of`.
    """
    found = verifier_of(mechanism, password, iterations=verifier.iterations, salt=verifier.salt)
    return hmac.compare_digest(found.stored_key, verifier.stored_key)


class DrawnVerifiers:
    """Verifiers of users that do not exist, which no password matches.

    They are drawn from a key that never changes, so that they stay the same for a name. Their form
    is that of `iterations` and `SALT_BYTES`, which real credentials have by default.
    """

    def __init__(self, key: bytes, *, iterations: int = ITERATIONS_DEFAULT) -> None:
        assert len(key) >= 32, "a key that can be guessed shows which users exist"
        self._key = key
        self._iterations = iterations

    def of(self, mechanism: Mechanism, user: str) -> Verifier:
        """Returns the verifier that `user` would have if it existed."""
        drawn = hmac.digest(self._key, f"{mechanism}\0{user}".encode(), "sha512")
        unknown = secrets.token_bytes(mechanism.digest_bytes)
        return Verifier(
            salt=drawn[:SALT_BYTES],
            stored_key=unknown,
            server_key=unknown,
            iterations=self._iterations,
        )


# ------------------------------------------------------------------------------ messages

_TEXT: Final = r"[^,\x00]+"
_PRINTABLE: Final = r"[\x21-\x2b\x2d-\x7e]+"
_EXTENSIONS: Final = r"(?P<extensions>(?:,[A-Za-z]+=[^,\x00]*)*)"
_CLIENT_FIRST: Final = re.compile(
    rf"n,(?:a=(?P<authzid>{_TEXT}))?,n=(?P<user>{_TEXT}),r=(?P<nonce>{_PRINTABLE}){_EXTENSIONS}"
)
_SERVER_FIRST: Final = re.compile(
    rf"r=(?P<nonce>{_PRINTABLE}),s=(?P<salt>[A-Za-z0-9/+=]+),i=(?P<iterations>[1-9][0-9]{{0,9}})"
    rf"{_EXTENSIONS}"
)
_CLIENT_FINAL: Final = re.compile(
    rf"(?P<unproven>c=(?P<binding>[A-Za-z0-9/+=]+),r=(?P<nonce>{_PRINTABLE}){_EXTENSIONS})"
    r",p=(?P<proof>[A-Za-z0-9/+=]+)"
)
_SERVER_FINAL: Final = re.compile(r"(?:v=(?P<signature>[A-Za-z0-9/+=]+)|e=(?P<error>[^,]*)).*")


def _parsed(pattern: re.Pattern[str], message: bytes, name: str) -> re.Match[str]:
    if len(message) > MESSAGE_BYTES_MAX:
        raise ScramError(f"the {name} has {len(message)} bytes")
    try:
        found = pattern.fullmatch(message.decode())
    except UnicodeDecodeError:
        found = None
    if found is None:
        raise ScramError(f"the {name} is malformed")
    return found


def encoded_name(name: str) -> str:
    """Returns a user name as messages contain it."""
    return name.replace("=", "=3D").replace(",", "=2C")


def _decoded_name(text: str) -> str:
    if re.search("=(?!2C|3D)", text):
        raise ScramError("the user name has an escape that is not =2C or =3D")
    return text.replace("=2C", ",").replace("=3D", "=")


def _base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ScramError(f"the {name} is not base64") from None


def _hmac(mechanism: Mechanism, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, mechanism.digest)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------------------ server


@dataclass(frozen=True, slots=True, kw_only=True)
class _Challenge:
    """The state of a server that waits for the client's proof."""

    user: str
    header: str
    """The part of the client's first message that binds the exchange to it."""
    nonce: str
    signed: str
    """Both first messages, which the proof signs together with the last one."""
    verifier: Verifier


class ScramServer:
    """One login at a server."""

    def __init__(
        self,
        mechanism: Mechanism,
        verifier: Callable[[str], Verifier],
        *,
        nonce: Callable[[], str] = lambda: secrets.token_urlsafe(NONCE_BYTES),
    ) -> None:
        """`verifier` returns that of a user; for one that does not exist, a drawn one."""
        self._mechanism = mechanism
        self._verifier = verifier
        self._nonce = nonce
        self._challenge: _Challenge | None = None
        self.user: str | None = None
        """The user, once it has proved its password."""

    def step(self, message: bytes) -> bytes:
        """Returns the answer to the client's first or last message. Raises `ScramError`."""
        assert self.user is None, "the exchange is over"
        if self._challenge is None:
            return self._first(message)
        challenge, self._challenge = self._challenge, None
        return self._final(message, challenge)

    def _first(self, message: bytes) -> bytes:
        found = _parsed(_CLIENT_FIRST, message, "client's first message")
        user = _decoded_name(found["user"])
        authzid = found["authzid"]
        if authzid is not None and _decoded_name(authzid) != user:
            raise ScramError("the client asks to act as another user")
        bare = message.decode()[found.start("user") - len("n=") :]
        verifier = self._verifier(user)
        nonce = found["nonce"] + self._nonce()
        salt = base64.b64encode(verifier.salt).decode()
        answer = f"r={nonce},s={salt},i={verifier.iterations}"
        self._challenge = _Challenge(
            user=user,
            header=message.decode()[: -len(bare)],
            nonce=nonce,
            signed=f"{bare},{answer}",
            verifier=verifier,
        )
        return answer.encode()

    def _final(self, message: bytes, challenge: _Challenge) -> bytes:
        found = _parsed(_CLIENT_FINAL, message, "client's last message")
        if found["nonce"] != challenge.nonce:
            raise ScramError("the nonce is not that of this exchange")
        if _base64(found["binding"], "channel binding") != challenge.header.encode():
            raise ScramError("the channel binding is not that of the first message")
        signed = f"{challenge.signed},{found['unproven']}".encode()
        verifier, proof = challenge.verifier, _base64(found["proof"], "proof")
        signature = _hmac(self._mechanism, verifier.stored_key, signed)
        if len(proof) != len(signature):
            raise ScramError("the proof has another length than the hash")
        stored_key = hashlib.new(self._mechanism.digest, _xor(proof, signature)).digest()
        if not hmac.compare_digest(stored_key, verifier.stored_key):
            raise ScramError(WRONG)
        self.user = challenge.user
        server_signature = _hmac(self._mechanism, verifier.server_key, signed)
        return b"v=" + base64.b64encode(server_signature)


# ------------------------------------------------------------------------------ client


class ScramClient:
    """One login at a client."""

    def __init__(
        self,
        mechanism: Mechanism,
        user: str,
        password: str,
        *,
        nonce: Callable[[], str] = lambda: secrets.token_urlsafe(NONCE_BYTES),
    ) -> None:
        self._mechanism = mechanism
        self._password = password
        self._bare = f"n={encoded_name(user)},r="
        self._own_nonce = nonce()
        self._bare += self._own_nonce
        self._signature: bytes | None = None

    def first(self) -> bytes:
        """Returns the client's first message."""
        return f"n,,{self._bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        """Returns the client's last message, the proof. Raises `ScramError`.

        A server that asks for fewer iterations than `ITERATIONS_MIN` is refused: it could find a
        weak password from the proof. Takes 1 to 7 ms of processor time.
        """
        found = _parsed(_SERVER_FIRST, server_first, "server's first message")
        nonce, iterations = found["nonce"], int(found["iterations"])
        if not nonce.startswith(self._own_nonce) or nonce == self._own_nonce:
            raise ScramError("the server's nonce does not continue the client's")
        if not ITERATIONS_MIN <= iterations <= 100 * ITERATIONS_MAX:
            raise ScramError(f"the server asks for {iterations} iterations")
        salt = _base64(found["salt"], "salt")
        salted = hashlib.pbkdf2_hmac(
            self._mechanism.digest, self._password.encode(), salt, iterations
        )
        unproven = f"c={base64.b64encode(b'n,,').decode()},r={nonce}"
        signed = f"{self._bare},{server_first.decode()},{unproven}".encode()
        client_key = _hmac(self._mechanism, salted, b"Client Key")
        stored_key = hashlib.new(self._mechanism.digest, client_key).digest()
        proof = _xor(client_key, _hmac(self._mechanism, stored_key, signed))
        server_key = _hmac(self._mechanism, salted, b"Server Key")
        self._signature = _hmac(self._mechanism, server_key, signed)
        return f"{unproven},p={base64.b64encode(proof).decode()}".encode()

    def check(self, server_final: bytes) -> None:
        """Checks that the server knows the password too. Raises `ScramError`."""
        assert self._signature is not None, "the proof has not been sent"
        found = _parsed(_SERVER_FINAL, server_final, "server's last message")
        if found["error"] is not None:
            raise ScramError(f"the server refuses the login: {found['error']}")
        if not hmac.compare_digest(_base64(found["signature"], "signature"), self._signature):
            raise ScramError("the server does not know the password: it is not the broker")
