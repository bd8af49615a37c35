"""A plugin for pytest: kafka-python's tests get a broker that runs, and do not start one.

LISTENERS names its listeners, one for each protocol; CERTIFICATES is a folder with its CA.
"""

from __future__ import annotations

import os
from typing import Any, Final

from kafka import KafkaAdminClient
from test.integration.fixtures import KafkaFixture

LISTENERS: Final = dict(each.split("://") for each in os.environ["LISTENERS"].split(","))


class RunningKafka(KafkaFixture):
    """The broker, for clients with one protocol and mechanism."""

    @classmethod
    def instance(
        cls,
        broker_id: int,
        *,
        transport: str = "PLAINTEXT",
        sasl_mechanism: str | None = None,
        partitions: int = 4,
        **_options: Any,
    ) -> RunningKafka:
        host, _, port = LISTENERS[transport].rpartition(":")
        broker = cls(
            host,
            int(port),
            broker_id,
            transport=transport,
            sasl_mechanism=sasl_mechanism,
            partitions=partitions,
            external=True,
        )
        broker.ssl_dir = os.environ["CERTIFICATES"]
        return broker

    def get_topic_names(self) -> list[str]:
        """Returns the names of all topics, without Kafka's tool."""
        with KafkaAdminClient(**self._enrich_client_params({})) as client:
            return client.list_topics()


KafkaFixture.instance = RunningKafka.instance
