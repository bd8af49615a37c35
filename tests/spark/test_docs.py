"""Pages of the documentation with Spark run as their readers would run them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support import fences

# A page runs a dozen commands, each a process, which a busy machine starts slowly.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PAGES = [*fences.pages_that_run(spark=True)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page: Path, spark: SparkSession, tmp_path: Path) -> None:
    """Every block of the page that can run does, one after the other."""
    assert fences.run_page(page, tmp_path, spark=spark) > 0
