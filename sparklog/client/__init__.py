"""The client of a broker: sends and reads records by Flight messages, and never touches storage."""

from sparklog.client.connection import Connection
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.reading import Record
from sparklog.client.log import Log
from sparklog.client.producer.batch import AppendedRange, RecordFuture, RecordMetadata, TableFuture
from sparklog.client.producer.producer import Producer
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
