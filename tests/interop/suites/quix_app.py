"""An application of Quix Streams: how many numbers each key has had so far.

Arguments: the broker's address, the folder of its state.
"""

from __future__ import annotations

import sys
from typing import Any

from quixstreams import Application


def _seen(value: str, state: Any) -> str:
    numbers = {*state.get("numbers", []), int(value)}
    state.set("numbers", sorted(numbers))
    return str(len(numbers))


def main() -> None:
    """Runs until the process ends."""
    address, folder = sys.argv[1:]
    app = Application(
        broker_address=address,
        consumer_group="app",
        auto_offset_reset="earliest",
        commit_interval=0.5,
        state_dir=folder,
        loglevel="WARNING",
    )
    frame = app.dataframe(app.topic("in", key_deserializer="str", value_deserializer="str"))
    frame = frame.apply(_seen, stateful=True)
    frame.to_topic(app.topic("out", key_serializer="str", value_serializer="str"))
    app.run()


if __name__ == "__main__":
    main()
