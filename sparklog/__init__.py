"""A distributed log in the manner of Kafka whose topics are Delta tables.

    import sparklog

    with sparklog.connect("./data") as log:
        log.create_topic("flights", partitions=4)
        with log.producer() as producer:
            producer.send("flights", key=b"UA", value=b'{"delay": 11}')
        for record in log.consumer("flights", follow=False):
            print(record.offset, record.value)

The same records are a table: `spark.read.format("delta").load("./data/topics/flights")`.

Importing this package loads nothing but this file; `connect` loads what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparklog.version import VERSION

if TYPE_CHECKING:
    from sparklog.session import connect as connect

__all__ = ["__version__", "connect"]

__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name == "connect":
        from sparklog.session import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
