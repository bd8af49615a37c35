"""The TLS context of the listeners, made from PEM files and renewed when they change.

Sessions are not resumed with TLS 1.3, because a resumed session skips the check of the client's
certificate. With TLS 1.2 OpenSSL resumes those of the same context, which Python cannot turn off; a
new CA makes a new context. Renegotiation and compression are off.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import structlog
from cryptography import x509

from sparklog import errors
from sparklog.broker.tls.engine import TlsEngine
from sparklog.clock import Clock, SystemClock, unix_seconds
from sparklog.security.certificates import EXPIRY_NOTICE_SECONDS, principal_of
from sparklog.security.x500 import CertificatePrincipal, PrincipalForm

_DAY_SECONDS: Final = 86_400.0
_log = structlog.get_logger("sparklog.tls")
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: forward secrecy and authenticated encryption only. TLS 1.3 has no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of a server's TLS, in PEM."""

    certificate: str
    """The server's certificate, followed by those that lead to its CA."""
    key: str
    key_password_file: str = ""
    """Empty if the key has no password."""
    ca: str = ""
    """Certificates that sign those of clients; empty: clients need none."""
    client_auth: Literal["none", "requested", "required"] = "none"
    min_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"
    principal: PrincipalForm = "dn"
    """The part of a client's certificate that names its principal."""


def server_context(files: TlsFiles, *, is_http: bool = False) -> ssl.SSLContext:
    """Returns a new context with what the files contain now.

    `is_http`: for HTTP/1.1, instead of Kafka and gRPC.

    Raises `BadOption`, which names the setting and the file, if a file cannot be read, is not PEM,
    or if the key is not that of the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = (
        ssl.TLSVersion.TLSv1_3 if files.min_version == "TLSv1.3" else ssl.TLSVersion.TLSv1_2
    )
    context.set_ciphers(_CIPHERS)
    # gRPC clients insist on h2; Kafka clients offer nothing.
    context.set_alpn_protocols(["http/1.1" if is_http else "h2"])
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    _pem("tls.certificate", files.certificate)
    is_locked = b"ENCRYPTED" in _pem("tls.key", files.key)
    password = _password(files.key_password_file) if files.key_password_file else b""
    try:
        context.load_cert_chain(files.certificate, files.key, password=lambda: password)
    except ValueError as error:
        path = files.key_password_file
        raise errors.BadOption(
            option="tls.key_password_file", value=path, reason=str(error)
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            option, path, reason = "tls.key", files.key, "it is not the key of tls.certificate"
        elif is_locked:
            option, path = "tls.key", files.key
            reason = "it is encrypted, and tls.key_password_file does not contain its password"
        else:
            option, path = "tls.certificate", files.certificate
            reason = f"it or {files.key} is not valid: {error.reason or error}"
        raise errors.BadOption(option=option, value=path, reason=reason) from None
    if files.ca and files.client_auth == "none":
        reason = 'it has no effect: tls.client_auth is "none"'
        raise errors.BadOption(option="tls.ca", value=files.ca, reason=reason)
    if files.ca:
        _pem("tls.ca", files.ca)
        try:
            context.load_verify_locations(files.ca)
        except ssl.SSLError as error:
            reason = f"it contains no valid certificate: {error.reason or error}"
            raise errors.BadOption(option="tls.ca", value=files.ca, reason=reason) from None
    if files.client_auth != "none":
        if not files.ca:
            reason = "certificates of clients need tls.ca, with the certificates that sign them"
            raise errors.BadOption(option="tls.client_auth", value=files.client_auth, reason=reason)
        required = files.client_auth == "required"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


class ServerTls:
    """The context of the listeners, renewed by `refresh` when its files have changed.

    A context in use is never changed: connections that begin later get a new one. If the new files
    are not valid, such as a certificate whose key has not been copied yet, the old context stays.
    """

    def __init__(
        self, files: TlsFiles, *, with_http: bool = False, clock: Clock | None = None
    ) -> None:
        """Raises `BadOption` if the files are not valid. `with_http`: also for HTTP/1.1."""
        self.files = files
        self._clock = clock or SystemClock()
        self._seen = _signature(files)
        self.context = server_context(files)
        """For the next connection."""
        self.http_context = server_context(files, is_http=True) if with_http else None
        """The context for the next connection of HTTP/1.1, if there are any."""
        self.certificate = _first_certificate(files.certificate)
        self.failure = ""
        """Why the files are not in use as they are now; empty if they are."""
        self._told_at = float("-inf")

    def refresh(self) -> None:
        """Loads the files if they have changed, and logs once a day that they will expire.

        Files that could not be loaded are tried again each time: the reason may have been a lack of
        file descriptors, or a file that was just being replaced.
        """
        found = _signature(self.files)
        if found != self._seen or self.failure:
            self._load()
            self._seen = found
        self._tell_of_expiry()

    def _load(self) -> None:
        try:
            context, http_context = server_context(self.files), self.http_context
            if http_context is not None:
                http_context = server_context(self.files, is_http=True)
            certificate = _first_certificate(self.files.certificate)
        except (errors.BadOption, OSError) as error:
            if str(error) != self.failure:
                _log.error("keeping the old certificate: the new files are not valid: %s", error)
            self.failure = str(error)
            return
        self.context, self.http_context = context, http_context
        self.certificate, self.failure = certificate, ""
        self._told_at = float("-inf")
        _log.info(
            "loaded a new certificate",
            file=self.files.certificate,
            expires=certificate.not_valid_after_utc.isoformat(),
        )

    def engine(self, *, names_clients: bool) -> TlsEngine:
        """Returns the TLS of a new connection.

        `names_clients`: its client's certificate, if it has one, names a principal.
        """
        of_client = self._principal_of if names_clients else None
        return TlsEngine(self.context, is_server=True, principal_of=of_client)

    def _principal_of(self, certificate: bytes) -> CertificatePrincipal:
        return principal_of(certificate, self.files.principal)

    @property
    def expires_at(self) -> float:
        """When the certificate expires, in seconds since 1970."""
        return self.certificate.not_valid_after_utc.timestamp()

    def _tell_of_expiry(self) -> None:
        left_seconds = self.expires_at - unix_seconds(self._clock)
        now = self._clock.monotonic()
        if left_seconds > EXPIRY_NOTICE_SECONDS or now - self._told_at < _DAY_SECONDS:
            return
        self._told_at = now
        expires = self.certificate.not_valid_after_utc.isoformat()
        if left_seconds > 0:
            _log.warning("the certificate will expire; replace tls.certificate", expires=expires)
        else:
            _log.error(
                "the certificate has expired: clients refuse it; replace tls.certificate",
                expires=expires,
            )


def _first_certificate(path: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_pem("tls.certificate", path))
    except ValueError as error:
        reason = f"its first certificate is not valid: {error}"
        raise errors.BadOption(option="tls.certificate", value=path, reason=reason) from None


def _signature(files: TlsFiles) -> list[tuple[int, int, int] | None]:
    """Returns what changes when a file is replaced or written to."""
    found: list[tuple[int, int, int] | None] = []
    for path in (files.certificate, files.key, files.key_password_file, files.ca):
        try:
            stat = Path(path).stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return found


def _password(path: str) -> bytes:
    return _content("tls.key_password_file", path).removesuffix(b"\n").removesuffix(b"\r")


def _content(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = f"the file cannot be read: {error.strerror or error}"
        raise errors.BadOption(option=option, value=path, reason=reason) from None


def _pem(option: str, path: str) -> bytes:
    """Returns the content of a PEM file."""
    content = _content(option, path)
    if b"-----BEGIN " not in content:
        raise errors.BadOption(option=option, value=path, reason="the file is not PEM")
    return content
