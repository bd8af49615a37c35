"""An OAuth issuer for tests: keys, tokens, and a web server that publishes and issues them."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from joserfc import jwt
from joserfc.jwk import Key, generate_key

ISSUER: Final = "https://issuer.example.org/"
AUDIENCE: Final = "sparklog"
SECRET: Final = "secret"
"""That of the client `app`."""


class Issuer:
    """An issuer with one key, which signs with ES256."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.rotate()

    def rotate(self) -> None:
        """Adds a key, which signs from now on."""
        self.keys.append(generate_key("EC", "P-256", {"kid": f"key-{len(self.keys)}"}))

    def jwks(self) -> bytes:
        """The public keys."""
        return json.dumps({"keys": [key.as_dict(private=False) for key in self.keys]}).encode()

    def token(self, name: str = "alice", *, seconds: float = 60, **claims: Any) -> str:
        """Returns a token that is valid for some seconds; a claim that is None is left out."""
        now = time.time()
        given = {"iss": ISSUER, "aud": AUDIENCE, "sub": name, "iat": now, "exp": now + seconds}
        present = {key: value for key, value in (given | claims).items() if value is not None}
        key = self.keys[-1]
        header = {"alg": "ES256", "kid": str(key.kid)}
        return jwt.encode(header, present, key, algorithms=["ES256"])

    def settings(self, jwks: str) -> dict[str, Any]:
        """The table [oauth] of a broker that accepts its tokens."""
        return {"jwks": jwks, "issuer": ISSUER, "audience": AUDIENCE, "clock_skew_seconds": 0}


@contextlib.contextmanager
def token_endpoint(issuer: Issuer, *, seconds: float) -> Iterator[str]:
    """The endpoint of an issuer for the client credentials grant of OAuth 2; yields its URL.

    `seconds`: the lifetime of its tokens.
    """

    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        credentials = base64.b64encode(f"app:{SECRET}".encode()).decode()
        assert handler.headers["Authorization"] == f"Basic {credentials}"
        token = issuer.token("app", seconds=seconds, scope="kafka")
        body = {"access_token": token, "token_type": "Bearer", "expires_in": seconds}
        send(handler, json.dumps(body).encode())

    with web_server(respond) as url:
        yield f"{url}/token"


Respond = Callable[[BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def web_server(respond: Respond) -> Iterator[str]:
    """Serves HTTP on a loopback address; yields its URL. `respond`: answers each request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            respond(self)

        def do_POST(self) -> None:
            respond(self)

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Prints nothing: clients of these tests leave in the middle of a response."""


def send(
    handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, *, location: str = ""
) -> None:
    """Answers a request. `location`: for a redirect."""
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    if location:
        handler.send_header("Location", location)
    handler.end_headers()
    with contextlib.suppress(OSError):
        handler.wfile.write(body)
