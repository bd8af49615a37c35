"""A client of a Spark Connect server that runs the pipeline of `examples/pipeline` three times.

The root, with topics `orders` and `late`, is in the server's environment.

Arguments: the server's address, a folder for the pipeline, and the root for sending and reading.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pyspark.pipelines import cli

import sparklog

_EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline"


def send(root: str, *delays: int) -> None:
    """Sends an order for each delay."""
    with sparklog.connect(root) as log, log.producer() as producer:
        for delay in delays:
            producer.send("orders", json.dumps({"customer": "alice", "delay": delay}).encode())


def late(root: str) -> list[int]:
    """Returns the delays in the topic that the sink writes, sorted."""
    with sparklog.connect(root) as log:
        return sorted(json.loads(each)["delay"] for each in log.read("late")["value"].to_pylist())


def main(address: str, folder: str, root: str) -> dict[str, Any]:
    """Returns the contents of topic `late` after each run."""
    os.environ["SPARK_REMOTE"] = address
    pipeline = Path(folder, "pipeline")
    shutil.copytree(_EXAMPLE, pipeline)
    spec = pipeline / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/orders-pipeline", f"{folder}/storage"))

    def run(*, full_refresh_all: bool) -> list[int]:
        cli.run(spec, full_refresh=[], full_refresh_all=full_refresh_all, refresh=[], dry=False)
        return late(root)

    send(root, 10, 20)
    first = run(full_refresh_all=False)
    send(root, 5, 30)
    return {
        "first": first,
        "second": run(full_refresh_all=False),
        "refreshed": run(full_refresh_all=True),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
