"""Names, protocols and addresses of listeners."""

from __future__ import annotations

import pytest

from sparklog import listeners
from sparklog.listeners import Listener


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("h:1", [("PLAINTEXT", "PLAINTEXT", "h:1")]),
        ("SSL://h:1", [("SSL", "SSL", "h:1")]),
        ("OUT=SSL://[::1]:1", [("OUT", "SSL", "[::1]:1")]),
        (
            "h:1, OUT=SSL://k:2,IN=PLAINTEXT://k:3",
            [("PLAINTEXT", "PLAINTEXT", "h:1"), ("OUT", "SSL", "k:2"), ("IN", "PLAINTEXT", "k:3")],
        ),
    ],
)
def test_listeners_are_parsed(text: str, expected: list[tuple[str, str, str]]) -> None:
    """And written in the shortest form that is parsed to the same."""
    found = listeners.parse(text)
    assert [*map(tuple, found)] == expected
    assert listeners.text_of(found) == text.replace(" ", "")


def test_hosts_and_ports() -> None:
    """An IPv6 host is without its brackets, as clients get it."""
    (found,) = listeners.parse("SSL://[fd00::7]:9093")
    assert (found.host, found.port) == ("fd00::7", 9093)


def test_addresses_by_name() -> None:
    """As `kafka.advertised` has them."""
    for text, expected in (
        ("", []),
        ("k:1", [("", "k:1")]),
        ("A=k:1,B=[::1]:2", [("A", "k:1"), ("B", "[::1]:2")]),
    ):
        found = listeners.parse_addresses(text)
        assert found == expected
        assert listeners.text_of_addresses(found) == text


@pytest.mark.parametrize(
    ("wanted", "is_served"),
    [
        ("SSL://h:1", True),
        ("SSL://h:0", True),
        ("SSL://h:2", False),
        ("h:1", False),
        ("OUT=SSL://h:1", False),
    ],
)
def test_a_wanted_listener_is_recognised(wanted: str, *, is_served: bool) -> None:
    """By its name, protocol and address, where port 0 is any."""
    (found,) = listeners.parse(wanted)
    assert found.is_served_by(Listener("SSL", "SSL", "h:1")) == is_served


@pytest.mark.parametrize(
    ("text", "is_loopback", "has_tls", "has_sasl"),
    [
        ("127.0.0.1:1", True, False, False),
        ("SSL://localhost:1", True, True, False),
        ("SASL_PLAINTEXT://[::1]:1", True, False, True),
        ("SASL_SSL://0.0.0.0:1", False, True, True),
        ("SASL_SSL://broker.example.org:1", False, True, True),
    ],
)
def test_what_a_listener_offers(
    text: str, is_loopback: bool, has_tls: bool, has_sasl: bool
) -> None:
    """Promise: a name that may be any host's is not loopback, so PLAIN is not offered there."""
    (found,) = listeners.parse(text)
    assert (found.is_loopback, found.has_tls, found.has_sasl) == (is_loopback, has_tls, has_sasl)
