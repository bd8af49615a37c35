"""The settings of `conf/spark-defaults.conf` that hide secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pyspark.sql.connect import proto

_SETTINGS = Path(__file__).parents[2] / "conf" / "spark-defaults.conf"
_KEY = json.dumps({"private_key": "-\nhush\n-", "password": "hush's"})


def _pattern(name: str) -> re.Pattern[str]:
    """Returns a pattern of the settings, which are a file of Java's properties."""
    (found,) = re.findall(rf"^{re.escape(name)} +(.*)$", _SETTINGS.read_text(), re.MULTILINE)
    return re.compile(found.replace(r"\\", "\\"))


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("spark.executorEnv.SPARKLOG_STORAGE_AWS_REGION", True),
        ("spark.executorEnv.AWS_ACCESS_KEY_ID", True),
        ("spark.executorEnv.AZURE_STORAGE_ACCOUNT_KEY", True),
        ("spark.executorEnv.AZURE_STORAGE_SAS_KEY", True),
        ("spark.hadoop.fs.azure.account.key.a.dfs.core.windows.net", True),
        ("spark.hadoop.fs.s3a.access.key", True),
        ("kafka.ssl.keystore.key", True),
        ("storage.google_service_account_key", True),
        ("spark.executorEnv.SPARKLOG_ROOT", False),
        ("spark.io.encryption.keySizeBits", False),
        ("spark.sql.session.timeZone", False),
    ],
)
def test_settings_with_secrets_are_hidden(name: str, *, is_hidden: bool) -> None:
    """Spark's own names are hidden as before, and others stay readable."""
    pattern = _pattern("spark.redaction.regex")
    assert bool(pattern.search(name)) == is_hidden
    assert all(map(pattern.search, ("spark.secret", "password", "TOKEN", "accesskey")))


def test_options_of_the_store_are_hidden() -> None:
    """All of them, in any case; those of the log stay readable."""
    pattern = _pattern("spark.sql.redaction.options.regex")
    assert all(map(pattern.search, ("storage.aws_region", "STORAGE.x", "url")))
    assert not any(map(pattern.search, ("root", "subscribe", "local_storage.x")))


@pytest.mark.parametrize(
    "options",
    [
        {"storage.azure_storage_account_key": "hush=="},
        {"storage.google_service_account_key": _KEY, "storage.a": "hush\\"},
    ],
)
def test_requests_of_spark_connect_show_no_option_of_the_store(options: dict[str, str]) -> None:
    """The server logs them as text, in which only the pattern of texts hides anything."""
    given = {**options, "root": "s3://bucket/log", "subscribe": "t"}
    source = proto.Read.DataSource(format="sparklog", options=given)
    request = str(proto.Plan(root=proto.Relation(read=proto.Read(data_source=source))))
    shown = _pattern("spark.redaction.string.regex").sub("(redacted)", request)
    assert "hush" in request
    assert "hush" not in shown
    assert shown.count("(redacted)") == len(options)
    assert "s3://bucket/log" in shown


@pytest.mark.parametrize(
    "option",
    [
        "'storage.azure_storage_account_key' 'hush=='",
        "`storage.a` = 'hush'",
        "storage.secret.a='hush'",
        '"storage.a" "hush"',
        f"'storage.a' '{_KEY}'".replace("hush's", "hush"),
    ],
)
def test_statements_show_no_option_of_the_store(option: str) -> None:
    """Neither as they are, nor in the text of a request of Spark Connect."""
    statement = f"CREATE TEMPORARY VIEW v USING sparklog OPTIONS (root 's3://b', {option}, x 'y')"
    request = str(proto.Plan(root=proto.Relation(sql=proto.SQL(query=statement))))
    for text in (statement, request):
        shown = _pattern("spark.redaction.string.regex").sub("(redacted)", text)
        assert "hush" in text
        assert "hush" not in shown
        assert "s3://b" in shown
        assert "y" in shown.partition("(redacted)")[2]
