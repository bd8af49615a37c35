"""A broker on buckets of other servers than moto's, where they are installed.

`test_objects.py` runs the contract of stores on the same servers.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import deltalake
import pytest

import sparklog
from sparklog import errors
from sparklog.bench.broker import BrokerProcess
from sparklog.clock import SystemClock
from sparklog.storage.objects import open_store
from sparklog.storage.wal.choice import check_exclusive
from tests.support.object_servers import SERVERS, Served, running

pytestmark = [pytest.mark.soak(mode="stores"), pytest.mark.timeout(300)]

_TOPIC = "t"
_PARTITIONS = 4
_RECORDS = 2_000
_SETTINGS = {
    "SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "1",
    "SPARKLOG_REQUESTS_PROFILE": "fast",
}


@pytest.mark.parametrize("name", [name for name, each in SERVERS.items() if each.is_exclusive])
def test_a_successor_has_each_record_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `kill -9`, another broker has each acked record, and delta-rs reads all of them.

    The writers of log and table, heartbeats, takeover and listings all meet this server.
    """
    monkeypatch.chdir(tmp_path)
    with running(SERVERS[name], "log") as bucket:
        root = f"{bucket.uri}/root"
        environment = {**_SETTINGS, **bucket.environment}
        first, second = BrokerProcess(root, environment), BrokerProcess(root, environment)
        with first:
            with first.connect() as log:
                log.create_topic(_TOPIC, partitions=_PARTITIONS)
                _send(log, range(_RECORDS))
            first.kill()
        with second, second.connect() as log:
            _send(log, range(_RECORDS, 2 * _RECORDS))
            log.flush_to_table(timeout_seconds=60)
            assert _numbers(log) == list(range(2 * _RECORDS))
        with sparklog.connect(root, storage_options=dict(bucket.options)) as log:
            assert _numbers(log) == list(range(2 * _RECORDS))
        assert _in_table(root, bucket) == list(range(2 * _RECORDS))


@pytest.mark.parametrize("name", [name for name, each in SERVERS.items() if not each.is_exclusive])
def test_a_server_without_conditional_puts_is_refused(name: str, tmp_path: Path) -> None:
    """A broker does not start on a server that accepts a second object under one name."""
    with running(SERVERS[name], "log") as bucket:
        root = f"{bucket.uri}/{uuid.uuid4().hex}"
        with pytest.raises(errors.RootNotWritable, match="does not honour put-if-absent"):
            check_exclusive(open_store(root, bucket.options), SystemClock())
        with pytest.raises(RuntimeError, match=r"did not start: exit [1-9]"):
            BrokerProcess(root, bucket.environment).start()


def _send(log: sparklog.Log, numbers: range) -> None:
    with log.producer() as producer:
        sent = [producer.send(_TOPIC, b"%d" % number, key=b"%d" % number) for number in numbers]
        for each in sent:
            each.result(60)


def _numbers(log: sparklog.Log) -> list[int]:
    return sorted(int(value) for value in log.read(_TOPIC).column("value").to_pylist())


def _in_table(root: str, bucket: Served) -> list[int]:
    table = deltalake.DeltaTable(
        f"{root}/topics/{_TOPIC}", storage_options={**os.environ, **bucket.options}
    )
    return sorted(int(value) for value in table.to_pyarrow_table().column("value").to_pylist())
