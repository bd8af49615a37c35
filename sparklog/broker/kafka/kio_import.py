"""Imports kio without hypothesis.

A module of kio imports hypothesis if it is installed, for strategies that only tests use. This
would cost every broker half a second and 20 MB, and leave a folder `.hypothesis` where the broker
was started. kio works without hypothesis.
"""

from __future__ import annotations

import contextlib
import sys


def load_without_hypothesis() -> None:
    """Imports the kio module that imports hypothesis, with None for hypothesis in `sys.modules`."""
    if "hypothesis" in sys.modules:
        return  # the program uses it, and has already paid
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        # If kio is missing, its next import reports that.
        with contextlib.suppress(ModuleNotFoundError):
            import kio.static._phantom  # noqa: F401
    finally:
        del sys.modules["hypothesis"]
