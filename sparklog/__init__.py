"""A Kafka-like distributed log whose topics are Delta tables.

    import sparklog

    with sparklog.connect("./data") as log:
        log.create_topic("flights", partitions=4)
        with log.producer() as producer:
            producer.send("flights", key=b"UA", value=b'{"delay": 11}')
        for record in log.consumer("flights", follow=False):
            print(record.offset, record.value)

The same records are a table: `spark.read.format("delta").load("./data/topics/flights")`.

`import sparklog` loads only this file and the version. The first use of a name in `__all__` loads
the module that defines it (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from sparklog.version import VERSION

if TYPE_CHECKING:
    from sparklog import aio as aio
    from sparklog import errors as errors
    from sparklog import testing as testing
    from sparklog.client.consumer.consumer import Consumer as Consumer
    from sparklog.client.consumer.reading import Record as Record
    from sparklog.client.consumer.statistics import ConsumerStatistics as ConsumerStatistics
    from sparklog.client.lag import GroupLag as GroupLag
    from sparklog.client.lag import PartitionLag as PartitionLag
    from sparklog.client.log import Log as Log
    from sparklog.client.offsets import OffsetAndMetadata as OffsetAndMetadata
    from sparklog.client.producer.batch import AppendedRange as AppendedRange
    from sparklog.client.producer.batch import RecordFuture as RecordFuture
    from sparklog.client.producer.batch import RecordMetadata as RecordMetadata
    from sparklog.client.producer.batch import TableFuture as TableFuture
    from sparklog.client.producer.producer import Producer as Producer
    from sparklog.client.producer.statistics import ProducerStatistics as ProducerStatistics
    from sparklog.client.serialize import json_deserializer as json_deserializer
    from sparklog.client.serialize import json_serializer as json_serializer
    from sparklog.client.serialize import string_deserializer as string_deserializer
    from sparklog.client.serialize import string_serializer as string_serializer
    from sparklog.connecting import connect as connect
    from sparklog.errors import SparklogError as SparklogError
    from sparklog.security.credentials import Security as Security

__all__ = [
    "AppendedRange",
    "Consumer",
    "ConsumerStatistics",
    "GroupLag",
    "Log",
    "OffsetAndMetadata",
    "PartitionLag",
    "Producer",
    "ProducerStatistics",
    "Record",
    "RecordFuture",
    "RecordMetadata",
    "Security",
    "SparklogError",
    "TableFuture",
    "__version__",
    "aio",
    "connect",
    "errors",
    "json_deserializer",
    "json_serializer",
    "string_deserializer",
    "string_serializer",
    "testing",
]

__version__ = VERSION

_SUBMODULES: Final = frozenset({"aio", "errors", "testing"})
_MODULE_OF: Final = {
    "AppendedRange": "sparklog.client.producer.batch",
    "Consumer": "sparklog.client.consumer.consumer",
    "ConsumerStatistics": "sparklog.client.consumer.statistics",
    "GroupLag": "sparklog.client.lag",
    "Log": "sparklog.client.log",
    "OffsetAndMetadata": "sparklog.client.offsets",
    "PartitionLag": "sparklog.client.lag",
    "Producer": "sparklog.client.producer.producer",
    "ProducerStatistics": "sparklog.client.producer.statistics",
    "Record": "sparklog.client.consumer.reading",
    "RecordFuture": "sparklog.client.producer.batch",
    "RecordMetadata": "sparklog.client.producer.batch",
    "Security": "sparklog.security.credentials",
    "SparklogError": "sparklog.errors",
    "TableFuture": "sparklog.client.producer.batch",
    "connect": "sparklog.connecting",
    "json_deserializer": "sparklog.client.serialize",
    "json_serializer": "sparklog.client.serialize",
    "string_deserializer": "sparklog.client.serialize",
    "string_serializer": "sparklog.client.serialize",
}

if not TYPE_CHECKING:  # with a visible `__getattr__`, type checkers accept every name

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            return importlib.import_module(f"sparklog.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
