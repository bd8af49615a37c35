"""JSON Web Tokens of an OAuth issuer: which of them prove who a client is; pure.

A token is accepted if it is signed with one of the issuer's keys, by an algorithm with public keys,
and if its claims name the issuer, one of the audiences, an end in the future, and a subject. Keys
come from the issuer's JWKS only: those that a token contains or refers to (`jwk`, `jku`, `x5c`,
`x5u`) are never read, and one with critical extensions (`crit`) is refused.

Sources: RFC 7515, 7517 and 7519; RFC 8725 (best practices); `BrokerJwtValidator` of Kafka 4.1.
"""

from __future__ import annotations

import binascii
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sparklog import limits
from sparklog.security.signed_token import BadToken

if TYPE_CHECKING:
    from joserfc.jwk import Key

TOKEN_BYTES_MAX: Final = 16 * limits.KIB
JWKS_BYTES_MAX: Final = 256 * limits.KIB
_RSA_BITS: Final = range(2_048, 8_192 + 1)
"""Shorter keys are not safe (RFC 7518), and a signature of a longer one takes milliseconds."""
_LAST_SECOND: Final = 253_402_300_799
"""The end of the year 9999, since 1970."""
_KEY_TYPES: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    **{f"{family}{bits}": ("RSA", ()) for family in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": ("EC", ("P-256",)),
    "ES384": ("EC", ("P-384",)),
    "ES512": ("EC", ("P-521",)),
    "Ed25519": ("OKP", ("Ed25519",)),
    "Ed448": ("OKP", ("Ed448",)),
    "EdDSA": ("OKP", ("Ed25519", "Ed448")),
}
"""The type of the key and its curves, for each algorithm that is accepted."""
_KINDS: Final = frozenset(
    (key_type, curve) for key_type, curves in _KEY_TYPES.values() for curve in (curves or (None,))
)
"""The types of keys and their curves that are read."""
_PUBLIC: Final = frozenset({"kty", "kid", "alg", "n", "e", "crv", "x", "y"})
"""The members of a JWK that are read."""


class JwtRejected(BadToken):
    """A token is not accepted.

    Args:
        cause: the reason for the client, which may know what its token contains.
        detail: what the broker's log has in addition.
    """

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}{detail}")
        self.cause = cause


class UnknownKey(JwtRejected):
    """A token names a key that the JWKS does not have; the issuer may have added it since."""


class NotPermitted(JwtRejected):
    """A token is valid, but names a user that does not permit it, as far as this broker knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtRules:
    """The claims that a token needs."""

    issuer: str
    audiences: frozenset[str]
    """One of these is enough."""
    scopes: frozenset[str] = frozenset()
    """All of these are needed."""
    scope_claim: str = "scope"
    sub_claim: str = "sub"
    clock_skew_seconds: float = 0.0


class JwtSubject(NamedTuple):
    """The client that a token is for."""

    name: str
    ends_at: float
    """When the token is no longer accepted, in seconds since 1970."""


# ------------------------------------------------------------------------------ keys


class Jwks:
    """The keys of an issuer with which signatures can be verified."""

    def __init__(self, content: bytes) -> None:
        """Raises ValueError if `content` is not a JWKS with such a key."""
        if len(content) > JWKS_BYTES_MAX:
            raise ValueError(f"it has more than {JWKS_BYTES_MAX:,} bytes")
        try:
            document = _object(content)
        except ValueError as error:
            raise ValueError(f"it is not a JSON object: {error}") from None
        given = document.get("keys")
        if not isinstance(given, list):
            raise ValueError("it has no list `keys`")
        self._keys = [key for each in given if (key := _key(each)) is not None]
        if not self._keys:
            raise ValueError("it has no RSA, EC or OKP key for signatures that can be used")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, algorithm: str, key_id: str | None) -> Key:
        """Returns the key for a token. Raises `UnknownKey`.

        `key_id`: None if the token names none: then only one key may fit.
        """
        key_type, curves = _KEY_TYPES[algorithm]
        found = [
            key
            for key in self._keys
            if key.key_type == key_type
            and (not curves or key.get("crv") in curves)
            and key.get("alg") in (None, algorithm)
            and (key_id is None or key.get("kid") == key_id)
        ]
        if not found:
            detail = f": kid {key_id!r:.100}, {algorithm}"
            raise UnknownKey("its key is not one of the issuer", detail)
        if key_id is None and len(found) > 1:
            raise JwtRejected("it does not name its key, and the issuer has several")
        return found[0]


def _key(given: Any) -> Key | None:
    """Returns a key; None if it is not one that verifies signatures (RFC 7517, section 5)."""
    from joserfc.errors import JoseError
    from joserfc.jwk import JWKRegistry

    if not isinstance(given, dict) or given.get("use", "sig") != "sig":
        return None
    uses = given.get("key_ops", ["verify"])
    if not isinstance(uses, list) or "verify" not in uses:
        return None
    public = {name: value for name, value in given.items() if name in _PUBLIC}
    if not all(isinstance(value, str) for value in public.values()):
        return None
    if (public.get("kty"), public.get("crv")) not in _KINDS:
        return None
    try:
        if public["kty"] == "RSA" and 8 * len(_decoded(public.get("n", ""))) not in _RSA_BITS:
            return None
        return JWKRegistry.import_key(public)
    except (JoseError, ValueError, TypeError):
        return None


# ------------------------------------------------------------------------------ tokens


def verify(token: str, keys: Jwks, rules: JwtRules, *, now_seconds: float) -> JwtSubject:
    """Returns the client that a token is for. Takes some 0.1 ms of processor time.

    Raises `JwtRejected`, and `UnknownKey` if the JWKS lacks its key.
    """
    if len(token) > TOKEN_BYTES_MAX:
        raise JwtRejected(f"it has more than {TOKEN_BYTES_MAX:,} bytes")
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        raise JwtRejected("it is not a signed JWT")
    algorithm, key_id = _header(parts[0])
    _check_signature(token, keys.find(algorithm, key_id))
    try:
        claims = _object(_decoded(parts[1]))
    except ValueError:
        raise JwtRejected("its claims are malformed") from None
    return _subject(claims, rules, now_seconds)


def _header(text: str) -> tuple[str, str | None]:
    """Returns the algorithm and the id of the key."""
    try:
        header = _object(_decoded(text))
    except ValueError:
        raise JwtRejected("it is not a signed JWT") from None
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in _KEY_TYPES:
        raise JwtRejected("its algorithm is not accepted", f": {algorithm!r:.40}")
    if "crit" in header or "b64" in header:
        raise JwtRejected("it has critical extensions")
    if not (key_id is None or isinstance(key_id, str)):
        raise JwtRejected("it is not a signed JWT")
    return algorithm, key_id


def _check_signature(token: str, key: Key) -> None:
    from joserfc import jws
    from joserfc.errors import JoseError

    try:
        jws.deserialize_compact(token, key, registry=_registry())
    except (JoseError, ValueError) as error:
        raise JwtRejected("its signature is not valid", f": {error}") from None


@functools.cache
def _registry() -> Any:
    """Returns the rules of joserfc for headers, without its own: `_header` has checked them."""
    from joserfc.jws import JWSRegistry

    class Registry(JWSRegistry):
        max_header_length = max_payload_length = max_signature_length = TOKEN_BYTES_MAX

        def get_alg(self, name: str) -> Any:
            return self.algorithms[name]  # its own method warns of EdDSA

    return Registry(algorithms=[*_KEY_TYPES], strict_check_header=False)


def _subject(claims: Mapping[str, Any], rules: JwtRules, now_seconds: float) -> JwtSubject:
    """Returns the client that claims name, if they are in order at this time."""
    skew_seconds = rules.clock_skew_seconds
    ends_at = _time(claims, "exp")
    if ends_at is None:
        raise JwtRejected("it has no claim 'exp'")
    if now_seconds >= ends_at + skew_seconds:
        raise JwtRejected("it has expired", f", {now_seconds - ends_at:.0f} s ago")
    begins_at = _time(claims, "nbf")
    if begins_at is not None and now_seconds < begins_at - skew_seconds:
        raise JwtRejected("it is not valid yet", f": {begins_at - now_seconds:.0f} s too early")
    if claims.get("iss") != rules.issuer:
        raise JwtRejected("its issuer is not accepted", f": {claims.get('iss')!r:.200}")
    if not rules.audiences & _texts(claims, "aud", separator=None):
        raise JwtRejected("it is for another audience", f": {claims.get('aud')!r:.200}")
    missing = rules.scopes - _texts(claims, rules.scope_claim, separator=" ")
    if missing:
        raise JwtRejected("it lacks a scope", f": {', '.join(sorted(missing))}")
    subject = claims.get(rules.sub_claim)
    if not isinstance(subject, str) or not subject:
        raise JwtRejected("it names no client", f" in the claim {rules.sub_claim!r}")
    return JwtSubject(subject, ends_at + skew_seconds)


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """Returns a claim with a time in seconds since 1970; None without it."""
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _LAST_SECOND:  # also false for NaN
        raise JwtRejected(f"its claim {name!r} is not a time")
    return float(value)


def _texts(claims: Mapping[str, Any], name: str, *, separator: str | None) -> frozenset[str]:
    """Returns a claim that is a text or a list of texts.

    `separator`: between the words of a text; None: it is one.
    """
    value = claims.get(name, [])
    if isinstance(value, str):
        value = [value] if separator is None else value.split(separator)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise JwtRejected(f"its claim {name!r} is malformed")
    return frozenset(value)


# ------------------------------------------------------------------------------ JSON


def _decoded(text: str) -> bytes:
    """Decodes base64url without padding. Raises ValueError."""
    try:
        data = text.encode("ascii")
        return binascii.a2b_base64(
            data.translate(_FROM_URL) + b"=" * (-len(data) % 4), strict_mode=True
        )
    except UnicodeEncodeError:
        raise ValueError("it is not ASCII") from None


_FROM_URL: Final = bytes.maketrans(b"-_+/=", b"+/   ")


def _object(content: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError, also if a name occurs twice in an object.

    Two programs that read such a token could see two clients.
    """
    try:
        found = json.loads(content, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is another value")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
