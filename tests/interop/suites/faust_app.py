"""An application of Faust: how many numbers each key has had so far.

Arguments: the broker's address, the folder of its state.
"""

from __future__ import annotations

import sys
from typing import Any

import faust

ADDRESS, FOLDER = sys.argv[1:]
PARTITIONS = 4

app = faust.App(
    "app",
    broker=f"kafka://{ADDRESS}",
    datadir=FOLDER,
    topic_partitions=PARTITIONS,
    broker_commit_interval=0.5,
    broker_session_timeout=10,
    broker_heartbeat_interval=1,
    web_enabled=False,
)
source = app.topic("in", key_type=bytes, value_type=bytes, value_serializer="raw")
results = app.topic("out", key_type=bytes, value_type=bytes, value_serializer="raw")
numbers = app.Table("numbers", default=list, partitions=PARTITIONS, key_type=bytes)


@app.agent(source)
async def count(stream: Any) -> None:
    """Counts for as long as the process runs."""
    async for key, value in stream.items():
        found = {*numbers[key], int(value)}
        numbers[key] = sorted(found)
        await results.send(key=key, value=b"%d" % len(found))


if __name__ == "__main__":
    sys.argv[1:] = ["worker", "-l", "warn", "--without-web"]
    app.main()
