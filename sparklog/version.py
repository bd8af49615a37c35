"""The version, for code that must not import anything else."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
