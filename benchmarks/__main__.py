"""`python -m benchmarks`."""

from __future__ import annotations

from benchmarks.command import app

app(prog_name="python -m benchmarks")
