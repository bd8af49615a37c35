"""The files of `sparklog security init` and `client`: each is written once, and found again.

Both commands may be killed at any point and run again: a file is complete or missing, and a key is
written before the certificate that belongs to it.
"""

from __future__ import annotations

import datetime as dt
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sparklog import errors

if TYPE_CHECKING:
    from cryptography import x509

    from sparklog.security.authority import CertificateAuthority

_PASSWORD_BYTES: Final = 24
_RENEWED: Final = dt.timedelta(days=30)
"""A certificate that expires sooner is replaced."""


def private_folder(path: Path) -> Path:
    """Creates a folder that only this user can read, unless it exists, and returns it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    return path.absolute()


def write(path: Path, content: bytes, *, is_secret: bool) -> None:
    """Writes a file as a whole. Raises `BadOption` if it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if is_secret else 0o644
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def authority(folder: Path, *, now: dt.datetime) -> CertificateAuthority:
    """Returns the CA of the files ca.pem and ca.key, which are created if there are none."""
    from sparklog.security.authority import CertificateAuthority

    certificate, key = folder / "ca.pem", folder / "ca.key"
    if certificate.exists():
        try:
            return CertificateAuthority.load(key.read_bytes(), certificate.read_bytes())
        except (OSError, ValueError) as error:
            reason = f"it is not the CA of {key}: {error}"
            raise errors.BadOption(option="--out", value=str(certificate), reason=reason) from None
    found = CertificateAuthority.create("sparklog CA", now=now)
    write(key, found.key_pem, is_secret=True)
    write(certificate, found.pem, is_secret=False)
    return found


def broker_certificate(
    folder: Path, ca: CertificateAuthority, hosts: Sequence[str], *, now: dt.datetime
) -> bool:
    """Creates the files broker.pem and broker.key, unless they are valid for these hosts.

    Returns whether it has done so.
    """
    from sparklog.security.certificates import covers

    path, key = folder / "broker.pem", folder / "broker.key"
    found = _certificate(path, key)
    if (
        found is not None
        and found.not_valid_after_utc - now > _RENEWED
        and ca.has_signed(found)
        and all(covers(found, each) for each in hosts)
    ):
        return False
    certificate_pem, key_pem = ca.sign_broker(hosts, now=now)
    write(key, key_pem, is_secret=True)
    write(path, certificate_pem, is_secret=False)
    return True


def _certificate(path: Path, key: Path) -> x509.Certificate | None:
    """Returns a certificate; None if it is missing, or its key is."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        own = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError):
        return None
    return found if own.public_key() == found.public_key() else None


def password(path: Path) -> str:
    """Returns the password in a file, which gets a random one if it does not exist."""
    from sparklog.security.credentials import password_in

    try:
        return password_in(path.read_text())
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        raise errors.BadOption(option="--out", value=str(path), reason=reason) from None
    drawn = secrets.token_urlsafe(_PASSWORD_BYTES)
    write(path, f"{drawn}\n".encode(), is_secret=True)
    return drawn


def client_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes the settings of a client."""
    for name, content in contents.items():
        write(folder / name, content.encode(), is_secret=True)


def _unwritable(path: Path, error: OSError) -> errors.BadOption:
    return errors.BadOption(
        option="--out", value=str(path), reason=f"it cannot be written: {error.strerror or error}"
    )
