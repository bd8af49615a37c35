"""An in-memory S3 server that takes a given time for each request.

`python -m benchmarks.s3_server PORT MILLISECONDS`. It supports the requests of brokers: conditional
puts, ranges, listings and batch deletions. It does not check signatures, so it listens on loopback
only. Moto's server handles one request at a time, and would be too slow for three brokers.

It counts the requests of each client, by the kinds that stores bill: `GET /counts` returns them as
JSON, by the name of the client (its `User-Agent`).
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from email.utils import formatdate
from time import gmtime, strftime, time
from typing import Final
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

COUNTS_PATH: Final = "/counts"
_PAGE: Final = 1_000
_KINDS: Final = {"PUT": "puts", "GET": "reads", "HEAD": "reads", "DELETE": "deletes"}
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    modified: float
    """In seconds since 1970."""


@dataclass(slots=True)
class _Bucket:
    """Objects by key, and their keys in order."""

    objects: dict[str, _Object] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)

    def put(self, key: str, data: bytes) -> _Object:
        if key not in self.objects:
            bisect.insort(self.keys, key)
        found = _Object(data, f'"{hashlib.md5(data).hexdigest()}"', time())
        self.objects[key] = found
        return found

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            del self.keys[bisect.bisect_left(self.keys, key)]

    def page(self, prefix: str, after: str, delimiter: str) -> tuple[list[str], list[str], str]:
        """Returns keys, common prefixes, and the next page's token; "" on the last page."""
        keys: list[str] = []
        prefixes: list[str] = []
        number = bisect.bisect_left(self.keys, prefix)
        if after >= prefix:
            number = bisect.bisect_right(self.keys, after)
        while number < len(self.keys) and (key := self.keys[number]).startswith(prefix):
            if len(keys) + len(prefixes) == _PAGE:
                return keys, prefixes, self.keys[number - 1]
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                prefixes.append(f"{prefix}{head}{delimiter}")
                number = bisect.bisect_left(self.keys, prefixes[-1][:-1] + chr(ord(delimiter) + 1))
            else:
                keys.append(key)
                number += 1
        return keys, prefixes, ""


class S3Server:
    """Serves one bucket, under any name."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._bucket = _Bucket()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Requests by client and kind."""
        self.app = Starlette(
            routes=[
                Route(COUNTS_PATH, self._counted, methods=["GET"]),
                Route("/{bucket}", self._of_bucket, methods=["GET", "POST"]),
                Route("/{bucket}/{key:path}", self._of_object, methods=["PUT", "GET", "DELETE"]),
            ]
        )

    async def _counted(self, _request: Request) -> Response:
        return JSONResponse(self._counts)

    def _count(self, request: Request, kind: str) -> None:
        self._counts[request.headers.get("user-agent", "")][kind] += 1

    async def _of_bucket(self, request: Request) -> Response:
        body = await request.body()
        self._count(request, "deletes" if request.method == "POST" else "lists")
        await asyncio.sleep(self._delay_seconds)
        if request.method == "POST":  # a batch deletion, the only POST that brokers send
            tags = ET.fromstring(body).iter()
            gone = [each.text or "" for each in tags if each.tag.rpartition("}")[2] == "Key"]
            for key in gone:
                self._bucket.delete(key)
            return _xml("DeleteResult", "".join(map(_deleted, gone)))
        query = request.query_params
        after = query.get("continuation-token") or query.get("start-after", "")
        keys, prefixes, following = self._bucket.page(
            query.get("prefix", ""), after, query.get("delimiter", "")
        )
        more = f"<NextContinuationToken>{escape(following)}</NextContinuationToken>"
        listed = "".join(map(self._listed, keys))
        folders = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in prefixes
        )
        is_truncated = str(bool(following)).lower()
        return _xml(
            "ListBucketResult",
            f"<IsTruncated>{is_truncated}</IsTruncated>{listed}{folders}{more * bool(following)}",
        )

    def _listed(self, key: str) -> str:
        found = self._bucket.objects[key]
        modified = strftime("%Y-%m-%dT%H:%M:%S.000Z", gmtime(found.modified))
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
            f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.data)}</Size></Contents>"
        )

    async def _of_object(self, request: Request) -> Response:
        key, body = request.path_params["key"], await request.body()
        self._count(request, _KINDS[request.method])
        await asyncio.sleep(self._delay_seconds)
        found = self._bucket.objects.get(key)
        if request.method == "PUT":
            if found is not None and request.headers.get("if-none-match") == "*":
                return _xml("Error", "<Code>PreconditionFailed</Code>", status=412)
            return Response(headers={"etag": self._bucket.put(key, body).etag})
        if request.method == "DELETE":
            self._bucket.delete(key)
            return Response(status_code=204)
        if found is None:
            return _xml("Error", "<Code>NoSuchKey</Code>", status=404)
        return _content(found, request.headers.get("range"))


def _content(found: _Object, wanted: str | None) -> Response:
    headers = {"etag": found.etag, "last-modified": formatdate(found.modified, usegmt=True)}
    part = _RANGE.fullmatch(wanted or "")
    if part is None:
        return Response(found.data, headers=headers)
    first, size = int(part[1]), len(found.data)
    last = min(int(part[2] or size), size - 1)
    if first > last:
        return _xml("Error", "<Code>InvalidRange</Code>", status=416)
    headers["content-range"] = f"bytes {first}-{last}/{size}"
    return Response(found.data[first : last + 1], status_code=206, headers=headers)


def _deleted(key: str) -> str:
    return f"<Deleted><Key>{escape(key)}</Key></Deleted>"


def _xml(tag: str, content: str, status: int = 200) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{tag}>{content}</{tag}>'
    return Response(text, status_code=status, media_type="application/xml")


def main() -> None:
    """Serves until it is stopped: `python -m benchmarks.s3_server PORT MILLISECONDS`."""
    port, milliseconds = int(sys.argv[1]), float(sys.argv[2])
    app = S3Server(milliseconds / 1e3).app
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
