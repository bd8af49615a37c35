"""Tokens of an OAuth issuer: which of them are accepted, and what the reason is if not."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st
from joserfc import jws
from joserfc.jwk import Key, RSAKey, generate_key

from sparklog.security import jwt
from sparklog.security.jwt import Jwks, JwtRejected, JwtRules, UnknownKey
from sparklog.security.oauth_bearer import read_response

NOW = 1_700_000_000
CLAIMS: Mapping[str, Any] = {"iss": "i", "aud": "a", "sub": "bob", "exp": NOW + 60}
RULES = JwtRules(issuer="i", audiences=frozenset({"a", "b"}))
ALGORITHMS: Mapping[str, tuple[str, Any]] = {
    "RS256": ("RSA", 2048),
    "RS384": ("RSA", 2048),
    "RS512": ("RSA", 2048),
    "PS256": ("RSA", 2048),
    "PS384": ("RSA", 2048),
    "PS512": ("RSA", 2048),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
    "Ed25519": ("OKP", "Ed25519"),
    "Ed448": ("OKP", "Ed448"),
}
KEYS = {
    kind: generate_key(*kind, {"kid": f"{kind[0]}-{kind[1]}"})  # type: ignore[call-overload]
    for kind in dict.fromkeys(ALGORITHMS.values())
}
RSA, EC = KEYS["RSA", 2048], KEYS["EC", "P-256"]


def jwks_of(*keys: Any) -> Jwks:
    """The public keys as an issuer publishes them."""
    public = [each.as_dict(private=False) if isinstance(each, Key) else each for each in keys]
    return Jwks(json.dumps({"keys": public}).encode())


ALL = jwks_of(*KEYS.values())


def text(value: Any) -> str:
    """Base64url of bytes, or of a value as JSON."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")
def signed(claims: Any, key: Key = EC, algorithm: str = "ES256", **header: Any) -> str:
    """Returns a token with these claims, or with these bytes as its claims."""
    data = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    registry = jws.JWSRegistry(algorithms=[algorithm], strict_check_header=False)
    return jws.serialize_compact(
        {"alg": algorithm, "kid": key.kid, **header}, data, key, registry=registry
    )


def verified(token: str, keys: Jwks = ALL, rules: JwtRules = RULES, *, now: float = NOW) -> str:
    """Returns the name of the client."""
    return jwt.verify(token, keys, rules, now_seconds=now).name


def cause(token: str, keys: Jwks = ALL, rules: JwtRules = RULES, *, now: float = NOW) -> str:
    """Returns why a token is refused."""
    with pytest.raises(JwtRejected) as refused:
        verified(token, keys, rules, now=now)
    return refused.value.cause


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(algorithm: str) -> None:
    """Each algorithm with public keys is accepted with its key, and not if the claims change."""
    token = signed(CLAIMS, KEYS[ALGORITHMS[algorithm]], algorithm)
    assert verified(token) == "bob"
    head, _, signature = token.split(".")
    forged = f"{head}.{text({**CLAIMS, 'sub': 'admin'})}.{signature}"
    assert cause(forged) == "its signature is not valid"


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "HS256", "HS512", "ES256K", "", 7])
def test_algorithms_without_a_public_key(algorithm: Any) -> None:
    """Unsigned tokens, and those signed with a secret, are refused."""
    token = f"{text({'alg': algorithm, 'kid': EC.kid})}.{text(CLAIMS)}."
    assert cause(token) == "its algorithm is not accepted"


def test_a_public_key_is_not_a_secret() -> None:
    """A token that is signed with HMAC and the issuer's public key as the secret is refused."""
    native = RSA.public_key
    assert isinstance(native, rsa.RSAPublicKey)
    for form in (
        native.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        json.dumps(RSA.as_dict(private=False)).encode(),
    ):
        signing = f"{text({'alg': 'HS256', 'kid': RSA.kid})}.{text(CLAIMS)}"
        signature = hmac.digest(form, signing.encode(), hashlib.sha256)
        assert cause(f"{signing}.{text(signature)}") == "its algorithm is not accepted"
    with_secret = jwks_of(EC, {"kty": "oct", "kid": "s", "k": text(b"x" * 32)})
    assert len(with_secret) == 1


def test_keys_that_a_token_brings_are_not_read() -> None:
    """A key in the header, or an address of one, does not replace the issuer's."""
    mine = generate_key("EC", "P-256", {"kid": "mine"})
    for header in (
        {"jwk": mine.as_dict(private=False)},
        {"jku": "https://evil.example.org/jwks"},
        {"x5u": "https://evil.example.org/chain"},
        {"x5c": ["MIIB"]},
    ):
        assert cause(signed(CLAIMS, mine, **header)) == "its key is not one of the issuer"
        assert cause(signed(CLAIMS, mine, **header, kid=EC.kid)) == "its signature is not valid"


@pytest.mark.parametrize("header", [{"crit": ["exp"], "exp": 1}, {"crit": []}, {"b64": True}])
def test_critical_extensions(header: dict[str, Any]) -> None:
    """A token that demands more than is checked is refused."""
    token = f"{text({'alg': 'ES256', 'kid': EC.kid, **header})}.{text(CLAIMS)}.AAAA"
    assert cause(token) == "it has critical extensions"


def test_an_algorithm_of_another_key() -> None:
    """The key decides which algorithms are possible, not the token."""
    for algorithm, key in (("RS256", EC), ("ES384", EC), ("ES256", RSA)):
        token = f"{text({'alg': algorithm, 'kid': key.kid})}.{text(CLAIMS)}.AAAA"
        assert cause(token) == "its key is not one of the issuer"
    only_rs256 = jwks_of({**RSA.as_dict(private=False), "alg": "RS256"})
    assert verified(signed(CLAIMS, RSA, "RS256"), only_rs256) == "bob"
    assert cause(signed(CLAIMS, RSA, "PS256"), only_rs256) == "its key is not one of the issuer"


def test_a_token_that_names_no_key() -> None:
    """It is accepted if the issuer has one key that fits."""
    token = jws.serialize_compact({"alg": "ES256"}, json.dumps(CLAIMS), EC)
    assert verified(token) == "bob"
    two = jwks_of(EC, generate_key("EC", "P-256", {"kid": "other"}))
    assert "does not name its key" in cause(token, two)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"exp": NOW}, "it has expired"),
        ({"exp": None}, "it has no claim 'exp'"),
        ({"exp": "soon"}, "its claim 'exp' is not a time"),
        ({"exp": True}, "its claim 'exp' is not a time"),
        ({"exp": -1}, "its claim 'exp' is not a time"),
        ({"exp": 10**400}, "its claim 'exp' is not a time"),
        ({"exp": 1e300}, "its claim 'exp' is not a time"),
        ({"nbf": NOW + 1}, "it is not valid yet"),
        ({"nbf": []}, "its claim 'nbf' is not a time"),
        ({"iss": "other"}, "its issuer is not accepted"),
        ({"iss": ["i"]}, "its issuer is not accepted"),
        ({"iss": None}, "its issuer is not accepted"),
        ({"aud": "other"}, "it is for another audience"),
        ({"aud": "a b"}, "it is for another audience"),
        ({"aud": None}, "its claim 'aud' is malformed"),
        ({"aud": {"a": 1}}, "its claim 'aud' is malformed"),
        ({"aud": ["a", 1]}, "its claim 'aud' is malformed"),
        ({"sub": None}, "it names no client"),
        ({"sub": ""}, "it names no client"),
        ({"sub": ["bob"]}, "it names no client"),
    ],
)
def test_claims_that_are_refused(change: dict[str, Any], reason: str) -> None:
    """Each claim that is missing, malformed or another one has its reason."""
    assert cause(signed({**CLAIMS, **change})) == reason
    without = {key: value for key, value in CLAIMS.items() if change.get(key, 1) is not None}
    if without != CLAIMS:
        cause(signed(without))


def test_claims_that_are_accepted() -> None:
    """One of several audiences, in a list; times within the skew; other names of claims."""
    assert verified(signed({**CLAIMS, "aud": ["x", "b"]})) == "bob"
    lenient = JwtRules(issuer="i", audiences=frozenset({"a"}), clock_skew_seconds=30)
    late = signed({**CLAIMS, "exp": NOW - 29, "nbf": NOW + 29})
    assert jwt.verify(late, ALL, lenient, now_seconds=NOW).ends_at == NOW + 1
    assert cause(late, rules=lenient, now=NOW + 1) == "it has expired"
    named = JwtRules(
        issuer="i",
        audiences=frozenset({"a"}),
        scopes=frozenset({"read", "write"}),
        scope_claim="scp",
        sub_claim="client_id",
    )
    for scopes in ("read write more", ["write", "read"]):
        token = signed({**CLAIMS, "scp": scopes, "client_id": "app"})
        assert verified(token, rules=named) == "app"
    token = signed({**CLAIMS, "scp": "read writer", "client_id": "app"})
    assert cause(token, rules=named) == "it lacks a scope"


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(CLAIMS).replace('"sub"', '"sub": "admin", "sub"').encode(),
        json.dumps({**CLAIMS, "x": {"y": 1}}).replace('"y"', '"y": 2, "y"').encode(),
        b"[]",
        b"",
        b"\xff",
        b'{"exp": NaN}',
        b"[" * 10_000,
    ],
    ids=["twice", "twice within", "list", "empty", "bytes", "NaN", "deep"],
)
def test_claims_that_are_malformed(content: bytes) -> None:
    """A name that occurs twice is refused, as other programs may read the other value."""
    assert cause(signed(content)) == "its claims are malformed"


@pytest.mark.parametrize(
    "token",
    [
        "",
        "a.b",
        "a.b.c.d",
        "a.b.c.d.e",
        "..",
        "é.é.é",
        f"{text([])}.{text(CLAIMS)}.A",
        "x" * 17_000,
    ],
)
def test_what_is_not_a_token(token: str) -> None:
    """Text that is not a signed JWT is refused, also an encrypted one."""
    assert cause(token)


def test_names_that_occur_twice_in_the_header() -> None:
    """They are refused before a key is looked for."""
    header = f'{{"alg":"none","alg":"ES256","kid":"{EC.kid}"}}'.encode()
    assert cause(f"{text(header)}.{text(CLAIMS)}.A") == "it is not a signed JWT"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_a_token(data: st.DataObject) -> None:
    """No change of a signed token is accepted, and none raises another error."""
    token = signed(CLAIMS)
    at = data.draw(st.integers(0, len(token) - 1))
    end = data.draw(st.integers(at, min(len(token), at + 3)))
    changed = token[:at] + data.draw(st.text(max_size=3)) + token[end:]
    if changed != token:
        cause(changed)


# ------------------------------------------------------------------------------ keys


def test_keys_that_cannot_be_used_are_left_out() -> None:
    """Secrets, keys for encryption, unknown types and short keys do not spoil the others."""
    small = (
        rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key().public_numbers()
    )
    n = small.n.to_bytes(128, "big")
    others = [
        {"kty": "oct", "k": text(b"x" * 32)},
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"},
        {**EC.as_dict(private=False), "use": "enc"},
        {**EC.as_dict(private=False), "key_ops": ["sign"]},
        {**EC.as_dict(private=False), "key_ops": 5},
        {**EC.as_dict(private=False), "crv": "secp256k1"},
        {**EC.as_dict(private=False), "x": "!"},
        {**EC.as_dict(private=False), "x": 5},
        {"kty": "RSA", "kid": "small", "n": text(n), "e": "AQAB"},
        {"kty": "RSA", "kid": "none"},
        {},
        5,
    ]
    assert len(jwks_of(*others, EC)) == 1
    with pytest.raises(ValueError, match="no RSA, EC or OKP key"):
        Jwks(json.dumps({"keys": others}).encode())


def test_private_keys_are_not_read() -> None:
    """Only the public part is used, if an issuer publishes its private key by mistake."""
    found = jwks_of(RSA.as_dict(private=True)).find("RS256", str(RSA.kid))
    assert isinstance(found, RSAKey)
    assert not found.is_private


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b'{"keys": 5}', b'{"keys": []}', b"<html>", b"[" * 9999, b" " * 300_000],
)
def test_what_is_not_a_jwks(content: bytes) -> None:
    """Anything else raises ValueError with the reason."""
    with pytest.raises(ValueError, match=r"\w"):
        Jwks(content)


def test_an_unknown_key_has_an_error_of_its_own() -> None:
    """The caller may then fetch the keys again."""
    with pytest.raises(UnknownKey):
        verified(signed(CLAIMS, kid="new"))


# ------------------------------------------------------------------------------ OAUTHBEARER


@pytest.mark.parametrize(
    ("message", "acting"),
    [
        ("n,,\x01auth=Bearer a.b-c_d\x01\x01", ""),
        ("n,,\x01auth=bearer   a.b-c_d\x01\x01", ""),
        ("n,a=al=2Cice=3D,\x01auth=Bearer a.b-c_d\x01\x01", "al,ice="),
        ("n,,\x01auth=Bearer a.b-c_d\x01logicalCluster=lkc-1\x01x=a b\x01\x01", ""),
        ("n,,\x01logicalCluster=lkc-1\x01auth=Bearer a.b-c_d\x01\x01", ""),
    ],
)
def test_messages_of_clients(message: str, acting: str) -> None:
    """The message has a token, perhaps a name and extensions (RFC 7628, KIP-342)."""
    assert read_response(message.encode()) == ("a.b-c_d", acting)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "\x01",
        "n,,",
        "n,,\x01\x01",
        "y,,\x01auth=Bearer a\x01\x01",
        "p=tls-unique,,\x01auth=Bearer a\x01\x01",
        "n,a=,\x01auth=Bearer a\x01\x01",
        "n,a=x=y,\x01auth=Bearer a\x01\x01",
        "n,,\x01auth=Bearer a\x01",
        "n,,\x01auth=Basic a\x01\x01",
        "n,,\x01auth=Bearer\x01\x01",
        "n,,\x01auth=Bearer a b\x01\x01",
        "n,,\x01auth=Bearer a\x01auth=Bearer b\x01\x01",
        "n,,\x01auth=Bearer a\x01x1=y\x01\x01",
        "n,,\x01auth=Bearer a\x01x=\x01\x01",
        "n,,\x01auth=Bearer a\x01x\x01\x01",
        "n,,\x01auth=Bearer a\x01\x01more",
        "n,,\x01auth=Bearer é\x01\x01",
        "n,,\x01auth=Bearer " + "a" * 25_000 + "\x01\x01",
    ],
)
def test_malformed_messages_of_clients(message: str) -> None:
    """Anything else raises ValueError with the reason."""
    with pytest.raises(ValueError, match=r"\w"):
        read_response(message.encode())
