"""Topic configurations: Kafka's keys, types, bounds and defaults, and their effects here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.formats import topic_config
from sparklog.formats.config_rules import ConfigType, Edit
from sparklog.formats.topic_config import KEYS, OWN_KEYS, PUBLISH_INTERVAL, VALUE_SCHEMA
from sparklog.formats.topic_names import MIRROR_SOURCE

INT = 2**31 - 1
LONG = 2**63 - 1
WEEK_MS = 604_800_000

# As Kafka 4.1 has them: https://kafka.apache.org/41/documentation.html#topicconfigs
NUMBERS: Mapping[str, tuple[ConfigType, int, int, int]] = {
    "compression.gzip.level": (ConfigType.INT, -1, 9, -1),
    "compression.lz4.level": (ConfigType.INT, 1, 17, 9),
    "compression.zstd.level": (ConfigType.INT, -131_072, 22, 3),
    "delete.retention.ms": (ConfigType.LONG, 0, LONG, 86_400_000),
    "file.delete.delay.ms": (ConfigType.LONG, 0, LONG, 60_000),
    "flush.messages": (ConfigType.LONG, 1, LONG, LONG),
    "flush.ms": (ConfigType.LONG, 0, LONG, LONG),
    "index.interval.bytes": (ConfigType.INT, 0, INT, 4_096),
    "local.retention.bytes": (ConfigType.LONG, -2, LONG, -2),
    "local.retention.ms": (ConfigType.LONG, -2, LONG, -2),
    "max.compaction.lag.ms": (ConfigType.LONG, 1, LONG, LONG),
    "max.message.bytes": (ConfigType.INT, 0, INT, 1_048_588),
    "message.timestamp.after.max.ms": (ConfigType.LONG, 0, LONG, 3_600_000),
    "message.timestamp.before.max.ms": (ConfigType.LONG, 0, LONG, LONG),
    "min.compaction.lag.ms": (ConfigType.LONG, 0, LONG, 0),
    "min.insync.replicas": (ConfigType.INT, 1, INT, 1),
    "retention.bytes": (ConfigType.LONG, -(2**63), LONG, -1),
    "retention.ms": (ConfigType.LONG, -1, LONG, WEEK_MS),
    "segment.bytes": (ConfigType.INT, 1_048_576, INT, 1_073_741_824),
    "segment.index.bytes": (ConfigType.INT, 4, INT, 10_485_760),
    "segment.jitter.ms": (ConfigType.LONG, 0, LONG, 0),
    "segment.ms": (ConfigType.LONG, 1, LONG, WEEK_MS),
}
OTHERS: Mapping[str, tuple[ConfigType, str]] = {
    "cleanup.policy": (ConfigType.LIST, "delete"),
    "compression.type": (ConfigType.STRING, "producer"),
    "follower.replication.throttled.replicas": (ConfigType.LIST, ""),
    "leader.replication.throttled.replicas": (ConfigType.LIST, ""),
    "message.timestamp.type": (ConfigType.STRING, "CreateTime"),
    "min.cleanable.dirty.ratio": (ConfigType.DOUBLE, "0.5"),
    "preallocate": (ConfigType.BOOLEAN, "false"),
    "remote.log.copy.disable": (ConfigType.BOOLEAN, "false"),
    "remote.log.delete.on.disable": (ConfigType.BOOLEAN, "false"),
    "remote.storage.enable": (ConfigType.BOOLEAN, "false"),
    "unclean.leader.election.enable": (ConfigType.BOOLEAN, "false"),
}
OURS = {
    "max.message.bytes": str(limits.MAX_BATCH_BYTES),
    "message.timestamp.after.max.ms": str(LONG),
    "retention.ms": "-1",
}
"""Defaults that are not Kafka's."""


def taken(key: str, value: str) -> str | None:
    """Returns the stored value; None if it is refused, with the expected form."""
    try:
        (kept,) = topic_config.check({key: value}).values()
    except errors.BadOption as error:
        refused = error
    else:
        return kept
    assert (refused.option, refused.value) == (key, value)
    assert KEYS[key].rule.expected in str(refused)
    return None


def test_the_keys_are_kafkas() -> None:
    """All of them and a few others, with its types and, but for three, its defaults."""
    assert KEYS.keys() == NUMBERS.keys() | OTHERS.keys() | OWN_KEYS
    for name in KEYS.keys() - OWN_KEYS:
        key = KEYS[name]
        known = NUMBERS[name] if name in NUMBERS else OTHERS[name]
        assert key.rule.kind is known[0]
        assert key.default == OURS.get(name, str(known[-1]))
        assert taken(name, key.default) == key.default


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_kafkas_bounds(name: str) -> None:
    """To the last one; and nothing but an integer is a number."""
    _, low, high, _ = NUMBERS[name]
    assert [taken(name, str(each)) for each in (low, high)] == [str(low), str(high)]
    for wrong in (str(low - 1), str(high + 1), "", "1.0", "1e3", "0x10", "many", "1_000", "--1"):
        assert taken(name, wrong) is None
    assert taken(name, f" +{high}\n") == str(high)


def test_gzip_has_no_level_0() -> None:
    """Between -1, which means its own default, and 1."""
    assert taken("compression.gzip.level", "0") is None


@given(st.sampled_from(sorted(NUMBERS)), st.integers(-(2**65), 2**65), st.integers(0, 5))
def test_an_integer_is_taken_within_its_bounds(name: str, number: int, zeros: int) -> None:
    """However it is written, it is kept as one writes it."""
    _, low, high, _ = NUMBERS[name]
    text = f"{'-' if number < 0 else '+'}{'0' * zeros}{abs(number)}"
    is_right = low <= number <= high and (name, number) != ("compression.gzip.level", 0)
    assert taken(name, text) == (str(number) if is_right else None)


@given(st.sampled_from(sorted(KEYS.keys() - {VALUE_SCHEMA})), st.text(max_size=12))
def test_any_text_is_kept_or_refused(name: str, value: str) -> None:
    """Every accepted value is accepted again as it is stored."""
    kept = taken(name, value)
    if kept is not None:
        assert taken(name, kept) == kept


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("preallocate", {"TRUE": "true", " False ": "false"}, ["", "yes", "1", "truee"]),
        ("remote.storage.enable", {"False": "false"}, ["true", ""]),
        ("message.timestamp.type", {"LogAppendTime": "LogAppendTime"}, ["logappendtime", ""]),
        (
            "compression.type",
            {each: each for each in ("uncompressed", "gzip", "snappy", "lz4", "zstd")},
            ["none", "GZIP", ""],
        ),
        (
            PUBLISH_INTERVAL,
            {"-1": "-1", "0": "0", " +1 ": "1", "86400000": "86400000"},
            ["-2", "86400001", "1s", ""],
        ),
        (
            MIRROR_SOURCE,
            {" kafka c1, topic ä ": "kafka c1, topic ä", "": "", "x" * 1_000: "x" * 1_000},
            ["two\nlines", "x" * 1_001],
        ),
        (
            "cleanup.policy",
            {
                "compact": "compact",
                " delete , compact ": "delete,compact",
                "compact,delete": "compact,delete",
                "compact,compact": "compact",
                "": "",
                " ": "",
            },
            [",", "compact,", "keep", "compact,keep", "Compact"],
        ),
        (
            "leader.replication.throttled.replicas",
            {"": "", "*": "*", "0:1, 12:30": "0:1,12:30"},
            ["1", "0:1,*", "a:b", "0:1;", "**"],
        ),
        (
            "min.cleanable.dirty.ratio",
            {"0": "0", "1.0": "1.0", ".25": ".25", "5e-1": "5e-1"},
            ["", "1.01", "-0.1", "nan", "inf", "half", f"{'9' * 200_000}x"],
        ),
    ],
)
def test_other_values(name: str, right: dict[str, str], wrong: list[str]) -> None:
    """As Kafka takes them, and kept without its freedoms."""
    assert {value: taken(name, value) for value in right} == right
    assert [value for value in wrong if taken(name, value) is not None] == []


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    """Misspelt, it must not pass for one that has been set."""
    with pytest.raises(errors.UnknownOption, match=r"Did you mean 'retention\.ms'"):
        topic_config.check({"retention.msec": "1"})


def test_two_keys_may_contradict_each_other() -> None:
    """Keys that make a record wait longer than allowed are refused; defaults count as well."""
    low, high = "min.compaction.lag.ms", "max.compaction.lag.ms"
    assert topic_config.check({low: "5", high: "5"}) == {low: "5", high: "5"}
    with pytest.raises(errors.BadOption, match="must not be above"):
        topic_config.check({low: "6", high: "5"})


# ------------------------------------------------------------------------------ edits


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([(Edit.SET, "flush.ms", "8")], {"flush.ms": "8"}),
        ([(Edit.DELETE, "flush.ms", None)], {}),
        ([(Edit.DELETE, "no.such.key", None)], {"flush.ms": "7"}),
        ([(Edit.APPEND, "cleanup.policy", "compact")], {"cleanup.policy": "delete,compact"}),
        ([(Edit.APPEND, "cleanup.policy", "delete")], {"cleanup.policy": "delete"}),
        ([(Edit.SUBTRACT, "cleanup.policy", "delete")], {"cleanup.policy": ""}),
        (
            [
                (Edit.APPEND, "leader.replication.throttled.replicas", "0:1,0:2"),
                (Edit.APPEND, "leader.replication.throttled.replicas", "0:3,0:2"),
                (Edit.SUBTRACT, "leader.replication.throttled.replicas", "0:1,9:9"),
            ],
            {"leader.replication.throttled.replicas": "0:2,0:3"},
        ),
    ],
)
def test_edits_are_kafkas(
    edits: list[tuple[Edit, str, str | None]], expected: dict[str, str]
) -> None:
    """A list that is not set has its default to be added to and taken from."""
    before = {"flush.ms": "7"}
    found = topic_config.edited(before, edits)
    assert found == (expected if "flush.ms" in str(edits) else before | expected)
    assert before == {"flush.ms": "7"}


@pytest.mark.parametrize(
    ("edit", "name", "value", "kind"),
    [
        (Edit.APPEND, "flush.ms", "1", errors.BadOption),
        (Edit.SUBTRACT, "compression.type", "gzip", errors.BadOption),
        (Edit.SET, "flush.ms", None, errors.BadOption),
        (Edit.SET, "no.such.key", "1", errors.UnknownOption),
        (Edit.APPEND, "no.such.key", "1", errors.UnknownOption),
    ],
)
def test_an_edit_that_makes_no_sense_is_refused(
    edit: Edit, name: str, value: str | None, kind: type[errors.SparklogError]
) -> None:
    """Only lists are added to, and only what exists is set."""
    with pytest.raises(kind):
        topic_config.edited({}, [(edit, name, value)])


# ------------------------------------------------------------------------------ meanings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"compression.type": "producer", "compression.gzip.level": "1"}, None),
        ({"compression.type": "uncompressed"}, ("none", -1)),
        ({"compression.type": "gzip"}, ("gzip", -1)),
        ({"compression.type": "zstd", "compression.zstd.level": "-7"}, ("zstd", -7)),
        ({"compression.type": "lz4", "compression.gzip.level": "1"}, ("lz4", 9)),
        ({"compression.type": "snappy"}, ("snappy", -1)),
    ],
)
def test_how_batches_are_compressed(
    config: dict[str, str], expected: tuple[str, int] | None
) -> None:
    """A codec with its own level; none where it is the producer's choice."""
    assert topic_config.compression_of(config) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(None, False), ("", False), ("delete", False), ("compact", True), ("delete,compact", True)],
)
def test_what_is_compacted(policy: str | None, expected: bool) -> None:
    """Also where old records are deleted."""
    config = {} if policy is None else {"cleanup.policy": policy}
    assert topic_config.is_compacted(config) is expected


def test_what_has_no_effect_says_so() -> None:
    """The description names the reason; keys with an effect come first, one line each."""
    *lines, others = topic_config.described()
    assert [line.partition(" ")[0] for line in lines] == [
        name for name, key in KEYS.items() if not key.idle
    ]
    for name, key in KEYS.items():
        assert (f"(no effect here: {key.idle})" in key.about) is bool(key.idle)
        assert (name in others.partition(": ")[2].split(", ")) is bool(key.idle)


@pytest.mark.parametrize(
    ("config", "usual_seconds", "expected"),
    [
        ({}, 10.0, 10.0),
        ({PUBLISH_INTERVAL: "-1"}, 10.0, 10.0),
        ({PUBLISH_INTERVAL: "0"}, 10.0, 0.0),
        ({PUBLISH_INTERVAL: "500"}, 1.0, 0.5),
        ({PUBLISH_INTERVAL: "3600000"}, 10.0, 3_600.0),
        ({PUBLISH_INTERVAL: "3600000", "retention.ms": "3600000"}, 10.0, 360.0),
        ({PUBLISH_INTERVAL: "3600000", "retention.ms": "1000"}, 10.0, 10.0),
        ({PUBLISH_INTERVAL: "1000", "retention.ms": "1000"}, 10.0, 1.0),
        ({PUBLISH_INTERVAL: "3600000", "max.compaction.lag.ms": "1000"}, 10.0, 3_600.0),
        (
            {
                PUBLISH_INTERVAL: "3600000",
                "cleanup.policy": "compact",
                "retention.ms": "1000",
                "max.compaction.lag.ms": "600000",
            },
            10.0,
            60.0,
        ),
        ({PUBLISH_INTERVAL: "3600000", "cleanup.policy": "", "retention.ms": "1"}, 10.0, 3_600.0),
    ],
)
def test_an_interval_is_a_small_part_of_the_time_until_records_are_removed(
    config: Mapping[str, str], usual_seconds: float, expected: float
) -> None:
    """Promise: retention and key compaction, which see the table alone, are not held up by it."""
    found = topic_config.publish_interval_seconds(config, usual_seconds=usual_seconds)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"value.evolve": "add"}, "value.evolve"),
        ({"value.format": "json", "value.wait.ms": "10"}, "value.wait.ms"),
        ({"value.format": "avro", "value.wait.ms": "60001"}, "value.wait.ms"),
        ({"value.format": "avro", "value.schema": "subjects"}, "value.schema"),
        ({"value.format": "json", "value.schema": "subject"}, "value.schema"),
    ],
)
def test_keys_of_registries_need_avro(config: dict[str, str], refused: str) -> None:
    """Each refusal names the key."""
    with pytest.raises(errors.BadOption) as error:
        topic_config.check(config)
    assert error.value.option == refused


def test_subjects_of_avro_topics() -> None:
    """As Confluent's serializers name them, unless the topic names one; DDL names none."""
    avro = {"value.format": "avro"}
    for schema, subject in (("", "t-value"), ("subject", "t-value"), ("subject:a:b", "a:b")):
        config = topic_config.check(avro | ({"value.schema": schema} if schema else {}))
        assert topic_config.has_subject(config)
        assert topic_config.subject_of(config, "t") == subject
    given = topic_config.check(avro | {"value.schema": "subject STRING"})
    assert not topic_config.has_subject(given)
    assert not topic_config.adds_columns(topic_config.check(avro | {"value.evolve": "propose"}))
    assert topic_config.adds_columns(avro)
