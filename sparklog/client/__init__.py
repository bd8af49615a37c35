"""The client: what a program needs to send and read records. It speaks `wire`, never storage."""

from sparklog.client.batch import AppendedRange, RecordFuture, RecordMetadata, TableFuture
from sparklog.client.connection import Connection
from sparklog.client.consumer import Consumer
from sparklog.client.log import Log
from sparklog.client.producer import Producer
from sparklog.client.reading import Record
from sparklog.client.serialize import (
    json_deserializer,
    json_serializer,
    string_deserializer,
    string_serializer,
)

__all__ = [
    "AppendedRange",
    "Connection",
    "Consumer",
    "Log",
    "Producer",
    "Record",
    "RecordFuture",
    "RecordMetadata",
    "TableFuture",
    "json_deserializer",
    "json_serializer",
    "string_deserializer",
    "string_serializer",
]
