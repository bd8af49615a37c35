"""Names of clients in their certificates: the text is that of Java, and so that of Kafka."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Final

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import NameOID

from benchmarks.kafka_process import java
from sparklog.security.certificates import principal_of
from sparklog.security.x500 import common_name, distinguished_name
from tests.support.certificates import Authority

PROGRAM: Final = Path(__file__).parents[1] / "interop" / "java" / "Names.java"
OTHER_TYPES: Final = ("1.2.840.113549.1.9.1", "2.5.4.5", "2.5.4.12", "1.3.6.1.4.1.99999.7.300")
TYPES: Final = (
    NameOID.COMMON_NAME,
    NameOID.ORGANIZATION_NAME,
    NameOID.ORGANIZATIONAL_UNIT_NAME,
    NameOID.LOCALITY_NAME,
    NameOID.STATE_OR_PROVINCE_NAME,
    NameOID.STREET_ADDRESS,
    NameOID.USER_ID,
    NameOID.DOMAIN_COMPONENT,
    *map(x509.ObjectIdentifier, OTHER_TYPES),
)
STRINGS: Final = (
    _ASN1Type.UTF8String,
    _ASN1Type.PrintableString,
    _ASN1Type.IA5String,
    _ASN1Type.T61String,
    _ASN1Type.UniversalString,
)
CHARACTERS: Final = 'aZ9 ,=+<>#;"\\\r\n\t\0*é中😀-./_:'


def name_of(*parts: tuple[x509.ObjectIdentifier, str]) -> bytes:
    """Returns a name with one attribute in each part, in DER."""
    return x509.Name([x509.NameAttribute(*each) for each in parts]).public_bytes()


def test_names() -> None:
    """A name reads from its last part, with what RFC 2253 escapes, and as bytes what it omits."""
    shop = (NameOID.ORGANIZATION_NAME, "Tea, Coffee & Co")
    app = (NameOID.COMMON_NAME, " app#1")
    assert distinguished_name(name_of(shop, app)) == r"CN=\ app\#1,O=Tea\, Coffee & Co"
    mail = (NameOID.EMAIL_ADDRESS, "a@b")
    assert distinguished_name(name_of(app, mail)).startswith("1.2.840.113549.1.9.1=#1603614062,CN=")
    assert distinguished_name(name_of()) == ""


def test_another_name_cannot_be_imitated() -> None:
    """A comma in a common name does not begin a part."""
    imitated = distinguished_name(
        name_of((NameOID.ORGANIZATIONAL_UNIT_NAME, "admin"), (NameOID.COMMON_NAME, "a"))
    )
    assert imitated == "CN=a,OU=admin"
    assert distinguished_name(name_of((NameOID.COMMON_NAME, "a,OU=admin"))) == r"CN=a\,OU\=admin"


def test_a_name_in_utf_16_cannot_imitate_another() -> None:
    """Promise: a CA that signs Chinese characters in UTF-16 does not sign the letters that they
    are in UTF-8, by which Java calls the client.
    """
    text = b"admin.".decode("utf-16-be")
    kind, string = NameOID.COMMON_NAME, _ASN1Type.BMPString
    name = x509.Name([x509.NameAttribute(kind, text, _type=string, _validate=False)])
    for read in (distinguished_name, common_name):
        with pytest.raises(ValueError, match="not UTF-8 or ASCII"):
            read(name.public_bytes())


@pytest.mark.parametrize("count", [0, 2])
def test_one_common_name_is_needed(count: int) -> None:
    """It would not be clear otherwise which one is meant."""
    with pytest.raises(ValueError, match=f"{count} common names"):
        common_name(name_of(*[(NameOID.COMMON_NAME, "app")] * count))


def test_the_principal_of_a_certificate(tmp_path: Path) -> None:
    """The whole subject or the common name, until the certificate expires."""
    path, _ = Authority(tmp_path).sign("app", is_client=True, organization="Tea")
    certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
    der = certificate.public_bytes(Encoding.DER)
    found = principal_of(der, "dn")
    assert found.name == "CN=app,O=Tea"
    assert found.ends_at == certificate.not_valid_after_utc.timestamp()
    assert principal_of(der, "cn").name == "app"


def test_a_certificate_of_an_unknown_version(tmp_path: Path) -> None:
    """Promise: a certificate that OpenSSL accepts and that cannot be read names no principal."""
    path, _ = Authority(tmp_path).sign("app", is_client=True)
    der = x509.load_pem_x509_certificate(Path(path).read_bytes()).public_bytes(Encoding.DER)
    version_3, version_2 = bytes.fromhex("a003020102"), bytes.fromhex("a003020101")
    assert der.count(version_3) == 1
    with pytest.raises(ValueError, match="not a valid X509 version"):
        principal_of(der.replace(version_3, version_2), "dn")


def random_name(rng: random.Random) -> x509.Name:
    """Returns a name whose parts have one or two attributes of any type and any characters."""
    parts = []
    for _ in range(rng.randint(0, 4)):
        attributes = {}
        for kind in rng.sample(TYPES, rng.choice((1, 1, 1, 2))):
            text = "".join(rng.choices(CHARACTERS, k=rng.choice((1, 2, 5, 16))))
            string = rng.choice(STRINGS) if text.isascii() else _ASN1Type.UTF8String
            attributes[kind] = x509.NameAttribute(kind, text, _type=string, _validate=False)
        parts.append(x509.RelativeDistinguishedName(attributes.values()))
    return x509.Name(parts)


def test_names_are_those_of_java() -> None:
    """Promise: an ACL for a principal of Kafka's is one for the same client here."""
    rng = random.Random(7)
    names = [random_name(rng).public_bytes() for _ in range(2_000)]
    done = subprocess.run(
        [java(), str(PROGRAM)],
        input="\n".join(each.hex() for each in names),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    expected = [bytes.fromhex(each).decode() for each in done.stdout.split("\n")[:-1]]
    assert [distinguished_name(each) for each in names] == expected
