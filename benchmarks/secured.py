"""Certificates and users for brokers of a benchmark."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import NamedTuple

from sparklog.clock import SystemClock
from sparklog.security import users
from sparklog.security.authority import CertificateAuthority
from sparklog.security.state import Author
from sparklog.storage.objects import LocalStore
from sparklog.storage.security_store import change_security


class TrialFiles(NamedTuple):
    """PEM files of a trial CA and of a broker for 127.0.0.1."""

    ca: str
    certificate: str
    key: str
    both: str
    """Key and certificate in one file, as Kafka reads them."""

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables of a broker that uses the certificate."""
        return {"SPARKLOG_TLS_CERTIFICATE": self.certificate, "SPARKLOG_TLS_KEY": self.key}


def trial_files(folder: Path) -> TrialFiles:
    """Returns the files of a new CA and of a certificate that it has signed, in `folder`."""
    now = dt.datetime.now(dt.UTC)
    authority = CertificateAuthority.create("trial", now=now)
    certificate, key = authority.sign_broker(["127.0.0.1"], now=now)
    files = TrialFiles(
        *(str(folder / name) for name in ("ca.pem", "broker.pem", "broker.key", "both.pem"))
    )
    for path, data in zip(files, (authority.pem, certificate, key, key + certificate), strict=True):
        Path(path).write_bytes(data)
    return files


def add_user(root: Path, name: str, password: str) -> None:
    """Adds a user to a root, which is created if it does not exist."""
    change_security(
        LocalStore(str(root)),
        users.added(name, users.credentials_of(password)),
        author=Author(principal="Root:benchmark"),
        clock=SystemClock(),
        create=True,
    )
