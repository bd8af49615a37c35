"""A local S3 server, moto's, without a container or an account."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


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
    options = {
        "aws_endpoint": f"http://127.0.0.1:{server.server_port}",
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
        "allow_http": "true",
    }
    try:
        boto3.client(
            "s3",
            endpoint_url=options["aws_endpoint"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        ).create_bucket(Bucket=bucket)
        yield options
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
