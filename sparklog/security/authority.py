"""A certificate authority (CA) of one's own, and the certificates of brokers that it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sparklog import errors

CA_DAYS: Final = 3_650
BROKER_DAYS: Final = 397
"""The longest lifetime that browsers and Apple's TLS accept."""
_BACKDATED: Final = dt.timedelta(hours=1)
"""For clients whose clocks are behind."""


class CertificateAuthority:
    """The key and the certificate of a CA; P-256, as all that it signs."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls, name: str, *, now: dt.datetime) -> CertificateAuthority:
        """Returns a new CA with that common name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, subject, key.public_key(), now=now, days=CA_DAYS)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def load(cls, key: bytes, certificate: bytes) -> CertificateAuthority:
        """Returns the CA of two PEM files. Raises ValueError if they do not belong together."""
        loaded = serialization.load_pem_private_key(key, None)
        found = x509.load_pem_x509_certificate(certificate)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("the key is not one of an elliptic curve")
        if loaded.public_key() != found.public_key():
            raise ValueError("the key is not that of the certificate")
        return cls(loaded, found)

    @property
    def pem(self) -> bytes:
        """The certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The key, which is not encrypted."""
        return _key_pem(self._key)

    def has_signed(self, certificate: x509.Certificate) -> bool:
        """Returns whether a certificate is one of this CA."""
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except Exception:  # of one of several kinds, depending on the other's key
            return False
        return True

    def sign_broker(self, hosts: Sequence[str], *, now: dt.datetime) -> tuple[bytes, bytes]:
        """Returns a new certificate for brokers at these hosts, and its key, in PEM.

        Raises `BadOption` for a host that is neither a name nor an address.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
        issuer = self._certificate.subject
        builder = _builder(subject, issuer, key.public_key(), now=now, days=BROKER_DAYS)
        names = x509.SubjectAlternativeName([_alternative(each) for each in hosts])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        certificate = (
            builder.add_extension(names, critical=False)
            .add_extension(usage, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    *,
    now: dt.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        reason = f"it is neither a host name nor an IP address: {error}"
        raise errors.BadOption(option="--host", value=host, reason=reason) from None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
