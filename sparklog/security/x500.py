"""The names of clients in their certificates, as text; pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

PrincipalForm = Literal["dn", "cn"]
"""The part of a certificate's subject that names its principal: all of it, or the common name."""


class CertificatePrincipal(NamedTuple):
    """The principal that a client's certificate names."""

    name: str
    ends_at: float
    """When the certificate expires, in seconds since 1970."""


def distinguished_name(subject: bytes) -> str:
    """Returns a name (RFC 5280 `Name`, in DER) in the form of RFC 2253, such as `CN=app,O=shop`.

    The text is that of Java's `X500Principal.getName()`, by which Kafka calls a client with a
    certificate. `x509.Name.rfc4514_string` escapes other characters, and knows other types.

    Raises ValueError for a value that is not UTF-8, or that Java reads as another text.
    """
    parts = ["+".join(map(_attribute, each)) for each in _relative_names(subject)]
    return ",".join(reversed(parts))


def common_name(subject: bytes) -> str:
    """Returns the only common name in a name (RFC 5280 `Name`, in DER).

    Raises ValueError if there is none, or more than one.
    """
    found = [
        value for each in _relative_names(subject) for kind, value in each if kind == _COMMON_NAME
    ]
    if len(found) != 1:
        raise ValueError(f"its subject has {len(found)} common names instead of one")
    return _text(found[0])


class _Value(NamedTuple):
    """A value in DER."""

    tag: int
    content: bytes
    whole: bytes
    """With its tag and length."""


_Attribute = tuple[bytes, _Value]
"""The type, as the content of its OID, and the value."""
_COMMON_NAME: Final = b"\x55\x04\x03"
_KEYWORDS: Final = {
    _COMMON_NAME: "CN",
    b"\x55\x04\x06": "C",
    b"\x55\x04\x07": "L",
    b"\x55\x04\x08": "ST",
    b"\x55\x04\x09": "STREET",
    b"\x55\x04\x0a": "O",
    b"\x55\x04\x0b": "OU",
    b"\x09\x92\x26\x89\x93\xf2\x2c\x64\x01\x01": "UID",
    b"\x09\x92\x26\x89\x93\xf2\x2c\x64\x01\x19": "DC",
}
"""The types with a name in RFC 2253, 2.3; of others the OID and the bytes are shown."""
_BMP_STRING: Final = 30
_STRINGS: Final = {12, 19, 20, 22, 27, _BMP_STRING}
"""The tags of UTF8String, PrintableString and the others that Java shows as text."""
_ESCAPED: Final = frozenset(',=+<>#;"\\')
_SPACES: Final = " \r"
"""Escaped at the begin and the end of a value, as in Java."""


def _values(content: bytes) -> Iterator[_Value]:
    """Yields the values in the content of a sequence or a set that has been parsed before."""
    at = 0
    while at < len(content):
        first, length = at, content[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(content[at : at + size], "big")
            at += size
        at += length
        yield _Value(content[first], content[at - length : at], content[first:at])


def _relative_names(subject: bytes) -> Iterator[list[_Attribute]]:
    """Yields the relative distinguished names (RDN); most have one attribute."""
    (name,) = _values(subject)
    for relative in _values(name.content):
        found = []
        for attribute in _values(relative.content):
            kind, value = _values(attribute.content)
            found.append((kind.content, value))
        yield found


def _attribute(attribute: _Attribute) -> str:
    kind, value = attribute
    keyword = _KEYWORDS.get(kind)
    if keyword is None or value.tag not in _STRINGS:
        return f"{keyword or _dotted(kind)}=#{value.whole.hex()}"
    text = _text(value)
    escaped = "".join(f"\\{each}" if each in _ESCAPED else each for each in text)
    escaped = escaped.replace("\0", "\\00")
    inner = escaped.strip(_SPACES)
    before, _, after = escaped.partition(inner) if inner else (escaped, "", "")
    around = ("".join(f"\\{each}" for each in spaces) for spaces in (before, after))
    return f"{keyword}={inner.join(around)}"


def _text(value: _Value) -> str:
    """Returns the text of a value. Raises ValueError if it has none, or not certainly this one.

    Java reads all texts as UTF-8, also a BMPString, which is UTF-16: a CA that signs "\u6164\u6d69"
    there would sign "admi" without knowing it.
    """
    if value.tag not in _STRINGS or value.tag == _BMP_STRING:
        raise ValueError("its subject has a text that is not UTF-8 or ASCII")
    return value.content.decode()


def _dotted(oid: bytes) -> str:
    """Returns the content of an OID as text, such as `2.5.4.3`."""
    numbers, number = [], 0
    for byte in oid:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))
