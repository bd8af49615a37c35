"""Addresses to listen at: bound first, listened at later, and given back whatever happens."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparklog import errors, limits
from sparklog.broker.ports import BoundPort
from tests.support.descriptors import sockets

OPTION = "flight.listen"
NO_IPV6 = not socket.has_ipv6
ANY_PORT = [
    "127.0.0.1:0",
    "localhost:0",
    "0.0.0.0:0",
    pytest.param("[::1]:0", marks=pytest.mark.skipif(NO_IPV6, reason="no IPv6 here")),
    pytest.param("[::]:0", marks=pytest.mark.skipif(NO_IPV6, reason="no IPv6 here")),
]


@pytest.fixture(autouse=True)
def _given_back() -> Iterator[None]:
    """No test here leaves a socket open."""
    before = sockets()
    yield
    assert sockets() == before


@contextlib.contextmanager
def bound(listen: str) -> Iterator[BoundPort]:
    """A listener that is bound, and closed in the end."""
    with contextlib.closing(BoundPort(OPTION, listen)) as found:
        found.bind(patience_seconds=0.0)
        yield found


def reached(listener: BoundPort) -> bool:
    """Returns true if the listener accepts a connection."""
    host = listener.address.rpartition(":")[0].strip("[]")
    try:
        socket.create_connection((host, listener.port), 1.0).close()
    except ConnectionRefusedError:
        return False
    return True


def try_to_take(port: int, *, shares: bool) -> int | None:
    """The error of another program that wants to listen at a port of the loopback address."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError as error:
            return error.errno
    return None


@pytest.mark.parametrize("listen", ANY_PORT)
def test_a_connection_is_refused_until_it_listens(listen: str) -> None:
    """The address is known before, with the port that the system has given."""
    with bound(listen) as listener:
        address = listener.address
        assert listener.port
        assert address == f"{listen.rpartition(':')[0]}:{listener.port}"
        assert not reached(listener)
        listening = listener.listen(patience_seconds=0.0)
        assert listening.getsockname()[1] == listener.port
        assert listener.address == address
        assert reached(listener)
    assert not reached(BoundPort(OPTION, address))


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_of_the_system_is_kept(shares: bool) -> None:
    """No other program can take the port between bind and listen."""
    with bound("127.0.0.1:0") as listener:
        assert try_to_take(listener.port, shares=shares) == errno.EADDRINUSE
        listener.listen(patience_seconds=0.0)
        assert reached(listener)


def test_a_port_of_the_system_can_be_bound_again_at_once() -> None:
    """Although its last connections, which the broker has ended, are remembered for a minute."""
    with bound("127.0.0.1:0") as listener:
        listening = listener.listen(patience_seconds=0.0)
        address = listener.address
        with socket.create_connection(("127.0.0.1", listener.port), 1.0) as client:
            listening.accept()[0].close()
            assert client.recv(1) == b""
    with bound(address) as again:
        again.listen(patience_seconds=0.0)
        assert reached(again)


def test_a_port_where_another_program_listens() -> None:
    """It is not bound, and the error names the setting and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with contextlib.closing(BoundPort(OPTION, listen)) as listener:
            assert not listener.try_bind()
            for wait in (listener.bind, listener.listen):
                with pytest.raises(
                    errors.BadOption, match=r"another program listens there; stop it, or.*--flight"
                ) as refused:
                    wait(patience_seconds=0.0)
                assert (refused.value.option, refused.value.value) == (OPTION, listen)
            threading.Timer(0.2, taken.close).start()
            listener.listen(patience_seconds=10.0)
            assert reached(listener)


def test_of_two_that_are_bound_the_first_gets_to_listen() -> None:
    """The other's error names the program that listens, or it listens when that has gone."""
    with bound("127.0.0.1:0") as first:
        first.listen(patience_seconds=0.0)
        address = first.address
    with bound(address) as first, bound(address) as second:
        first.listen(patience_seconds=0.0)
        with pytest.raises(errors.BadOption, match="another program listens there"):
            second.listen(patience_seconds=0.0)
        assert reached(first)
        threading.Timer(0.2, first.close).start()
        second.listen(patience_seconds=10.0)
        assert reached(second)


def test_of_many_that_begin_at_a_time_one_gets_to_listen() -> None:
    """However their steps mix; those that hinder each other try again."""
    with bound("127.0.0.1:0") as any_port:
        address = any_port.address
    count = 4
    for _ in range(10):
        listeners = [BoundPort(OPTION, address) for _ in range(count)]
        together = threading.Barrier(count)

        def begin(listener: BoundPort, together: threading.Barrier = together) -> bool:
            together.wait()
            try:
                listener.bind(patience_seconds=0.0)
                listener.listen(patience_seconds=0.2)
            except errors.BadOption:
                return False
            return True

        with ThreadPoolExecutor(count) as pool:
            assert sum(pool.map(begin, listeners)) == 1
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
    [
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "127.0.0.2", False),
        pytest.param(
            "0.0.0.0", "[::]", False, marks=pytest.mark.skipif(NO_IPV6, reason="no IPv6 here")
        ),
        pytest.param(
            "[::1]", "[::]", True, marks=pytest.mark.skipif(NO_IPV6, reason="no IPv6 here")
        ),
    ],
)
def test_addresses_of_which_one_can_be_listened_at(one: str, other: str, overlaps: bool) -> None:
    """By another name, or as one of all."""
    with bound("127.0.0.1:0") as any_port:
        any_port.listen(patience_seconds=0.0)
        port = any_port.port
    with bound(f"{one}:{port}") as first, bound(f"{other}:{port}") as second:
        assert first.overlaps(second) == second.overlaps(first) == overlaps
        first.listen(patience_seconds=0.0)
        if overlaps:
            with pytest.raises(errors.BadOption):
                second.listen(patience_seconds=0.0)
        else:
            second.listen(patience_seconds=0.0)
    with bound("127.0.0.1:0") as first, bound("127.0.0.1:0") as second:
        assert not first.overlaps(second)
        assert not first.overlaps(BoundPort(OPTION, first.address))


@pytest.mark.skipif(NO_IPV6, reason="no IPv6 here")
def test_addresses_of_both_versions_have_ports_of_their_own() -> None:
    """All of IPv6 can be listened at where another program listens at all of IPv4."""
    other = socket.create_server(("0.0.0.0", 0))
    with other, bound(f"[::]:{other.getsockname()[1]}") as listener:
        listener.listen(patience_seconds=0.0)
        assert reached(listener)


@pytest.mark.parametrize("port", [0, 8815])
@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("192.0.2.1", "192.0.2.1 is not an address of this machine; listen at another address"),
        ("no.invalid", "the host 'no.invalid' is unknown on this machine; listen at"),
        ("a..b", "the host 'a..b' is unknown on this machine; listen at"),
    ],
)
def test_a_host_that_is_not_here_is_named(host: str, port: int, told: str) -> None:
    """At once, whichever port is asked for and however patient the broker is."""
    listener = BoundPort(OPTION, f"{host}:{port}")
    began = time.monotonic()
    for attempt in (
        listener.try_bind,
        lambda: listener.bind(patience_seconds=60.0),
        lambda: listener.listen(patience_seconds=60.0),
    ):
        with pytest.raises(errors.BadOption, match=told) as refused:
            attempt()
        assert refused.value.value == f"{host}:{port}"
    assert time.monotonic() - began < 30.0
    listener.close()


def test_as_many_connections_wait_as_there_may() -> None:
    """A burst of clients is not refused while the broker accepts the first."""
    with bound("127.0.0.1:0") as listener, contextlib.ExitStack() as stack:
        listener.listen(patience_seconds=0.0)
        for _ in range(min(200, limits.LISTEN_BACKLOG)):
            client = socket.create_connection(("127.0.0.1", listener.port), 1.0)
            stack.enter_context(client)
