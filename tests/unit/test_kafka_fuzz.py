"""Random requests and record batches: each is refused with an error of sparklog.

Valid messages of every kind and version are made from kio's types, and then damaged: flipped, cut,
spliced, and given lengths that lie. Nothing may crash, hang, or take more memory than a frame may.
`make soak` tries a million.
"""

from __future__ import annotations

import dataclasses
import io
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import pytest
from kio.index import load_request_schema
from kio.serial import entity_writer

from sparklog import errors
from sparklog.broker.kafka import (
    apis,  # noqa: F401  registers the handlers
    messages,
)
from sparklog.broker.kafka.registry import APIS
from sparklog.formats import record_batch
from tests.support.batches import Record, built
from tests.support.kafkamessages import message

CASES: Final = 25_000
"""The attacks on each of the two: 50,000 in all."""
LONG_CASES: Final = 500_000
SLOWEST_SECONDS: Final = 2.0
GROWTH_BYTES: Final = 256 << 20
LIES: Final = [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff\xff\xff\x0f"]


# ------------------------------------------------------------------------------ valid messages


def request(at: random.Random) -> bytes:
    """A whole request of any kind and version that is served."""
    api = at.choice(list(APIS.values()))
    version = at.randint(api.min_version, api.max_version)
    schema: Any = load_request_schema(api.key, version)
    target = io.BytesIO()
    header: Any = schema.__header_schema__
    names = {field.name for field in dataclasses.fields(header)}
    given = {
        "request_api_key": api.key,
        "request_api_version": version,
        "correlation_id": 7,
        "client_id": "fuzz",
    }
    entity_writer(header)(target, header(**{k: v for k, v in given.items() if k in names}))
    entity_writer(schema)(target, message(schema, at))
    return target.getvalue()


def batch(at: random.Random) -> bytes:
    """A whole record batch, in any codec."""
    records = [
        Record(
            at.choice([0, 1_700_000_000_000]) + at.randrange(1_000),
            at.choice([None, b"", b"key"]),
            at.choice([None, b"", at.randbytes(20), b"v" * 300]),
            at.choice([(), (("h", None), ("g", b"x"))]),
        )
        for _ in range(at.randint(1, 5))
    ]
    return built(records, at.randrange(5))


# ------------------------------------------------------------------------------ damage


def damaged(data: bytes, at: random.Random, keep: int) -> bytes:
    """`data` with one to three mistakes behind its first `keep` bytes."""
    found = bytearray(data)
    for _ in range(at.randint(1, 3)):
        where = at.randrange(keep, max(len(found), keep + 1))
        match at.randrange(6):
            case 0:
                found[where : where + 1] = at.randbytes(1)
            case 1:
                del found[where:]
            case 2:
                found[where:where] = at.randbytes(at.randint(1, 8))
            case 3:
                lie = at.choice(LIES)
                found[where : where + len(lie)] = lie
            case 4:
                del found[where : where + at.randint(1, 8)]
            case _:
                part = bytes(found[where : where + 16])
                found[where:where] = part * at.randint(1, 3)
    return bytes(found)


def attack(cases: int, case: Callable[[random.Random], str]) -> Counter[str]:
    """Runs them, each by its own seed, and watches time and memory; what became of them."""
    outcomes: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(cases):
        began = time.perf_counter()
        outcomes[case(random.Random(seed))] += 1
        assert time.perf_counter() - began < SLOWEST_SECONDS, f"seed {seed}"
    wait_for_append = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert wait_for_append < GROWTH_BYTES, f"{wait_for_append >> 20} MiB more than before"
    return outcomes


def a_request(at: random.Random) -> str:
    """One request through the decoder."""
    frame = damaged(request(at), at, keep=4)
    try:
        found = messages.read_request(frame)
    except errors.BadRequest:
        return "refused"
    assert found.api_key in APIS
    return "taken"


def a_batch(at: random.Random) -> str:
    """One record batch through all checks, its CRC made right again half of the time."""
    frame = bytearray(damaged(batch(at), at, keep=0))
    if at.random() < 0.5 and len(frame) > record_batch.HEADER_BYTES:
        frame[8:12] = (len(frame) - 12).to_bytes(4, "big")
        frame[16] = 2
        record_batch._seal(frame)
    try:
        checked = record_batch.check(bytes(frame), limit_bytes=1 << 20)
    except (errors.Invalid, errors.DamagedBatch) as error:
        return error.code
    rows = record_batch.decode(bytes(frame))
    assert rows.num_rows == checked.header.record_count
    rows.validate(full=True)
    return "taken"


def check_requests(cases: int) -> None:
    """Attacks requests: most are refused, and some mistakes look like valid requests."""
    outcomes = attack(cases, a_request)
    assert outcomes["refused"] > cases // 10
    assert outcomes["taken"] > cases // 100


def check_batches(cases: int) -> None:
    """Each kind of refusal is met."""
    outcomes = attack(cases, a_batch)
    for code in ("damaged_batch", "bad_batch", "unknown_codec", "taken"):
        assert outcomes[code] > 0, outcomes


def test_valid_requests_of_every_kind_are_read() -> None:
    """The attacks start from a valid request of each API in each version."""
    seen = set()
    for seed in range(3_000):
        found = messages.read_request(request(random.Random(seed)))
        seen.add((found.api_key, found.version))
    assert len(seen) > 0.9 * sum(api.max_version - api.min_version + 1 for api in APIS.values())


def test_damaged_requests_are_refused() -> None:
    """25,000 of them."""
    check_requests(CASES)


def test_damaged_batches_are_refused() -> None:
    """25,000 of them, in all codecs."""
    check_batches(CASES)


@pytest.mark.soak(mode="limits")
def test_a_million_damaged_messages_are_refused() -> None:
    """Half requests, half batches."""
    check_requests(LONG_CASES)
    check_batches(LONG_CASES)
