"""Answers of a bucket, status by status, and the errors that they become."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from sparklog import errors
from sparklog.cli import app
from sparklog.clock import ManualClock
from sparklog.storage.objects import ObjectExists, PutUnresolved, Store, claim, open_store

SILENCE = 0
"""Instead of a status: the server closes the connection without an answer."""


class Bucket(ThreadingHTTPServer):
    """Answers with the statuses of its script; then with 404 to reads and 200 to puts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[int] = []
        self.body = b""
        self.asked: list[str] = []
        self.keys: list[str] = []
        """The access key that signed each request."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked.append(self.command)
        signed = self.headers.get("authorization", "").partition("Credential=")[2]
        self.server.keys.append(signed.partition("/")[0])
        usual = 200 if self.command == "PUT" else 404
        status = self.server.script.pop(0) if self.server.script else usual
        if status == SILENCE:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("etag", '"x"')
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.server.body)

    do_GET = do_HEAD = do_PUT = do_POST = answer  # noqa: N815

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """A server with answers that the test chooses."""
    server = Bucket()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store on that server, whose client repeats a request at most once."""
    monkeypatch.setattr("sparklog.storage.objects.remote.REMOTE_RETRIES", 1)
    return at(f"http://127.0.0.1:{bucket.server_port}")


def at(endpoint: str, **options: str) -> Store:
    """A store on the server at that address."""
    given = {
        "aws_endpoint": endpoint,
        "aws_access_key_id": "test",
        "aws_secret_access_key": "hidden",
        "allow_http": "true",
    }
    return open_store("s3://bucket/root", given | options)


class Vending:
    """A credential provider whose credentials are old at their second use."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, Any]:
        self.count += 1
        return {
            "access_key_id": f"vended-{self.count}",
            "secret_access_key": "hidden",
            "token": "hidden",
            "expires_at": datetime.now(UTC),
        }


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (412, ObjectExists),
        (409, ObjectExists),
        (403, errors.RootNotWritable),
        (401, errors.RootNotWritable),
        (404, errors.RootNotWritable),
        (400, PutUnresolved),
        (429, PutUnresolved),
        (500, PutUnresolved),
        (503, PutUnresolved),
        (SILENCE, PutUnresolved),
    ],
)
def test_answers_to_put_new(
    bucket: Bucket, store: Store, status: int, expected: type[Exception]
) -> None:
    """A conditional put is sent once, and the type of its error says if it had an effect."""
    bucket.script = [status]
    with pytest.raises(expected) as refused:
        store.put_new("a/1", b"x")
    assert bucket.asked == ["PUT"]
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("status", [500, 503, SILENCE])
def test_a_plain_put_is_repeated(bucket: Bucket, store: Store, status: int) -> None:
    """The client repeats a plain put, and leaves it unresolved if that does not help."""
    bucket.script = [status]
    store.put("a/1", b"x")
    bucket.script = [status, status]
    with pytest.raises(PutUnresolved):
        store.put("a/1", b"x")
    assert bucket.asked == ["PUT"] * 4


READS: list[Callable[[Store], Any]] = [
    lambda store: store.get("a"),
    lambda store: store.get_range("a", 0, 1),
    lambda store: store.open("a"),
    lambda store: store.stat("a"),
    lambda store: store.list_after("a"),
    lambda store: store.list_after("a", "b"),
    lambda store: store.folders("a"),
    lambda store: list(store.walk("a")),
    lambda store: store.delete(["a"]),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("status", "expected"),
    [(500, errors.StorageUnavailable), (403, errors.RootNotWritable)],
)
def test_answers_to_reads(
    bucket: Bucket,
    store: Store,
    read: Callable[[Store], Any],
    status: int,
    expected: type[errors.SparklogError],
) -> None:
    """A read without an answer may be repeated; a forbidden one is not a missing object."""
    bucket.script = [status] * 4
    with pytest.raises(expected):
        read(store)


def test_no_connection() -> None:
    """A put to an address without a server is unresolved, with the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = at(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(PutUnresolved) as unresolved:
            store.put_new("a/1", b"x")
    assert "error sending request" in unresolved.value.reason


def test_timeout() -> None:
    """A put to a bucket that does not answer in time is unresolved."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = at(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout="100ms")
        with pytest.raises(PutUnresolved):
            store.put_new("a/1", b"x")


def test_claim_survives_a_conflict(bucket: Bucket, store: Store) -> None:
    """A claim survives a refusal without an object, which S3 gives when two puts meet."""
    bucket.script = [409, 404, 200]
    assert claim(store, "a/1", b"ours", clock=ManualClock())
    assert bucket.asked == ["PUT", "GET", "PUT"]


def test_claim_survives_a_slow_store(bucket: Bucket, store: Store) -> None:
    """A claim survives a throttled put and an unanswered read."""
    bucket.script = [503, 500, 500, SILENCE, 404, 200]
    clock = ManualClock()
    assert claim(store, "a/1", b"ours", clock=clock)
    assert bucket.asked == ["PUT", "GET", "GET", "PUT", "GET", "PUT"]
    assert clock.monotonic() == pytest.approx(0.3)


# ------------------------------------------------------------------------------ credentials


def test_credentials_of_a_provider_are_renewed(bucket: Bucket) -> None:
    """A long stream outlives the credentials that it began with."""
    store = open_store(
        "s3://bucket/root",
        {
            "aws_endpoint": f"http://127.0.0.1:{bucket.server_port}",
            "allow_http": "true",
            "Credential_Provider": f"{__name__}:Vending",
        },
    )
    store.put_new("a", b"a")
    store.put("b", b"b")
    first, second = (int(key.removeprefix("vended-")) for key in bucket.keys)
    assert second > first


def test_no_error_shows_a_secret_that_the_store_repeats(bucket: Bucket) -> None:
    """S3 names the key of a refused request, and others say more, in one line."""
    key, given = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG"
    bucket.body = f"<Error><AWSAccessKeyId>{key}</AWSAccessKeyId>no {given}</Error>".encode()
    at_bucket = f"http://127.0.0.1:{bucket.server_port}"
    from_environment = at(at_bucket, aws_secret_access_key=given)
    from_options = at(at_bucket, aws_access_key_id=key, aws_secret_access_key=given)
    for store in (from_environment, from_options):
        gets, puts = partial(store.get, "a"), partial(store.put, "a", b"a")
        for call in (gets, puts, partial(store.folders, "")):
            bucket.script = [403]
            with pytest.raises(errors.RootNotWritable, match="AWSAccessKeyId") as caught:
                call()
            assert key not in str(caught.value)
            assert given not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["status"],
        ["topics", "list"],
        ["cluster", "describe"],
        ["broker", "--flight=127.0.0.1:0"],
    ],
)
def test_no_command_shows_a_secret(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Its store is named by the environment, and refuses its key."""
    monkeypatch.setattr("sparklog.storage.objects.remote.REMOTE_RETRIES", 1)
    bucket.script = [403] * 100
    bucket.body = (
        b"<Error><AWSAccessKeyId>hidden-id</AWSAccessKeyId>hidden-key hidden-token</Error>"
    )
    storage = {
        "AWS_ENDPOINT": f"http://127.0.0.1:{bucket.server_port}",
        "AWS_ACCESS_KEY_ID": "hidden-id",
        "AWS_SECRET_ACCESS_KEY": "hidden-key",
        "AWS_SESSION_TOKEN": "hidden-token",
        "ALLOW_HTTP": "true",
    }
    environment = {f"SPARKLOG_STORAGE_{name}": value for name, value in storage.items()}
    result = CliRunner().invoke(app, [*command, "--root=s3://bucket/root"], env=environment)
    assert result.exit_code > 0
    assert "AWSAccessKeyId" in result.output
    assert "hidden" not in result.output


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("gs://bucket", {"google_service_account": '{"private_key": "hidden-key"}'}),
        ("gs://bucket", {"google_service_account": '{\n"private_key": "hidden-key"}'}),
        ("gs://bucket", {"google_service_account_key": "hidden-key"}),
        (
            "az://bucket",
            {"azure_storage_account_name": "a", "azure_storage_account_key": "hidden!"},
        ),
        ("az://bucket", {"azure_storage_account_name": "a", "azure_storage_sas_key": "hidden%zz"}),
        ("s3://bucket", {"aws_access_key_id": "hidden-id"}),
        ("s3://bucket", {"proxy_url": "http://user:hidden word@[x"}),
        ("s3://bucket", {"aws_secret_access_kye": "hidden-key"}),
    ],
)
def test_a_secret_that_is_invalid_is_not_shown(uri: str, options: dict[str, str]) -> None:
    """A key in place of its file, a broken one, or one under a misspelt name."""
    with pytest.raises(errors.BadOption) as caught:
        open_store(uri, options)
    assert "hidden" not in str(caught.value)


class Unavailable(Vending):
    """A credential provider that fails at first."""

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        if self.count <= 2:
            raise ConnectionError("no answer")
        return found


def test_a_provider_that_does_not_answer_is_asked_again(bucket: Bucket) -> None:
    """It is not a refusal, after which a stream would end."""
    store = at(
        f"http://127.0.0.1:{bucket.server_port}", credential_provider=f"{__name__}:Unavailable"
    )
    with pytest.raises(errors.StorageUnavailable, match="no answer"):
        store.stat("a")
    with pytest.raises(PutUnresolved, match="no answer"):
        store.put("a", b"a")
    store.put("a", b"a")
    assert bucket.asked == ["PUT"]


def unavailable() -> None:
    """A vault that does not answer, to a request with a secret."""
    raise ConnectionError("https://vault/login?token=hidden does not answer\ntoken hidden")


def test_a_provider_that_fails_shows_no_secret() -> None:
    """The error of the user's code is shown as others: its first line, without a query."""
    with pytest.raises(errors.BadOption, match="ConnectionError: https://vault/login") as caught:
        at("http://127.0.0.1:1", credential_provider=f"{__name__}:unavailable")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("named", ["nowhere", "nowhere:name", "json:nothing", "json:loads", ":x"])
def test_a_wrong_provider_is_refused_by_name(named: str) -> None:
    """Its module, its name, or the call of it may be wrong."""
    with pytest.raises(errors.BadOption, match=r"storage.credential_provider = .*package.module"):
        at("http://127.0.0.1:1", credential_provider=named)
