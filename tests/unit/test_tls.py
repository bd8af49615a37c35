"""TLS in memory."""

from __future__ import annotations

import ssl
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors
from sparklog.broker.tls import contexts
from sparklog.broker.tls.contexts import ServerTls, TlsFiles, server_context
from sparklog.broker.tls.engine import (
    HANDSHAKE_RECORDS,
    IDLE_RECORDS,
    STEP_BYTES,
    TlsEngine,
    TlsFailed,
)
from sparklog.broker.tls.handshakes import Handshakes
from sparklog.clock import ManualClock
from sparklog.security.certificates import covers
from tests.support.certificates import Authority


@pytest.fixture(name="server", scope="module")
def _server(authority: Authority) -> ssl.SSLContext:
    certificate, key = authority.sign("broker")
    return server_context(TlsFiles(certificate=certificate, key=key))


def client_of(authority: Authority) -> ssl.SSLContext:
    """Returns the context of a client that trusts the authority."""
    return ssl.create_default_context(cafile=authority.path)


def connect(
    server: ssl.SSLContext, client: ssl.SSLContext, *, host: str = "localhost", step: int = 9999
) -> tuple[TlsEngine, TlsEngine]:
    """Returns the two ends after their handshake, whose bytes came in steps."""
    ends = TlsEngine(server, is_server=True), TlsEngine(client, is_server=False, host=host)
    at, other = ends
    done = {at: False, other: False}
    other.handshake()
    for _ in range(1_000):
        data = other.take_outgoing()
        for first in range(0, len(data), step):
            done[at] = at.handshake(data[first : first + step])
        at, other = other, at
        if all(done.values()) and not at.take_outgoing():
            return ends
    raise AssertionError("the handshake does not end")


def pass_on(source: TlsEngine, target: TlsEngine, chunks: list[bytes], room: int) -> bytes:
    """Returns what the target decrypts, with a buffer of `room` bytes."""
    found, buffer = bytearray(), memoryview(bytearray(room))
    for ciphertext in source.encrypt(chunks):
        for first in range(0, len(ciphertext), STEP_BYTES):
            target.receive(ciphertext[first : first + STEP_BYTES])
            while size := target.read_into(buffer):
                found += buffer[:size]
    return bytes(found)


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.lists(st.binary(max_size=200) | st.integers(0, 300_000).map(bytes), max_size=5),
    room=st.sampled_from([1, 7, 32_768, 100_000]),
    step=st.sampled_from([1, 100, 9_999]),
)
def test_what_is_encrypted_is_decrypted(
    authority: Authority, server: ssl.SSLContext, chunks: list[bytes], room: int, step: int
) -> None:
    """Both ways, in steps of any size."""
    if room < 100:
        chunks = [each[:1_000] for each in chunks]
    ends = connect(server, client_of(authority), step=step)
    for source, target in (ends, ends[::-1]):
        assert pass_on(source, target, chunks, room) == b"".join(chunks)


def test_an_end_is_noticed(authority: Authority, server: ssl.SSLContext) -> None:
    """By the alert, or by the end of the connection; earlier bytes are read first."""
    at, other = connect(server, client_of(authority))
    assert pass_on(other, at, [b"last"], 100) == b"last"
    at.receive(other.close())
    assert (at.read_into(memoryview(bytearray(9))), at.is_over) == (0, True)
    at, other = connect(server, client_of(authority))
    at.end()
    assert (at.read_into(memoryview(bytearray(9))), at.is_over) == (0, True)


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (b"\0\0\0\x10\0\x12\0\x03" + bytes(20), "does not use TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "does not use TLS"),
        (b"\x16\x03\x01\xff\xff" + b"\xff" * 50, "is not TLS"),
    ],
)
def test_a_client_without_tls_is_named(server: ssl.SSLContext, sent: bytes, cause: str) -> None:
    """The log of the broker says what to do at the client."""
    with pytest.raises(TlsFailed, match=cause):
        TlsEngine(server, is_server=True).handshake(sent)


def test_a_cut_record_is_refused(authority: Authority, server: ssl.SSLContext) -> None:
    """A changed byte ends the connection."""
    at, other = connect(server, client_of(authority))
    (ciphertext,) = other.encrypt([b"x" * 100])
    at.receive(ciphertext[:-1] + bytes([ciphertext[-1] ^ 1]))
    with pytest.raises(TlsFailed):
        at.read_into(memoryview(bytearray(200)))


def test_certificates_that_clients_refuse(tmp_path: Path, authority: Authority) -> None:
    """Expired, of another host, of another CA: the server's log names the cause."""
    expired = server_context(files_of(authority.sign("old", days=-1)))
    elsewhere = server_context(files_of(authority.sign("else", hosts=("example.org",))))
    other = server_context(files_of(Authority(tmp_path, "ca-2").sign("other")))
    for context, cause in (
        (expired, "expired"),
        (elsewhere, "host name"),
        (other, "CA"),
    ):
        at = TlsEngine(context, is_server=True)
        client = TlsEngine(client_of(authority), is_server=False, host="localhost")
        client.handshake()
        at.handshake(client.take_outgoing())
        with pytest.raises(TlsFailed):
            client.handshake(at.take_outgoing())
        with pytest.raises(TlsFailed, match=cause):
            at.handshake(client.take_outgoing())


def test_certificates_of_clients(tmp_path: Path, authority: Authority) -> None:
    """Required: a client needs one of this CA, for clients."""
    files = files_of(authority.sign("mtls"), ca=authority.path, client_auth="required")
    server = server_context(files)
    certificate, key = authority.sign("alice", is_client=True)
    client = client_of(authority)
    client.load_cert_chain(certificate, key)
    connect(server, client)
    for wrong, cause in (
        (authority.sign("server"), "certificate purpose"),
        (authority.sign("old", is_client=True, days=-1), "expired"),
        (Authority(tmp_path, "other").sign("mallory", is_client=True), "issuer"),
    ):
        client = client_of(authority)
        client.load_cert_chain(*wrong)
        with pytest.raises(TlsFailed, match=f"the client's certificate is refused.*{cause}"):
            connect(server, client)
    with pytest.raises(TlsFailed, match="no certificate"):
        connect(server, client_of(authority))


def files_of(paths: tuple[str, str], **more: Any) -> TlsFiles:
    """Returns the files of a certificate and its key."""
    return TlsFiles(certificate=paths[0], key=paths[1], **more)


def test_old_clients_are_refused(authority: Authority, server: ssl.SSLContext) -> None:
    """TLS 1.1, and ciphers without forward secrecy."""
    old = client_of(authority)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.set_ciphers("AES128-GCM-SHA256")
    with pytest.raises(TlsFailed, match="forward secrecy"):
        connect(server, old)


def test_files_that_do_not_fit(tmp_path: Path, authority: Authority) -> None:
    """The error names the setting, the file and the cause."""
    certificate, key = authority.sign("one")
    _, other_key = authority.sign("two")
    _, locked = authority.sign("three", password="secret")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    long = tmp_path / "long"
    long.write_text("x" * 2_000)

    def locked_by(password: Path) -> TlsFiles:
        return TlsFiles(certificate=certificate, key=locked, key_password_file=str(password))

    for files, reason in (
        (TlsFiles(certificate=certificate, key=other_key), "tls.key.*not the key of"),
        (TlsFiles(certificate=certificate, key=str(tmp_path / "no")), "tls.key.*cannot be read"),
        (TlsFiles(certificate=str(garbage), key=key), "not PEM"),
        (locked_by(garbage), "does not contain its password"),
        (locked_by(tmp_path / "no"), "tls.key_password_file.*cannot be read"),
        (locked_by(long), "tls.key_password_file"),
        (
            TlsFiles(certificate=certificate, key=key, ca=str(garbage), client_auth="required"),
            "tls.ca.*not PEM",
        ),
        (TlsFiles(certificate=certificate, key=key, ca=authority.path), "tls.ca.*no effect"),
        (TlsFiles(certificate=certificate, key=key, client_auth="required"), "need tls.ca"),
    ):
        with pytest.raises(errors.BadOption, match=reason):
            server_context(files)


def test_a_key_with_a_password(tmp_path: Path, authority: Authority) -> None:
    """Which is in a file, with or without a newline at its end."""
    for end in ("", "\n", "\r\n"):
        (tmp_path / "password").write_bytes(b"secret" + end.encode())
        files = files_of(
            authority.sign("locked", password="secret"),
            key_password_file=str(tmp_path / "password"),
        )
        connect(server_context(files), client_of(authority))


def test_records_without_data_are_few(authority: Authority) -> None:
    """Promise: what costs work and carries nothing, such as a flood of key updates, is cut short.

    Session tickets are such records, of a server that sends more of them than it should.
    """
    certificate, key = authority.sign("tickets")
    for tickets, is_accepted in ((IDLE_RECORDS, True), (IDLE_RECORDS + 1, False)):
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate, key)
        server.num_tickets = tickets
        at = TlsEngine(server, is_server=True)
        other = TlsEngine(client_of(authority), is_server=False, host="localhost")
        other.handshake()
        at.handshake(other.take_outgoing())
        assert other.handshake(at.take_outgoing())
        assert at.handshake(other.take_outgoing())
        other.receive(at.take_outgoing())
        other.receive(b"".join(at.encrypt([b"data"])))
        buffer = memoryview(bytearray(9))
        if is_accepted:
            assert bytes(buffer[: other.read_into(buffer)]) == b"data"
        else:
            with pytest.raises(TlsFailed, match="records without data"):
                other.read_into(buffer)


def test_a_handshake_of_tiny_records_ends(server: ssl.SSLContext) -> None:
    """Each fragment costs a call: a certificate of a hundred kilobytes would take as many."""
    at = TlsEngine(server, is_server=True)
    with pytest.raises(TlsFailed, match="records without data"):
        at.handshake(b"\x16\x03\x01\0\4\1\1\0\0" + b"\x16\x03\x01\0\1x" * (HANDSHAKE_RECORDS + 1))
    with pytest.raises(TlsFailed, match="is not TLS"):
        TlsEngine(server, is_server=True).handshake(b"\x16\x03\x01\xff\xff")


def test_nothing_is_written_after_a_damaged_record(
    authority: Authority, server: ssl.SSLContext
) -> None:
    """It is the same error that the reader gets, so that it is logged as one."""
    at, other = connect(server, client_of(authority))
    (ciphertext,) = other.encrypt([b"x" * 100])
    at.receive(ciphertext[:-1] + bytes([ciphertext[-1] ^ 1]))
    with pytest.raises(TlsFailed):
        at.read_into(memoryview(bytearray(200)))
    with pytest.raises(TlsFailed):
        list(at.encrypt([b"reply"]))


class Log:
    """Log lines about the certificate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        for level in ("info", "warning", "error"):
            monkeypatch.setattr(contexts._log, level, partial(self._note, level))

    def _note(self, level: str, event: str, *values: object, **facts: object) -> None:
        self.lines.append(f"{level}: {event % values if values else event} {facts}")

    def take(self) -> str:
        """Returns the lines since the last call."""
        lines, self.lines = self.lines, []
        return "\n".join(lines)


def test_new_files_are_loaded_only_if_they_are_valid(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a certificate is replaced under connections, one half copied changes nothing."""
    log = Log(monkeypatch)
    paths = tmp_path / "c.pem", tmp_path / "c.key"

    def copy(index: int, source: str) -> None:
        paths[index].write_bytes(Path(source).read_bytes())

    for index, source in enumerate(authority.sign("first")):
        copy(index, source)
    clock = ManualClock(time.time_ns() // 1_000)
    tls = ServerTls(files_of((str(paths[0]), str(paths[1]))), clock=clock)
    first = tls.context
    at, other = connect(first, client_of(authority))
    tls.refresh()
    assert (tls.context, log.take()) == (first, "")
    certificate, key = authority.sign("second")
    copy(0, certificate)
    tls.refresh()
    assert tls.context is first
    assert "not the key" in tls.failure
    assert "keeping the old certificate" in log.take()
    tls.refresh()
    assert log.take() == ""  # said once
    with monkeypatch.context() as patched:  # no file descriptor is free
        patched.setattr(contexts, "_content", mock.Mock(side_effect=OSError(24, "EMFILE")))
        tls.refresh()
    assert "EMFILE" in log.take()
    copy(1, key)
    tls.refresh()
    assert tls.context is not first
    assert (tls.failure, "loaded a new certificate" in log.take()) == ("", True)
    connect(tls.context, client_of(authority))
    assert pass_on(other, at, [b"still"], 100) == b"still"


def test_the_log_says_daily_that_a_certificate_expires(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two weeks before."""
    log = Log(monkeypatch)
    clock = ManualClock(time.time_ns() // 1_000)
    tls = ServerTls(files_of(authority.sign("month", days=30)), clock=clock)
    told = []
    for _ in range(32 * 24):
        tls.refresh()
        told += [log.take().partition(":")[0]]
        clock.advance(3600)
    days = ["".join(told[day * 24 : day * 24 + 24]) for day in range(32)]
    assert days == [""] * 16 + ["warning"] * 14 + ["error"] * 2


@pytest.mark.parametrize(
    ("host", "is_covered"),
    [
        ("k1.example.org", True),
        ("K1.EXAMPLE.ORG.", True),
        ("a.pods.example.org", True),
        ("a.b.pods.example.org", False),
        ("pods.example.org", False),
        ("10.0.0.7", True),
        ("[fd00::7]", True),
        ("10.0.0.8", False),
        ("localhost", False),
    ],
)
def test_hosts_that_a_certificate_covers(
    authority: Authority, host: str, *, is_covered: bool
) -> None:
    """As OpenSSL's client decides, so that the log's warning is right."""
    hosts = ("k1.example.org", "*.pods.example.org", "10.0.0.7", "fd00::7")
    files = files_of(authority.sign("hosts", hosts=hosts))
    assert covers(ServerTls(files).certificate, host) == is_covered
    at = TlsEngine(server_context(files), is_server=True)
    other = TlsEngine(client_of(authority), is_server=False, host=host.strip("[]").rstrip("."))
    other.handshake()
    at.handshake(other.take_outgoing())
    try:
        is_accepted = other.handshake(at.take_outgoing())
    except TlsFailed:
        is_accepted = False
    assert is_accepted == is_covered


def test_handshakes_take_turns_by_address() -> None:
    """Promise: a thousand handshakes of one address delay another one by a single step."""
    handshakes = Handshakes()
    started, may_go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def first(_: bytes) -> bool:
        started.set()
        return may_go_on.wait(30)

    def step(received: bytes) -> bool:
        done.append(received.decode())
        return True

    futures = [handshakes.submit("a", first, b"")]
    assert started.wait(30)
    futures += [handshakes.submit("a", step, b"a") for _ in range(1_000)]
    cancelled = handshakes.submit("c", step, b"c")
    futures.append(handshakes.submit("b", step, b"b"))
    cancelled.cancel()
    may_go_on.set()
    assert all(each.result(30) for each in futures)
    assert done == ["a", "b", *["a"] * 999]
    handshakes.close()
    assert handshakes.submit("a", step, b"late").cancelled()
