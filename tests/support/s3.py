"""A local S3 server, moto's, without a container or an account."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.support.object_servers import s3_bucket


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, str]]:
    """Serves an empty bucket; yields the store options that open it.

    The server answers one request at a time: moto checks before it puts, so with several threads
    two conditional puts might both succeed.
    """
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield dict(s3_bucket(f"127.0.0.1:{server.server_port}", bucket).options)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
