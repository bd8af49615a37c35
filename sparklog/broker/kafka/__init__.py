"""The Kafka listener: serves any Kafka client, unmodified.

`listener` and `connection` own sockets and order, `messages` turns frames into kio's messages and
back, `registry` names the requests and versions that are served, `apis` answers them, one module
for each. A request is
translated to calls of `broker`, which decides everything.
"""

from __future__ import annotations

import contextlib
import sys


def _load_kio_without_hypothesis() -> None:
    """Imports the one module of kio that imports hypothesis wherever it is installed.

    It would take half a second and 20 MB in every broker, and leave a folder `.hypothesis` where
    the broker was started. kio does without it where it is missing, so here it is: None in
    `sys.modules` means that a module cannot be imported.
    """
    if "hypothesis" in sys.modules:
        return  # a program that uses it has paid already
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        with contextlib.suppress(ModuleNotFoundError):  # without kio `context` complains
            import kio.static._phantom  # noqa: F401
    finally:
        del sys.modules["hypothesis"]


_load_kio_without_hypothesis()
