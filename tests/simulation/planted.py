"""The planted mistakes: small defects in the real code that some seed of the simulation notices.

They prove the simulation and not the product, so `make soak` plants them, and `make test` does only
while the simulation differs from the one that last noticed all of them. Its digest is in
`planted.sha256`, which `python -m tests.simulation --planted` writes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent
_STORED: Final = _FOLDER / "planted.sha256"
SEEDS: Final = range(60)
"""Seeds of which one must notice a mistake."""


def digest() -> str:
    """Returns the digest of all modules of the simulation but its tests."""
    found = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.py")):
        if not path.name.startswith("test_"):
            found.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def are_proven() -> bool:
    """Returns true if this simulation has noticed all planted mistakes."""
    return _STORED.exists() and _STORED.read_text().strip() == digest()


def prove(jobs: int) -> bool:
    """Plants each mistake in `jobs` processes. Stores the digest if all were noticed."""
    before = digest()
    command = [
        "-m",
        "pytest",
        "-m",
        "soak or not soak",
        "--numprocesses",
        str(jobs),
        "tests/planted",
    ]
    done = subprocess.run([sys.executable, *command], cwd=_FOLDER.parents[1], check=False)
    if done.returncode == 0:
        _STORED.write_text(f"{before}\n")
    return done.returncode == 0
