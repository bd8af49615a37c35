"""Kafka clients of others that log in over TLS: each produces a record, and consumes it.

A login is given in the client's own settings. A client that is refused raises `PermissionError`.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

import aiokafka
import aiokafka.errors
import confluent_kafka
import kafka
import kafka.errors

from sparklog.broker.agent import Agent
from tests.support.certificates import Authority
from tests.support.waiting import wait_until

SECONDS: Final = 30.0
_VALUE: Final = b"x"


def confluent(agent: Agent, authority: Authority, topic: str, login: dict[str, Any]) -> None:
    """confluent-kafka, whose consumer joins a group."""
    refused: list[str] = []
    client: dict[str, Any] = {
        "bootstrap.servers": agent.kafka_address,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": authority.path,
        "error_cb": lambda error: refused.append(error.str()),
        "log_level": 0,
        **login,
    }
    producer = confluent_kafka.Producer(client)
    producer.produce(topic, _VALUE, partition=0)
    wait_until(lambda: producer.flush(0.1) == 0 or bool(refused), "no ack and no error")
    if refused:
        producer.purge()
        raise PermissionError(" ".join(refused))
    consumer = confluent_kafka.Consumer(
        client | {"group.id": topic, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    found = [message.value() for message in consumer.consume(1, SECONDS)]
    consumer.close()
    assert found == [_VALUE]


def kafka_python(
    agent: Agent,
    authority: Authority,
    topic: str,
    login: dict[str, Any],
    *,
    patience_ms: int = 2_000,
) -> None:
    """kafka-python. It repeats a login that is refused for `patience_ms`."""
    client: dict[str, Any] = {
        "bootstrap_servers": agent.kafka_address,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": authority.path,
        **login,
    }
    try:
        producer = kafka.KafkaProducer(**client, bootstrap_timeout_ms=patience_ms)
    except kafka.errors.KafkaError as error:
        raise PermissionError(str(error)) from None
    producer.send(topic, _VALUE, partition=0).get(SECONDS)
    producer.close()
    consumer = kafka.KafkaConsumer(
        topic, **client, auto_offset_reset="earliest", consumer_timeout_ms=int(SECONDS * 1e3)
    )
    assert next(consumer).value == _VALUE
    consumer.close()


def aio_client(agent: Agent, authority: Authority, login: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a client of aiokafka."""
    return {
        "bootstrap_servers": agent.kafka_address,
        "security_protocol": "SASL_SSL",
        "ssl_context": ssl.create_default_context(cafile=authority.path),
        **login,
    }


def aio(agent: Agent, authority: Authority, topic: str, login: dict[str, Any]) -> None:
    """aiokafka."""

    async def run() -> bytes | None:
        client = aio_client(agent, authority, login)
        producer = aiokafka.AIOKafkaProducer(**client)
        try:
            await producer.start()
            await producer.send_and_wait(topic, _VALUE, partition=0)
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(topic, **client, auto_offset_reset="earliest")
        async with consumer, asyncio.timeout(SECONDS):
            value: bytes | None = (await consumer.getone()).value
            return value

    try:
        assert asyncio.run(run()) == _VALUE
    except aiokafka.errors.KafkaConnectionError as error:
        raise PermissionError(str(error)) from error
