"""The files in jobs/, run by spark-submit with conf/spark-defaults.conf."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import subprocess
from pathlib import Path

import pyspark
import pytest

import sparklog
from sparklog.security.acl import Operation, ResourceType
from tests.support import spark_programs
from tests.support.acls import acl
from tests.support.certificates import Authority
from tests.support.s3 import s3_server
from tests.support.secured import Secured

pytestmark = [pytest.mark.spark, pytest.mark.spark_program]

_REPOSITORY = Path(__file__).parents[2]
_SETTINGS = _REPOSITORY / "conf" / "spark-defaults.conf"
_SPARK_SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
_INSTALLED = {"delta-spark": "delta-spark", "spark-sql-kafka-0-10": "pyspark"}


@pytest.mark.delta
@pytest.mark.since("4.2")
def test_jars_are_those_of_the_installed_packages() -> None:
    """A jar of another version fails only where a job first uses it."""
    named = re.findall(r"([a-z0-9-]+)(?:_[\d.]+)*:(\d+\.\d+\.\d+)", _SETTINGS.read_text())
    versions = {jar.removesuffix("_2"): version for jar, version in named}
    assert versions == {
        jar: importlib.metadata.version(package) for jar, package in _INSTALLED.items()
    }


@pytest.mark.delta
@pytest.mark.since("4.2")
def test_a_job_of_spark_submit_writes_a_delta_table_into_a_topic(tmp_path: Path) -> None:
    """Delta's jar comes from the settings, and the root from the environment."""
    import deltalake
    import pyarrow as pa

    root = tmp_path / "root"
    deltalake.write_deltalake(tmp_path / "table", pa.table({"value": ["a", "b", "c"]}))
    command = [str(_SPARK_SUBMIT), "--master", "local[2]", "--properties-file", str(_SETTINGS)]
    command += [str(_REPOSITORY / "jobs" / "produce.py"), "--topic", "t", "--partitions", "2"]
    command += ["--format", "delta", str(tmp_path / "table")]
    env = spark_programs.environment(SPARKLOG_ROOT=str(root))
    try:
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("t: 3 records in ")
        with sparklog.connect(root) as log:
            found = log.read("t").column("value").to_pylist()
            assert sorted(found) == [b"a", b"b", b"c"]
    finally:
        spark_programs.end_detached_brokers(root)


# ------------------------------------------------------------------------------ secrets

_HUSH = "hush"
READ_BY_ALICE = acl(ResourceType.TOPIC, "t", Operation.READ, principal="User:alice")
_OF_STORE = ("aws_access_key_id", "aws_secret_access_key", "aws_sse_customer_key_base64")
_VARIABLES = ("AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY")


@pytest.mark.delta
@pytest.mark.since("4.2")
def test_plans_and_event_logs_show_no_secret(tmp_path: Path) -> None:
    """Keys of a store are hidden with these settings, as options and as variables.

    The password of a user of brokers, and the tokens of tasks, are nowhere.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": logs.as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
    }
    settings |= {f"spark.executorEnv.SPARKLOG_STORAGE_{name}": _HUSH for name in _VARIABLES}
    command = [str(_SPARK_SUBMIT), "--master", "local[2]", "--properties-file", str(_SETTINGS)]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command.append(str(_REPOSITORY / "tests" / "support" / "with_secrets.py"))
    secured = Secured(tmp_path, Authority(tmp_path), password=f"{_HUSH}-{_HUSH}")
    with s3_server("event-logs") as storage, secured.agent:
        secured.set_acls(READ_BY_ALICE)
        with sparklog.connect(secured.root) as log:
            log.create_topic("t")
            with log.producer() as producer:
                producer.send("t", b"a")
        storage |= {name: f"{_HUSH}-{number}" for number, name in enumerate(_OF_STORE)}
        given = {
            "root": "s3://event-logs/log",
            "options": {f"storage.{name}": value for name, value in storage.items()},
            "checkpoint": str(tmp_path / "checkpoint"),
            "brokers": {
                "bootstrap": secured.address,
                "ca": secured.security.ca,
                "user": "alice",
                "passwordFile": str(secured.password),
            },
        }
        (tmp_path / "given.json").write_text(json.dumps(given))
        with sparklog.connect("s3://event-logs/log", storage_options=storage) as log:
            for topic in ("t", "u"):
                log.create_topic(topic)
            with log.producer() as producer:
                producer.send("t", b"a").result()
            done = subprocess.run(
                [*command, str(tmp_path / "given.json")],
                check=False,
                cwd=tmp_path,
                env=spark_programs.environment(SPARKLOG_STORAGE_AWS_SESSION_TOKEN=_HUSH),
                capture_output=True,
                text=True,
                timeout=110,
            )
            assert done.returncode == 0, done.stderr
            assert log.read("u").num_rows == 2
    (events,) = logs.iterdir()
    kept = [
        each.read_bytes().decode("latin-1")
        for each in tmp_path.glob("checkpoint*/**/*")
        if each.is_file()
    ]
    assert len(kept) > 6
    plans = json.loads(done.stdout.splitlines()[-1])
    for shown, secret in itertools.product(
        (plans, events.read_text(), done.stderr, *kept), (_HUSH, "sl1.")
    ):
        found = shown.find(secret)
        assert found < 0, shown[max(found - 300, 0) : found + 100]
    assert "storage.aws_access_key_id=*********(redacted)" in done.stdout
