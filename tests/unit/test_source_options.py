"""The options of the Spark source: their meaning, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.options import without_credentials
from sparklog.security.credentials import Security
from sparklog.sources.options import COLUMNS, CORRUPT, LogLocation, parse
from sparklog.sources.starting_offsets import EARLIEST, LATEST, AtTime, FromEnd, OfGroup, Pinned

GIVEN = {"root": "memory://x", "subscribe": "b, a"}


def test_options_have_the_defaults_of_kafka_s_source() -> None:
    """Two topics in order, losses end the query, and all columns but headers."""
    options = parse(GIVEN)
    assert options.selection.topics == ("a", "b")
    assert options.fail_on_data_loss
    assert options.starting is options.ending is options.max_offsets_per_trigger is None
    assert options.max_trigger_delay_seconds == 15 * 60
    assert options.columns == COLUMNS[:7]
    assert parse({**GIVEN, "includeheaders": "TRUE"}).columns == COLUMNS[:8]


def test_options_come_in_any_case() -> None:
    """Spark lowers the names on some ways, so case says nothing."""
    given = {
        "ROOT": "memory://x",
        "Subscribe": "a",
        "startingoffsets": "Earliest",
        "endingOffsets": '{"a": {"0": 23, "1": -1}}',
        "maxoffsetspertrigger": "10",
        "failondataloss": "False",
        "storage.AWS_region": "eu-west-1",
    }
    options = parse(given)
    assert (options.starting, options.ending) == (EARLIEST, {"a": {0: 23, 1: LATEST}})
    assert options.max_offsets_per_trigger == 10
    assert not options.fail_on_data_loss
    assert options.location.storage == (("aws_region", "eu-west-1"),)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"startingofsets": "latest"}, errors.UnknownOption, "Did you mean 'startingOffsets'"),
        ({"subscribe": " , "}, errors.BadOption, "subscribe"),
        ({"subscribe": "a/b"}, errors.BadTopicName, "a/b"),
        ({"subscribePattern": "a.*"}, errors.BadOption, "exactly one of subscribe"),
        ({"path": "/elsewhere"}, errors.BadOption, "conflicts with root = 'memory://x'"),
        ({"bootstrap": "host:8815"}, errors.BadOption, "not both"),
        (
            {"startingOffsets": "last"},
            errors.BadOption,
            "earliest, latest, group, a number of .* -100, or JSON",
        ),
        ({"endingOffsets": "group"}, errors.BadOption, "expected earliest, latest, a number"),
        ({"startingOffsets": "group"}, errors.BadOption, "group.id = None: .* needs the name"),
        ({"startingOffsets": "group", "group.id": ""}, errors.BadOption, "group.id = ''"),
        ({"group.id": "g"}, errors.BadOption, "to startingOffsets = group only"),
        (
            {"groupOffsetReset": "latest"},
            errors.BadOption,
            "to startingOffsets = group only",
        ),
        (
            {"startingOffsets": "group", "group.id": "g", "groupOffsetReset": "none"},
            errors.BadOption,
            "earliest or latest or error",
        ),
        ({"commitToGroup": " "}, errors.BadOption, "expected the name of a consumer group"),
        ({"rows": "offsets"}, errors.BadOption, "expected records or ranges"),
        (
            {"rows": "ranges", "columns": "key"},
            errors.BadOption,
            "columns = 'key'.*rows do not contain records",
        ),
        ({"groupid": "g"}, errors.UnknownOption, "Did you mean 'group.id'"),
        ({"startingOffsets": '{"a": {"0": -3}, "b": {}}'}, errors.BadOption, "-2 .earliest"),
        ({"startingOffsets": "-1"}, errors.BadOption, "write latest for -1, and earliest for -2"),
        ({"endingOffsets": "-2"}, errors.BadOption, "write latest for -1, and earliest for -2"),
        ({"startingOffsets": "100"}, errors.BadOption, "before the end such as -100, or JSON"),
        ({"startingTimestamp": "now"}, errors.BadOption, "ISO 8601, or .* '10 minutes ago'"),
        ({"endingTimestamp": "1 month ago"}, errors.BadOption, "ISO 8601, or"),
        ({"endingOffsetsByTimestamp": "5"}, errors.BadOption, "expected JSON such as {"),
        (
            {"startingOffsetsByTimestamp": '{"a": {"0": "soon"}}'},
            errors.BadOption,
            "with milliseconds since 1970, a time in ISO 8601, or",
        ),
        ({"startingOffsetsByTimestampStrategy": "next"}, errors.BadOption, "error or latest"),
        ({"maxOffsetsPerTrigger": "0"}, errors.BadOption, "of at least 1"),
        ({"maxOffsetsPerTrigger": "1e3"}, errors.BadOption, "of at least 1"),
        (
            {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"},
            errors.BadOption,
            "maxOffsetsPerTrigger = 5",
        ),
        ({"maxBytesPerTrigger": "0m"}, errors.BadOption, "such as 500k, 64m or 1g"),
        ({"maxBytesPerTrigger": "many"}, errors.BadOption, "such as 500k, 64m or 1g"),
        ({"maxTriggerDelay": "soon"}, errors.BadOption, "500ms, 30s or 15m"),
        ({"failOnDataLoss": "no"}, errors.BadOption, "true or false"),
        ({"columns": "value,ofset"}, errors.BadOption, "columns = 'ofset'"),
        ({"columns": "value", "includeHeaders": "true"}, errors.BadOption, "includeHeaders"),
        ({"columns": CORRUPT}, errors.BadOption, "columns = '_corrupt'"),
        (
            {"columns": CORRUPT, "valueFormat": "string", "badValues": "column"},
            errors.BadOption,
            "add value",
        ),
        ({"valueFormat": "avro"}, errors.BadOption, "binary or string or json"),
        ({"valueFormat": "json"}, errors.BadOption, "valueSchema"),
        ({"valueSchema": "a INT"}, errors.BadOption, "applies to valueFormat = json only"),
        ({"badValues": "error"}, errors.BadOption, "binary values are never bad"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    changes: dict[str, str], error: type[errors.Invalid], message: str
) -> None:
    """The refusal names the option, and what would be right."""
    with pytest.raises(error, match=message):
        parse(GIVEN | changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "set exactly one of subscribe, subscribePattern, assign"),
        ({"subscribePattern": "a("}, "not a regular expression"),
        ({"subscribePattern": ""}, "matches no topic"),
        ({"assign": "a"}, "expected partitions of topics"),
        ({"assign": '{"a": []}'}, "expected partitions of topics"),
        ({"assign": '{"a": [-1]}'}, "expected partitions of topics"),
    ],
)
def test_what_to_read_must_be_said_well(given: dict[str, str], message: str) -> None:
    """None of the three ways, and each of them ill-formed, is refused by name."""
    with pytest.raises(errors.BadOption, match=message):
        parse({"root": "memory://x"} | given)


def test_a_pattern_means_whole_names_and_no_internal_topic() -> None:
    """As a Kafka consumer's pattern does."""
    selection = parse({"root": "memory://x", "subscribePattern": "a.*"}).selection
    assert selection.names(["ab", "a", "ba"]) == ["a", "ab"]
    anything = parse({"root": "memory://x", "subscribePattern": ".*"}).selection
    assert anything.names(["__consumer_offsets", "__audit", "t"]) == ["__audit", "t"]


def test_assigned_partitions_must_exist() -> None:
    """The named partitions are read, and a missing one is an error."""
    selection = parse({"root": "memory://x", "assign": '{"b": [2, 0], "a": [1]}'}).selection
    assert selection.names(()) == ["a", "b"]
    assert list(selection.partitions("b", 3)) == [0, 2]
    with pytest.raises(
        errors.UnknownPartition, match="'b' has no partition 2: its partitions are 0 to 1"
    ):
        selection.partitions("b", 2)


# ------------------------------------------------------------------------------ where


def test_an_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """root or load(path), bootstrap, then SPARKLOG_ROOT, then SPARKLOG_BOOTSTRAP."""

    def place(given: dict[str, str]) -> LogLocation:
        return parse({"subscribe": "a"} | given).location

    assert place({"path": "memory://p"}) == LogLocation(root="memory://p")
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", "host:1")
    assert place({}) == LogLocation(bootstrap="host:1")
    assert place({"root": "memory://p"}) == LogLocation(root="memory://p")
    monkeypatch.setenv("SPARKLOG_ROOT", "memory://e")
    assert place({}) == LogLocation(root="memory://e")
    assert place({"bootstrap": "other:2"}) == LogLocation(bootstrap="other:2")
    monkeypatch.delenv("SPARKLOG_ROOT")
    monkeypatch.delenv("SPARKLOG_BOOTSTRAP")
    with pytest.raises(errors.BadOption, match="SPARKLOG_ROOT"):
        place({})


@pytest.mark.parametrize("option", ["root", "path"])
def test_an_address_is_no_root(option: str) -> None:
    """A broker's address that is given as the root is refused, with the option that takes it."""
    with pytest.raises(errors.BadOption, match="Did you mean the option bootstrap") as refused:
        parse({"subscribe": "a", option: "localhost:9092"})
    assert (refused.value.option, refused.value.value) == (option, "localhost:9092")


# ------------------------------------------------------------------------------ from and to


def test_the_cluster_s_parallelism_is_told_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark hands it over as `spark.executorEnv.SPARKLOG_PARALLELISM`; a slip is refused."""
    monkeypatch.delenv("SPARKLOG_PARALLELISM", raising=False)
    assert parse(GIVEN).parallelism == os.cpu_count()
    for told in ("96", "1"):
        monkeypatch.setenv("SPARKLOG_PARALLELISM", told)
        assert parse(GIVEN).parallelism == int(told)
    for wrong in ("0", "many", "-1", ""):
        monkeypatch.setenv("SPARKLOG_PARALLELISM", wrong)
        with pytest.raises(errors.BadOption, match=r"SPARKLOG_PARALLELISM.*number of at least 1"):
            parse(GIVEN)


def test_a_shared_driver_lists_the_folders_of_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another file of the driver is refused, also through a symbolic link or `..`."""
    permitted, other = tmp_path / "permitted", tmp_path / "other.pem"
    permitted.mkdir()
    other.write_text("secret")
    (permitted / "link.pem").symlink_to(other)
    given = {"bootstrap": "tls://k1:8815", "subscribe": "t"}
    parse({**given, "ca": str(other)})
    monkeypatch.setenv("SPARKLOG_CREDENTIAL_FOLDERS", f"/nowhere:{permitted}")
    parse({**given, "ca": str(permitted / "ca.pem")})
    files = {"user": "alice", "passwordFile": str(permitted / "link.pem")}
    for refused in ({"ca": str(other)}, {"ca": f"{permitted}/../other.pem"}, files):
        with pytest.raises(errors.BadOption, match="has to be in one of SPARKLOG_CREDENTIAL_"):
            parse({**given, **refused})
    monkeypatch.setenv("SPARKLOG_CREDENTIAL_FOLDERS", "")
    with pytest.raises(errors.BadOption, match="has to be in one of"):
        parse({**given, "ca": str(permitted / "ca.pem")})


def test_the_token_of_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options replace that of the environment, which a shared driver sends to its own brokers only.

    A broker that gets a token can use it, and a query names any address.
    """
    given = {"bootstrap": "tls://k1:8815", "subscribe": "t"}
    with pytest.raises(errors.BadOption, match="set tokenFile"):
        parse({**given, "token": "a.b.c"})
    monkeypatch.setenv("SPARKLOG_CLIENT_USER", "alice")
    own = str(tmp_path / "own")
    security = parse({**given, "tokenFile": own}).location.security
    assert security == Security(token_file=own)
    monkeypatch.delenv("SPARKLOG_CLIENT_USER")
    monkeypatch.setenv("SPARKLOG_CLIENT_TOKEN_FILE", "/driver/token")
    assert parse({**given, "user": "bob"}).location.security == Security(user="bob")
    parse(given)
    monkeypatch.setenv("SPARKLOG_CREDENTIAL_FOLDERS", str(tmp_path))
    for more in ({}, {"ca": str(tmp_path / "ca.pem")}):
        with pytest.raises(errors.BadOption, match="is only sent to SPARKLOG_BOOTSTRAP"):
            parse({**given, **more})
    parse({**given, "tokenFile": own})
    parse({**given, "user": "bob"})
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", given["bootstrap"])
    parse(given)


def test_a_start_by_time_goes_before_one_by_offset() -> None:
    """As in Spark's Kafka source; and an end likewise."""
    by_offset = {"startingOffsets": "earliest", "endingOffsets": "latest"}
    by_times = {
        "startingOffsetsByTimestamp": '{"a": {"0": 7}}',
        "endingOffsetsByTimestamp": '{"a": {"0": 8}}',
    }
    by_time = {"startingTimestamp": "5", "endingTimestamp": "6"}
    options = parse(GIVEN | by_offset)
    assert (options.starting, options.ending) == (EARLIEST, LATEST)
    options = parse(GIVEN | by_offset | by_times)
    assert options.starting == {"a": {0: AtTime(7_000)}}
    assert options.ending == {"a": {0: AtTime(8_000)}}
    options = parse(GIVEN | by_offset | by_times | by_time)
    assert (options.starting, options.ending) == (AtTime(5_000), AtTime(6_000))


@pytest.mark.parametrize(
    ("text", "timestamp_us"),
    [
        ("5", 5_000),
        (" -5 ", -5_000),
        ("10 minutes ago", 1_000_000_000_000_000 - 600_000_000),
        ("1 HOUR ago", 1_000_000_000_000_000 - 3_600_000_000),
        ("90seconds ago", 1_000_000_000_000_000 - 90_000_000),
        ("2 days ago", 1_000_000_000_000_000 - 2 * 86_400_000_000),
        ("99999999999 weeks ago", limits.TIMESTAMP_MIN_US),
        ("1970-01-02", 86_400_000_000),
        ("1970-01-01T00:00:01.000002", 1_000_002),
        ("1970-01-01T02:00:00+02:00", 0),
        ("1970-01-01T00:00:00Z", 0),
    ],
)
def test_a_time_has_three_forms(text: str, timestamp_us: int) -> None:
    """Milliseconds, ISO 8601, UTC without a zone, or relative to now; for start and end alike."""
    clock = ManualClock(1_000_000_000_000_000)
    times = {"startingTimestamp": text, "endingTimestamp": text}
    options = parse(GIVEN | times, clock)
    assert options.starting == options.ending == AtTime(timestamp_us)
    by_partition = {
        f"{side}OffsetsByTimestamp": json.dumps({"a": {"0": text}})
        for side in ("starting", "ending")
    }
    options = parse(GIVEN | by_partition, clock)
    assert options.starting == options.ending == {"a": {0: AtTime(timestamp_us)}}


def test_a_start_or_end_may_count_from_the_end() -> None:
    """Such as the last 100 records; in JSON, negative numbers keep Kafka's meaning."""
    options = parse(GIVEN | {"startingOffsets": " -100", "endingOffsets": "-3"})
    assert (options.starting, options.ending) == (FromEnd(100), FromEnd(3))
    options.check_batch()


def test_offsets_may_be_those_of_a_checkpoint() -> None:
    """As a line of its folder `offsets` has them, with the id of the topic."""
    line = '{"a": {"id": "5f", "offsets": {"0": 3}, "from": {"0": 1}}}'
    options = parse(GIVEN | {"startingOffsets": line, "endingOffsets": line})
    assert options.starting == options.ending == Pinned({"a": "5f"}, {"a": {0: 3}})
    options.check_batch()
    latest = parse(GIVEN | {"startingOffsets": '{"a": {"id": "5f", "offsets": {"0": -1}}}'})
    with pytest.raises(errors.BadOption, match="no records"):
        latest.check_batch()


@pytest.mark.parametrize(
    ("reset", "otherwise"),
    [
        ({}, EARLIEST),
        ({"groupOffsetReset": "LATEST"}, LATEST),
        ({"groupoffsetreset": "error"}, None),
    ],
)
def test_a_start_may_be_a_group_s(reset: dict[str, str], otherwise: int | None) -> None:
    """For batch and stream alike; a start by time takes precedence, as over any other."""
    given = {"startingOffsets": "Group", "GROUP.ID": "g"} | reset
    options = parse(GIVEN | given)
    assert options.starting == OfGroup("g", otherwise)
    options.check_batch()
    options.check_stream()
    assert parse(GIVEN | given | {"startingTimestamp": "5"}).starting == AtTime(5_000)


def test_a_time_beyond_all_times_is_the_last_one() -> None:
    """Long.MAX_VALUE, as programs write it, fits into microseconds."""
    options = parse(GIVEN | {"startingTimestamp": str(2**63 - 1)})
    assert options.starting == AtTime(limits.TIMESTAMP_MAX_US)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200", 0.2), ("250us", 0.00025), ("100ms", 0.1), ("50s", 50), ("5 min", 300), ("1d", 86_400)],
)
def test_durations_are_written_as_spark_s(text: str, seconds: float) -> None:
    """With a unit, or in milliseconds."""
    found = parse(GIVEN | {"maxTriggerDelay": text}).max_trigger_delay_seconds
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("70", 70), ("2k", 2_048), ("64 MB", 2**26), ("1GiB", 2**30)]
)
def test_sizes_are_written_as_spark_s(text: str, size_bytes: int) -> None:
    """With a unit, or in bytes; a broker does not know the sizes of records."""
    assert parse(GIVEN | {"maxBytesPerTrigger": text}).max_bytes_per_trigger == size_bytes
    with pytest.raises(errors.BadOption, match="use maxOffsetsPerTrigger"):
        parse({"bootstrap": "host:1", "subscribe": "a", "maxBytesPerTrigger": text})


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"startingOffsets": "latest"}, "check_batch", "no records"),
        ({"startingOffsets": '{"a": {"0": 3, "1": -1}}'}, "check_batch", "no records"),
        ({"endingOffsets": "earliest"}, "check_batch", "no records"),
        ({"endingOffsets": "latest"}, "check_stream", "availableNow"),
        ({"endingTimestamp": "1"}, "check_stream", "availableNow"),
        ({"commitToGroup": "g"}, "check_batch", "a stream commits"),
        ({"rows": "ranges"}, "check_batch", "only a stream has micro-batches"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(
    changes: dict[str, str], check: str, message: str
) -> None:
    """As Spark's Kafka source refuses it, for a batch or for a stream."""
    with pytest.raises(errors.BadOption, match=message):
        getattr(parse(GIVEN | changes), check)()


# ------------------------------------------------------------------------------ secrets


def test_an_option_of_the_store_may_have_a_name_that_spark_redacts() -> None:
    """It is the same option, in any case, and no warning is due."""
    given = {"storage.Secret.azure_storage_account_key": "hush", "storage.aws_region": "r"}
    options = parse(GIVEN | given)
    assert options.location.storage == (("aws_region", "r"), ("azure_storage_account_key", "hush"))
    assert options.notes == ()
    same = parse(GIVEN | {"storage.secret_access_key": "hush"}).location.storage
    assert same == (("secret_access_key", "hush"),)


@pytest.mark.parametrize(
    "names", [("storage.a", "storage.secret.a"), ("storage.secret.a", "storage.A")]
)
def test_an_option_of_the_store_is_set_once(names: tuple[str, str]) -> None:
    """Two values under both names are refused, and not shown."""
    with pytest.raises(errors.BadOption, match=r"either this option or storage.secret.a") as caught:
        parse(GIVEN | dict.fromkeys(names, "hush"))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_printed"),
    [
        ("azure_storage_account_key", True),
        ("azure_storage_access_key", True),
        ("master_key", True),
        ("azure_storage_sas_key", True),
        ("azure_encryption_key", True),
        ("google_service_account_key", True),
        ("AWS_access_key_id", True),
        ("aws_sse_customer_key_base64", True),
        ("aws_secret_access_key", False),
        ("aws_session_token", False),
        ("azure_storage_sas_token", False),
        ("azure_client_secret", False),
        ("aws_sse_kms_key_id", False),
        ("google_service_account", False),
        ("aws_region", False),
    ],
)
def test_a_secret_that_spark_prints_is_told(name: str, is_printed: bool) -> None:
    """The warning names the option and its other name, not the value; the option works."""
    options = parse(GIVEN | {f"storage.{name}": "hush"})
    assert options.location.storage == ((name.lower(), "hush"),)
    assert bool(options.stream_notes()) == bool(options.batch_notes()) == is_printed
    if is_printed:
        (note,) = options.notes
        assert f"set storage.secret.{name.lower()} instead" in note
        assert "hush" not in note


def test_options_show_no_secret() -> None:
    """Nor does an error about options contain the value of one of the store."""
    given = GIVEN | {"storage.token": "hush"}
    assert "hush" not in repr(parse(given))
    for wrong in ({"startingOffsets": "last"}, {"storag": "hush"}, {"bootstrap": "host:8815"}):
        with pytest.raises(errors.Invalid) as caught:
            parse(given | wrong)
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3a://bucket/log", "s3a://bucket/log"),
        ("s3a://key:hu/sh@bucket/log", "s3a://…bucket/log"),
        ("s3a://key:hu/s@h@bucket/log", "s3a://…bucket/log"),
        ("az://c/log?sig=hush", "az://c/log?…"),
        ("s3://key:hu?sh@bucket/log", "s3://…bucket/log"),
    ],
)
def test_a_root_is_named_without_credentials(uri: str, shown: str) -> None:
    """Two roots are refused by an error that shows neither's."""
    assert without_credentials(uri) == shown
    given = {"root": uri, "path": "s3://key:hush@other", "subscribe": "a"}
    with pytest.raises(errors.BadOption, match="conflicts with root") as caught:
        parse(given)
    assert "hu" not in str(caught.value)
    assert repr(shown) in str(caught.value)


# ------------------------------------------------------------------------------ moved queries


def test_a_query_that_moves_over_is_told_once_what_has_no_effect() -> None:
    """Its options about Kafka's client are taken; one line names them, and what to set instead."""
    given = {
        "kafka.bootstrap.servers": "x:9092",
        "groupIdPrefix": "g",
        "kafka.group.id": "g",
        "kafka.x": "1",
    }
    (note,) = parse(GIVEN | given).stream_notes()
    assert note == (
        "options of Spark's Kafka connector have no effect here: groupIdPrefix,"
        " kafka.bootstrap.servers (set root, the folder or bucket of the log),"
        " kafka.group.id (set commitToGroup, the group in which a source shows its lag), kafka.x"
    )
    assert parse(GIVEN).stream_notes() == []


def test_a_batch_tells_that_it_has_no_triggers() -> None:
    """As in Spark's Kafka source, these options are ignored with a warning."""
    (note,) = parse(GIVEN | {"maxOffsetsPerTrigger": "5"}).batch_notes()
    assert "maxOffsetsPerTrigger has no effect" in note
