"""Imports kio without hypothesis.

One module of kio imports hypothesis wherever it is installed, for strategies that only tests use.
It would take half a second and 20 MB in every broker, and leave a folder `.hypothesis` where the
broker was started. kio does without it where it is missing.
"""

from __future__ import annotations

import contextlib
import sys


def load_without_hypothesis() -> None:
    """Imports that module while hypothesis cannot be imported: it is None in `sys.modules`."""
    if "hypothesis" in sys.modules:
        return  # a program that uses it has paid already
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        with contextlib.suppress(ModuleNotFoundError):  # without kio `context` complains
            import kio.static._phantom  # noqa: F401
    finally:
        del sys.modules["hypothesis"]
