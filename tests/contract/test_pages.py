"""Pages of the documentation without Spark run as their readers would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fences


@pytest.mark.timeout(600)  # each command of a page is a process, and one restarts brokers
@pytest.mark.parametrize("page", [*fences.pages_that_run(spark=False)], ids=lambda page: page.stem)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    """Every block of the page that can run does, one after the other."""
    assert fences.run_page(page, tmp_path) > 0
