"""SCRAM, on both sides."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.security import scram
from sparklog.security.scram import (
    DrawnVerifiers,
    Mechanism,
    ScramClient,
    ScramError,
    ScramServer,
    Verifier,
)

SHA_256 = Mechanism.SHA_256
DRAWN = DrawnVerifiers(bytes(range(64)))


def server(
    user: str = "alice", password: str = "secret", mechanism: Mechanism = SHA_256
) -> ScramServer:
    """Returns a server that knows one user."""
    known = {user: scram.verifier_of(mechanism, password)}
    return ScramServer(mechanism, lambda name: known.get(name) or DRAWN.of(mechanism, name))


def log_in(at: ScramServer, client: ScramClient) -> None:
    """Exchanges all messages."""
    client.check(at.step(client.final(at.step(client.first()))))


def test_the_exchange_of_rfc_7677() -> None:
    """The messages of the RFC's example, byte by byte."""
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    verifier = scram.verifier_of(SHA_256, "pencil", salt=salt)
    at = ScramServer(SHA_256, lambda _: verifier, nonce=lambda: "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    client = ScramClient(SHA_256, "user", "pencil", nonce=lambda: "rOprNGfwEbeRWgbNEkqO")
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    assert client.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    challenge = at.step(client.first())
    assert challenge == f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    proof = client.final(challenge)
    expected = f"c=biws,r={nonce},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    assert proof == expected.encode()
    answer = at.step(proof)
    assert answer == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    client.check(answer)
    assert at.user == "user"


@settings(max_examples=20)
@given(
    st.sampled_from(list(Mechanism)),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)
def test_any_name_and_password(mechanism: Mechanism, user: str, password: str) -> None:
    """Names with commas, equals signs and any script; the server learns no password."""
    at = server(user, password, mechanism)
    client = ScramClient(mechanism, user, password)
    log_in(at, client)
    assert at.user == user


def test_a_wrong_password_and_an_unknown_user_fail_alike() -> None:
    """At the same step, and with the same words."""
    found = []
    for user, password in (("alice", "wrong"), ("nobody", "secret")):
        at, client = server(), ScramClient(SHA_256, user, password)
        proof = client.final(at.step(client.first()))
        with pytest.raises(ScramError) as failed:
            at.step(proof)
        assert at.user is None
        found.append(str(failed.value))
    assert found[0] == found[1]


def test_an_unknown_user_has_the_same_salt_each_time() -> None:
    """Otherwise two logins would show which users exist."""
    first, again = DRAWN.of(SHA_256, "nobody"), DRAWN.of(SHA_256, "nobody")
    assert (first.salt, first.iterations) == (again.salt, again.iterations)
    assert len(first.salt) == scram.SALT_BYTES
    assert first.salt != DRAWN.of(SHA_256, "other").salt
    assert first.salt != DRAWN.of(Mechanism.SHA_512, "nobody").salt


FIRST = b"n,,n=alice,r=abc"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"y,,n=alice,r=abc",
        b"p=tls-unique,,n=alice,r=abc",
        b"n,a=bob,n=alice,r=abc",
        b"n,,m=x,n=alice,r=abc",
        b"n,,n=,r=abc",
        b"n,,n=al=2ice,r=abc",
        b"n,,n=alice",
        b"n,,n=alice,r=",
        b"n,,n=a\0b,r=abc",
        b"n,,n=alice,r=" + bytes(range(0x41, 0x5B)) * 200,
    ],
)
def test_first_messages_that_are_refused(message: bytes) -> None:
    """Channel binding, another authorization id, mandatory extensions, and malformed messages."""
    with pytest.raises(ScramError):
        server().step(message)


def test_the_own_name_as_authorization_id_is_accepted() -> None:
    """aiokafka and kafka-python send it in PLAIN, and others may here."""
    assert server().step(b"n,a=alice,n=alice,r=abc").startswith(b"r=abc")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda proof: proof.replace(b"c=biws", b"c=eSws"), "channel binding"),
        (lambda proof: proof.replace(b"r=abc", b"r=abd"), "nonce"),
        (lambda proof: proof[:-8] + b"AAAAAAA=", "password is wrong"),
        (lambda proof: proof[: proof.index(b",p=")] + b",p=AAAA", "another length"),
        (lambda proof: proof[: proof.index(b",p=")], "malformed"),
        (lambda proof: proof + b",x=1", "malformed"),
        (lambda proof: proof.replace(b",p=", b",p=!"), "malformed"),
    ],
)
def test_last_messages_that_are_refused(change, reason: str) -> None:  # type: ignore[no-untyped-def]
    """A proof of another exchange, another binding, another length, another user."""
    at = server()
    client = ScramClient(SHA_256, "alice", "secret", nonce=lambda: "abc")
    proof = client.final(at.step(client.first()))
    with pytest.raises(ScramError, match=reason):
        at.step(change(proof))
    assert at.user is None


def test_a_proof_is_of_one_exchange() -> None:
    """Replayed at another login of the same user, its nonce is refused."""
    client = ScramClient(SHA_256, "alice", "secret", nonce=lambda: "abc")
    first, second = server(), server()
    proof = client.final(first.step(client.first()))
    second.step(client.first())
    with pytest.raises(ScramError, match="nonce"):
        second.step(proof)


@pytest.mark.parametrize(
    ("challenge", "reason"),
    [
        (b"r=abcdef,s=AAAA,i=1", "1 iterations"),
        (b"r=abcdef,s=AAAA,i=999999999", "999999999 iterations"),
        (b"r=xyz,s=AAAA,i=4096", "nonce"),
        (b"r=abc,s=AAAA,i=4096", "nonce"),
        (b"r=abcdef,s=A,i=4096", "base64"),
        (b"e=unknown-user", "malformed"),
    ],
)
def test_challenges_that_a_client_refuses(challenge: bytes, reason: str) -> None:
    """A false server gets no proof that it could search for the password."""
    with pytest.raises(ScramError, match=reason):
        ScramClient(SHA_256, "alice", "secret", nonce=lambda: "abc").final(challenge)


@pytest.mark.parametrize("answer", [b"v=AAAA", b"e=invalid-proof", b"", b"v=!"])
def test_a_server_must_prove_itself(answer: bytes) -> None:
    """A program that listens on the port of a dead broker cannot."""
    at, client = server(), ScramClient(SHA_256, "alice", "secret")
    client.final(at.step(client.first()))
    with pytest.raises(ScramError):
        client.check(answer)


def test_a_password_is_checked_by_its_verifier() -> None:
    """As SASL PLAIN needs it; a verifier prints nothing of the password."""
    verifier = scram.verifier_of(SHA_256, "secret")
    assert scram.is_password(SHA_256, verifier, "secret")
    assert not scram.is_password(SHA_256, verifier, "Secret")
    assert repr(verifier) == "Verifier(…, iterations=4096)"
    assert isinstance(verifier, Verifier)
