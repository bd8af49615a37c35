"""A broker's settings: their sources, the precedence of these, and the errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparklog import errors, limits
from sparklog.settings import (
    FLUSH_LINGER_REMOTE_MS,
    BrokerSettings,
    LivenessSettings,
    WriterSettings,
    load_settings,
)

SHIPPED = Path(__file__).parents[2] / "conf" / "broker.toml"
ROOT = {"root": "/data"}


def file_of(folder: Path, text: str) -> Path:
    """A settings file with `text` in it."""
    file = folder / "broker.toml"
    file.write_text(text, "utf-8")
    return file


def flat(settings: BrokerSettings) -> dict[str, Any]:
    """Every setting by its dotted name."""
    found: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(settings).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


# ------------------------------------------------------------------------------ the shipped file


def test_shipped_file_lists_every_key_with_its_default() -> None:
    """`conf/broker.toml` has exactly the keys that the code has, each at its default."""
    document = tomllib.loads(SHIPPED.read_text("utf-8"))
    assert document.pop("storage") == {}

    listed: dict[str, Any] = {}
    for top, entry in document.items():
        entries = entry if isinstance(entry, dict) else None
        listed |= {f"{top}.{key}": value for key, value in (entries or {}).items()}
        listed |= {} if entries else {top: entry}

    defaults = flat(BrokerSettings())
    assert listed == defaults
    assert {name: type(value) for name, value in listed.items()} == {
        name: type(value) for name, value in defaults.items()
    }


def test_shipped_file_says_why_for_every_key() -> None:
    """Every key of `conf/broker.toml` has a comment right above it."""
    lines = SHIPPED.read_text("utf-8").splitlines()
    bare = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if " = " in line and not line.startswith("#") and not above.startswith("# ")
    ]
    assert bare == []


def test_shipped_file_can_be_used_as_it_is() -> None:
    """A broker given the shipped file and a root has the defaults."""
    assert load_settings(SHIPPED, {}, ROOT) == BrokerSettings(root="/data")


# ------------------------------------------------------------------------------ precedence


def test_command_line_before_environment_before_file_before_default(tmp_path: Path) -> None:
    """Each source wins over the ones below it, key by key."""
    file = file_of(
        tmp_path, "root = 'file'\nid = 1\n[writer]\nlinger_ms = 1\nqueue_bytes = 100_000_000\n"
    )
    environment = {"SPARKLOG_ID": "2", "SPARKLOG_WRITER_LINGER_MS": "2"}

    settings = load_settings(file, environment, {"writer.linger_ms": 3})

    assert settings.writer.linger_ms == 3
    assert settings.id == 2
    assert settings.writer.queue_bytes == 100_000_000
    assert settings.root == "file"
    assert settings.writer.max_batch_bytes == limits.MAX_BATCH_BYTES


def test_option_left_out_on_the_command_line_decides_nothing() -> None:
    """None among the overrides leaves a setting to the sources below."""
    settings = load_settings(None, {"SPARKLOG_ROOT": "/data"}, {"root": None, "id": None})
    assert settings == BrokerSettings(root="/data")


def test_every_key_has_a_variable_of_its_own() -> None:
    """Each key can be set through the environment, and no variable stands for two."""
    defaults = flat(BrokerSettings(root="/data"))
    environment = {
        "SPARKLOG_" + name.replace(".", "_").upper(): str(value) for name, value in defaults.items()
    }
    assert len(environment) == len(defaults)
    assert load_settings(None, environment, {}) == BrokerSettings(root="/data")


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("SPARKLOG_ROOT", "s3://bucket/log", "root", "s3://bucket/log"),
        ("SPARKLOG_HOT_TAIL_BYTES", "0", "hot_tail.bytes", 0),
        ("SPARKLOG_JANITOR_ENABLED", "false", "janitor.enabled", False),
        ("SPARKLOG_JANITOR_ENABLED", "1", "janitor.enabled", True),
        ("SPARKLOG_PUBLISHER_INTERVAL_SECONDS", "0.25", "publisher.interval_seconds", 0.25),
        ("SPARKLOG_LOG_LEVEL", "debug", "log.level", "debug"),
        ("SPARKLOG_STORAGE_AWS_REGION", "eu-central-1", "storage.aws_region", "eu-central-1"),
    ],
)
def test_variable_is_read_as_its_key_s_type(
    variable: str, text: str, key: str, value: object
) -> None:
    """The text of a variable becomes the integer, number, truth or text that its key asks for."""
    settings = load_settings(None, {"SPARKLOG_ROOT": "/data", variable: text}, {})
    assert flat(settings)[key] == value


def test_text_on_the_command_line_is_read_as_its_key_s_type() -> None:
    """`--set writer.linger_ms=5` needs no types of its own."""
    settings = load_settings(None, {}, ROOT | {"writer.linger_ms": "5", "storage.token": "t"})
    assert settings.writer.linger_ms == 5
    assert settings.storage == {"token": "t"}


def test_storage_options_of_all_sources_are_merged(tmp_path: Path) -> None:
    """A secret from the environment joins the region from the file."""
    file = file_of(tmp_path, "[storage]\naws_region = 'eu'\naws_endpoint = 'http://a'\n")
    environment = {"SPARKLOG_STORAGE_AWS_SECRET_ACCESS_KEY": "s"}
    settings = load_settings(file, environment, ROOT | {"storage.aws_endpoint": "http://b"})
    assert settings.storage == {
        "aws_region": "eu",
        "aws_secret_access_key": "s",
        "aws_endpoint": "http://b",
    }


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "option", "nearest"),
    [
        ("[writer]\nlingerms = 1", "writer.lingerms", "writer.linger_ms"),
        ("[flihgt]\nlisten = 'a:1'", "flihgt", "flight"),
        ("linger_ms = 1", "linger_ms", "writer.linger_ms"),
        ("rot = '/data'", "rot", "root"),
    ],
)
def test_unknown_key_of_the_file_is_named_with_the_nearest(
    tmp_path: Path, text: str, option: str, nearest: str
) -> None:
    """A misspelt key in the file is an error with the file, the key and the most similar one."""
    file = file_of(tmp_path, text)
    with pytest.raises(errors.UnknownOption) as caught:
        load_settings(file, {}, ROOT)
    assert str(caught.value) == (
        f"There is no option {option!r} in {file}. Did you mean {nearest!r}?"
    )


def test_unknown_key_like_nothing_else_comes_without_a_hint(tmp_path: Path) -> None:
    """No nearest key is made up."""
    file = file_of(tmp_path, "[writer]\nzzzzzzzz = 1")
    with pytest.raises(errors.UnknownOption) as caught:
        load_settings(file, {}, ROOT)
    assert caught.value.facts["hint"] == ""


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("SPARKLOG_WRITER_LINGER", "SPARKLOG_WRITER_LINGER_MS"),
        ("SPARKLOG_FLIGTH_LISTEN", "SPARKLOG_FLIGHT_LISTEN"),
        ("SPARKLOG_FLIGHT_PORT", "SPARKLOG_FLIGHT_LISTEN"),
    ],
)
def test_slip_in_a_variable_is_named_with_the_nearest(variable: str, nearest: str) -> None:
    """A variable of a table, or almost of one, is an error when it is not a setting."""
    with pytest.raises(errors.UnknownOption) as caught:
        load_settings(None, {variable: "8815"}, ROOT)
    assert caught.value.option == variable
    assert caught.value.hint == f" Did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SPARKLOG_SERVICE_HOST", "10.0.0.1"),
        ("SPARKLOG_FLIGHT_SERVICE_HOST", "10.0.0.1"),
        ("SPARKLOG_FLIGHT_SERVICE_PORT_GRPC", "8815"),
        ("SPARKLOG_FLIGHT_PORT", "tcp://10.0.0.1:8815"),
        ("SPARKLOG_FLIGHT_PORT_8815_TCP_ADDR", "10.0.0.1"),
        ("SPARKLOG_STORAGE_SERVICE_HOST", "10.0.0.1"),
        ("SPARKLOG_SOAK_MINUTES", "30"),
        ("SPARKLOGS", "x"),
        ("PATH", "/bin"),
    ],
)
def test_variable_that_others_set_is_let_pass(variable: str, value: str) -> None:
    """Kubernetes' links to a service of our name are neither settings nor errors."""
    assert load_settings(None, {variable: value}, ROOT) == BrokerSettings(root="/data")


def test_unknown_override_is_named_with_the_nearest() -> None:
    """A slip on the command line is an error even where no value was given."""
    with pytest.raises(errors.UnknownOption) as caught:
        load_settings(None, {}, ROOT | {"writer.linger": None})
    assert str(caught.value) == (
        "There is no option 'writer.linger' in the command line. Did you mean 'writer.linger_ms'?"
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("id", -1, "expected an integer from 0 to 2147483647, or 'auto'"),
        ("id", "Auto", "expected an integer from 0 to 2147483647, or 'auto'"),
        ("id", True, "expected an integer from 0 to 2147483647"),
        ("writer.linger_ms", -2, "expected an integer from -1 to 60000"),
        ("writer.linger_ms", "soon", "expected an integer from -1 to 60000"),
        ("writer.flush_max_bytes", 0, "expected an integer from 1 to 1073741824"),
        ("publisher.interval_seconds", 0, "expected more than 0, or -1"),
        ("publisher.interval_seconds", "nan", "expected a number from -1.0 to 86400"),
        ("publisher.interval_seconds", "inf", "expected a number from -1.0 to 86400"),
        ("writer.trim_grace_seconds", 9.9, "expected a number from 10.0 to 31622400"),
        ("janitor.compact_files", 1, "expected an integer from 2 to 1000000"),
        ("topics.default_partitions", 10_001, "expected an integer from 1 to 10000"),
        ("janitor.enabled", "perhaps", "expected true or false"),
        ("log.level", "loud", "expected one of 'debug', 'info', 'warning', 'error'"),
        ("flight.listen", "8815", "expected host:port, the port from 0 to 65535"),
        ("flight.listen", "host:65536", "expected host:port, the port from 0 to 65535"),
        ("kafka.advertised", "host:0", "expected host:port, the port from 1 to 65535"),
        ("flight.advertised", "grpc://host:1", "expected host:port, the port from 0 to 65535"),
        ("kafka.listen", "0.0.0.0:9092", "clients cannot connect to this host"),
        ("kafka.listen", "[::]:9092", "clients cannot connect to this host"),
        ("kafka.listen", "SSL://127.0.0.1:9092", "a listener with TLS needs tls.certificate and"),
        ("kafka.listen", "TLS://127.0.0.1:9092", "expected host:port or one of PLAINTEXT, SSL"),
        ("kafka.listen", "h:1,h:2", "two listeners are called PLAINTEXT: write NAME=PLAINTEXT://"),
        ("kafka.listen", "A B=PLAINTEXT://h:1", "the name 'A B' has other characters than"),
        ("kafka.listen", "A=PLAINTEXT://h:1,B=PLAINTEXT://h:1", "kafka.listen has the same addr"),
        ("kafka.listen", "h:1,", "expected host:port; there is nothing after a comma"),
        ("kafka.advertised", "k:1,k:2", "it has several addresses for a listener"),
        ("kafka.advertised", "OUT=k:1", "no listener is called OUT; there is PLAINTEXT"),
        ("kafka.listen", "SASL_SSL://127.0.0.1:9092", "a listener with TLS needs tls.certificate"),
        ("kafka.sasl_mechanisms", "PLAIN,GSSAPI", "expected some of SCRAM-SHA-256, SCRAM-SHA-512"),
        ("kafka.sasl_mechanisms", "", "expected some of SCRAM-SHA-256, SCRAM-SHA-512, PLAIN"),
        ("kafka.connections_max_reauth_ms", -1, "expected an integer from 0 to 2147483647"),
        ("oauth.issuer", "i", "it has no effect without oauth.jwks"),
        ("oauth.clock_skew_seconds", 601, "expected an integer from 0 to 600"),
        ("tls.certificate", "c.pem", "it has no effect: kafka.listen, flight.listen or metrics"),
        ("tls.client_auth", "required", "it has no effect: kafka.listen, flight.listen or metrics"),
        ("root", "", "name a folder, or an s3://, gs:// or az:// address"),
        ("root", "localhost:9092", "this looks like an address, and there is no folder"),
        ("root", "~/data", "only a shell expands ~ to the home folder"),
        ("kafka.listen", "127.0.0.1:8815", "flight.listen has the same address"),
        ("liveness.dead_after_seconds", 1.5, "must be at least twice liveness.heartbeat_seconds"),
        ("liveness.dead_after_seconds", 0, "expected more than 0, or -1"),
        ("liveness.heartbeat_seconds", -0.5, "expected more than 0, or -1"),
        ("writer.max_record_bytes", 2**27, "must not be above writer.max_batch_bytes = 67108864"),
        ("publisher.unpublished_bytes", 1, "must not be above publisher.unpublished_bytes = 1"),
    ],
)
def test_value_out_of_bounds_is_named_with_its_bound(key: str, value: object, reason: str) -> None:
    """A value of the wrong type, out of bounds or against another one says what would be right."""
    with pytest.raises(errors.BadOption) as caught:
        load_settings(None, {}, ROOT | {key: value})
    assert caught.value.reason.startswith(reason)


def test_each_listener_has_an_advertised_address() -> None:
    """By its name; one without is advertised where it listens."""
    given = ROOT | {
        "security.anonymous": "anywhere",
        "kafka.listen": "LOCAL=PLAINTEXT://127.0.0.1:9092,OUT=PLAINTEXT://0.0.0.0:9093",
        "kafka.advertised": "OUT=k1:9093",
    }
    kafka = load_settings(None, {}, given).kafka
    assert [each.name for each in kafka.listeners] == ["LOCAL", "OUT"]
    assert (kafka.advertised_of("LOCAL"), kafka.advertised_of("OUT")) == ("", "k1:9093")
    for wrong, reason in (
        ("k1:9093", "there are several listeners: write NAME=host:port, of LOCAL, OUT"),
        ("LOCAL=k1:9092", "clients cannot connect to this host"),
    ):
        with pytest.raises(errors.BadOption, match=reason):
            load_settings(None, {}, given | {"kafka.advertised": wrong})


def test_bad_variable_is_named_as_it_was_written() -> None:
    """The error speaks of the variable, not of the key behind it."""
    with pytest.raises(errors.BadOption) as caught:
        load_settings(None, {"SPARKLOG_WRITER_LINGER_MS": "soon"}, ROOT)
    assert str(caught.value) == (
        "Invalid option SPARKLOG_WRITER_LINGER_MS = 'soon': expected an integer from -1 to 60000."
    )


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:8815", "broker-0.example:65535"])
def test_address_is_a_host_and_a_port(address: str) -> None:
    """Names, IPv4 and bracketed IPv6 are heard on, and port 0 means any free one."""
    given = ROOT | {"flight.listen": address, "security.anonymous": "anywhere"}
    assert load_settings(None, {}, given).flight.listen == address


@pytest.mark.parametrize(
    ("listen", "is_served"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("10.0.0.1:1", False),
        ("broker-0.example:1", False),
        ("SSL://10.0.0.1:1", False),
        ("SASL_SSL://10.0.0.1:1", True),
        ("IN=PLAINTEXT://127.0.0.1:1,OUT=SASL_SSL://10.0.0.1:2", True),
        ("OUT=SASL_SSL://10.0.0.1:2,IN=PLAINTEXT://10.0.0.1:1", False),
    ],
)
@pytest.mark.parametrize("table", ["kafka", "flight"])
def test_strangers_are_served_on_loopback_only(table: str, listen: str, *, is_served: bool) -> None:
    """Unless a setting says otherwise, or they need a certificate; the error has both remedies."""
    given = ROOT | {f"{table}.listen": listen}
    if "SSL" in listen:
        given |= {"tls.certificate": "c.pem", "tls.key": "c.key"}
    load_settings(None, {}, given | {"security.anonymous": "anywhere"})
    if "SSL://" in listen and "PLAINTEXT" not in listen:
        of_clients = {"tls.client_auth": "required", "tls.ca": "ca.pem"}
        load_settings(None, {}, given | of_clients)
    if is_served:
        load_settings(None, {}, given)
        return
    with pytest.raises(errors.BadOption, match=r"SASL_SSL://.*security.anonymous") as raised:
        load_settings(None, {}, given)
    assert raised.value.option == f"{table}.listen"


def test_text_in_the_file_is_no_number(tmp_path: Path) -> None:
    """TOML has types, so a quoted number is a mistake."""
    with pytest.raises(errors.BadOption) as caught:
        load_settings(file_of(tmp_path, "id = '1'"), {}, ROOT)
    assert caught.value.option == "id"


def test_table_written_as_a_value_is_refused(tmp_path: Path) -> None:
    """`writer = 3` says that a table is expected."""
    with pytest.raises(errors.BadOption) as caught:
        load_settings(file_of(tmp_path, "writer = 3"), {}, ROOT)
    assert caught.value.reason == "write it as a table, [writer]"


@pytest.mark.parametrize("text", ["id = ", None])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    """A settings file that is missing or no TOML is an error that names it."""
    file = tmp_path / "none.toml" if text is None else file_of(tmp_path, text)
    with pytest.raises(errors.BadOption) as caught:
        load_settings(file, {}, ROOT)
    assert caught.value.value == str(file)


# ------------------------------------------------------------------------------ the id


def named(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Gives this machine that host name."""
    monkeypatch.setattr("sparklog.settings.loading.socket.gethostname", lambda: host)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("sparklog-2", 2),
        ("sparklog-0", 0),
        ("log-2024-11", 11),
        ("sparklog-2.sparklog.default.svc.cluster.local", 2),
        ("sparklog-2147483647", 2_147_483_647),
    ],
)
def test_id_is_the_ordinal_of_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, expected: int
) -> None:
    """With "auto" from any source, the id is the number at the end of the host name."""
    named(monkeypatch, host)
    sources: list[tuple[Path | None, dict[str, str], dict[str, Any]]] = [
        (file_of(tmp_path, "id = 'auto'"), {}, {}),
        (None, {"SPARKLOG_ID": "auto"}, {}),
        (None, {}, {"id": "auto"}),
    ]
    for file, environment, given in sources:
        settings = load_settings(file, environment, ROOT | given)
        assert settings == BrokerSettings(root="/data", id=expected)
        assert type(settings.id) is int


def test_a_broker_loses_sight_before_others_replace_it() -> None:
    """Its last heartbeat may be one interval older than its last look, and late."""
    for heartbeat, dead_after, sight in ((1.0, 5.0, 3.0), (2.0, 10.0, 6.0), (1.0, 2.0, 1.0)):
        liveness = LivenessSettings(heartbeat_seconds=heartbeat, dead_after_seconds=dead_after)
        assert liveness.on(local=True).sight_seconds == sight


def test_hosts_with_several_brokers_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host leaves as many ids as it has brokers."""
    for host, first in (("sparklog-0", 0), ("sparklog-1", 3), ("sparklog-2", 6)):
        named(monkeypatch, host)
        assert load_settings(None, {"SPARKLOG_ID": "auto"}, ROOT, brokers=3).id == first


@pytest.mark.parametrize(
    "host",
    ["broker", "", "broker2", "2", "-", "sparklog-2a", "a.b-2", "sparklog-٣", "x-2147483648"],
)
def test_host_without_an_ordinal_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """The error names the host, and what to do; an ordinal of the domain is not the host's."""
    named(monkeypatch, host)
    with pytest.raises(errors.BadOption) as caught:
        load_settings(None, {"SPARKLOG_ID": "auto"}, ROOT)
    assert caught.value.option == "id"
    assert f"the host name {host!r} does not end in an ordinal" in caught.value.reason
    assert "set id to a number" in caught.value.reason


def test_number_of_a_higher_source_wins_over_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host name is then not looked at, so that an embedded broker starts anywhere."""
    named(monkeypatch, "laptop")
    assert load_settings(None, {"SPARKLOG_ID": "auto"}, ROOT | {"id": 7}).id == 7


# ------------------------------------------------------------------------------ the values


def test_secret_of_the_store_is_never_shown(tmp_path: Path) -> None:
    """Neither a settings value nor an error about it shows what a storage option holds."""
    settings = load_settings(None, {"SPARKLOG_STORAGE_TOKEN": "hush"}, ROOT)
    assert "hush" not in repr(settings)
    assert "token" in repr(settings)

    with pytest.raises(errors.BadOption) as caught:
        load_settings(file_of(tmp_path, "[storage]\ntoken = 1234"), {}, ROOT)
    assert "1234" not in str(caught.value)


@pytest.mark.parametrize(
    ("linger_ms", "local", "resolved"),
    [(-1, True, 0), (-1, False, FLUSH_LINGER_REMOTE_MS), (0, False, 0), (7, True, 7)],
)
def test_linger_depends_on_the_root_only_when_unset(
    linger_ms: int, local: bool, resolved: int
) -> None:
    """-1 is 0 on a local root and 10 on an object store; any other value is itself."""
    assert WriterSettings(linger_ms=linger_ms).linger_ms_on(local=local) == resolved


def test_liveness_costs_less_on_object_stores() -> None:
    """Unless they are set, its times are longer where each heartbeat is a request."""
    settings = load_settings(None, {}, ROOT).liveness
    local, remote = settings.on(local=True), settings.on(local=False)
    assert (local.heartbeat_seconds, local.dead_after_seconds) == (1.0, 5.0)
    assert (remote.heartbeat_seconds, remote.dead_after_seconds) == (3.0, 10.0)
    given = load_settings(None, {}, ROOT | {"liveness.heartbeat_seconds": 2.5}).liveness
    assert given.on(local=True).heartbeat_seconds == given.on(local=False).heartbeat_seconds == 2.5
    assert given.on(local=False).dead_after_seconds == 10.0
    assert given.alone_seconds_on(local=False) == 2.5


@pytest.mark.parametrize(
    ("dead_after", "watched", "alone"),
    [(-1.0, 3.0, 4.0), (5.0, 2.0, 2.0), (8.0, 2.4, 3.2), (60.0, 3.0, 10.0)],
)
def test_heartbeats_on_an_object_store(dead_after: float, watched: float, alone: float) -> None:
    """Promise: two intervals fit into the time after which a broker is dead, watched or alone.

    A member judges others only while its own heartbeats are younger than that as well.
    """
    settings = LivenessSettings(dead_after_seconds=dead_after)
    found = settings.on(local=False)
    assert found.heartbeat_seconds == pytest.approx(watched)
    assert settings.alone_seconds_on(local=False) == pytest.approx(alone)
    assert 2 * alone <= found.dead_after_seconds
    assert watched < found.sound_seconds < found.dead_after_seconds
    assert watched < found.sight_seconds < found.dead_after_seconds
    assert settings.alone_seconds_on(local=True) == 1.0


def test_times_that_only_fit_an_object_store() -> None:
    """Defaults are those of the root's kind where settings are compared."""
    late = {"liveness.heartbeat_seconds": 4}
    assert load_settings(None, {}, {"root": "s3://bucket/log"} | late).root == "s3://bucket/log"
    with pytest.raises(errors.BadOption, match="at least twice"):
        load_settings(None, {}, ROOT | late)


def test_plain_is_offered_where_nobody_listens(tmp_path: Path) -> None:
    """Promise: with TLS or on this machine; a listener that would have no other is refused."""

    def mechanisms(listen: str, given: str = "PLAIN,SCRAM-SHA-512") -> list[tuple[str, ...]]:
        pem = str(tmp_path / "x.pem")
        options = {"root": str(tmp_path), "kafka.listen": listen, "kafka.sasl_mechanisms": given}
        if "SSL" in listen:
            options |= {"tls.certificate": pem, "tls.key": pem}
        found = load_settings(None, {}, options)
        return [found.mechanisms_of(each) for each in found.kafka.listeners]

    both = ("PLAIN", "SCRAM-SHA-512")
    assert mechanisms("SASL_SSL://10.0.0.7:9092,SASL_PLAINTEXT://10.0.0.7:9093") == [
        both,
        ("SCRAM-SHA-512",),
    ]
    assert mechanisms("SASL_PLAINTEXT://127.0.0.1:9092") == [both]
    with pytest.raises(errors.BadOption, match="PLAIN can be read on the way"):
        mechanisms("SASL_PLAINTEXT://10.0.0.7:9092", "PLAIN")


def test_tokens_are_accepted_at_listeners_that_ask_for_a_login() -> None:
    """OAUTHBEARER is offered with [oauth], over TLS and on loopback addresses."""
    listen = "SASL_SSL://10.0.0.7:1,A=SASL_PLAINTEXT://10.0.0.7:2,B=SASL_PLAINTEXT://127.0.0.1:3"
    given = ROOT | {"kafka.listen": listen, "tls.certificate": "c.pem", "tls.key": "k.pem"}
    oauth = {"oauth.jwks": "https://h/k", "oauth.issuer": "i", "oauth.audience": "a"}

    def mechanisms(**more: Any) -> list[tuple[str, ...]]:
        found = load_settings(None, {}, given | more)
        return [found.mechanisms_of(each) for each in found.kafka.listeners]

    scram = ("SCRAM-SHA-256", "SCRAM-SHA-512")
    assert mechanisms() == [(*scram, "PLAIN"), scram, (*scram, "PLAIN")]
    assert mechanisms(**oauth) == [
        (*scram, "PLAIN", "OAUTHBEARER"),
        scram,
        (*scram, "PLAIN", "OAUTHBEARER"),
    ]
    only = {"kafka.sasl_mechanisms": "OAUTHBEARER"}
    with pytest.raises(errors.BadOption, match=r"OAUTHBEARER needs the table \[oauth\]"):
        mechanisms(**only)
    with pytest.raises(errors.BadOption, match="OAUTHBEARER can be read on the way"):
        mechanisms(**only, **oauth)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"oauth.issuer": ""}, "oauth.issuer"),
        ({"oauth.audience": " "}, "oauth.audience"),
        ({"oauth.sub_claim": ""}, "oauth.sub_claim"),
        ({"oauth.jwks": "http://issuer.example.org/keys"}, "use https://"),
        ({"oauth.jwks": "http://localhost@issuer.example.org/"}, "without a user"),
        ({"oauth.jwks": "https:///keys"}, "expected https://host/path"),
        ({"oauth.jwks": "https://host:99999/keys"}, "expected https://host/path"),
        ({"oauth.jwks": "ftp://host/keys"}, "or the path of a file"),
        ({"oauth.jwks": "keys.json", "oauth.ca": "ca.pem"}, "does not begin with https://"),
        ({"kafka.listen": "127.0.0.1:9092"}, "it has no effect: kafka.listen or flight.listen"),
    ],
)
def test_tables_for_tokens_that_are_not_complete(change: dict[str, str], reason: str) -> None:
    """The error names the key of [oauth] and the reason."""
    given = ROOT | {
        "kafka.listen": "SASL_PLAINTEXT://127.0.0.1:9092",
        "oauth.jwks": "http://[::1]:8080/keys",
        "oauth.issuer": "i",
        "oauth.audience": "a",
    }
    load_settings(None, {}, given)
    with pytest.raises(errors.BadOption, match=reason):
        load_settings(None, {}, given | change)
