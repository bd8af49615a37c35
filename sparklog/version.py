"""The version, for all who must not import more than a number."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
