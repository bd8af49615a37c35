"""Certificates: the hosts that they are valid for, their expiry, and the principals they name."""

from __future__ import annotations

import ipaddress

from cryptography import x509

from sparklog.security.x500 import (
    CertificatePrincipal,
    PrincipalForm,
    common_name,
    distinguished_name,
)

EXPIRY_NOTICE_SECONDS = 14 * 86_400.0  # before a certificate expires, the log begins to say so


def covers(certificate: x509.Certificate, host: str) -> bool:
    """Returns whether clients that connect to `host`, a name or an address, accept the certificate.

    As RFC 9525 has it: only alternative names count, and a wildcard is a whole first label.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    host = host.strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return address in names.get_values_for_type(x509.IPAddress)
    host = host.lower().rstrip(".")
    _, _, parent = host.partition(".")
    found = {each.lower() for each in names.get_values_for_type(x509.DNSName)}
    return host in found or (bool(parent) and f"*.{parent}" in found)


def principal_of(certificate: bytes, form: PrincipalForm) -> CertificatePrincipal:
    """Returns the principal that a certificate, in DER, names.

    Raises ValueError if it or its subject cannot be read, or if it has not exactly one common name
    that is asked for.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
    except x509.InvalidVersion as error:  # OpenSSL accepts all versions
        raise ValueError(str(error)) from None
    subject = parsed.subject.public_bytes()
    name = common_name(subject) if form == "cn" else distinguished_name(subject)
    return CertificatePrincipal(name, parsed.not_valid_after_utc.timestamp())
