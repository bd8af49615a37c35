"""The cost of ACLs: of a decision, and of the start of a broker that reads them."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.kafka.sides import KafkaSetup, measure
from benchmarks.progress import doing
from sparklog import limits
from sparklog.bench.broker import FreshRoot
from sparklog.bench.report import Measurement
from sparklog.broker.authorization import Authorization, View
from sparklog.broker.refused_work import RefusedWork
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import SystemClock
from sparklog.security import users
from sparklog.security.acl import (
    Acl,
    AclIndex,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from sparklog.security.acls import ACLS_MAX
from sparklog.security.scram import Mechanism, Verifier
from sparklog.security.state import Author, Mode, Policy, SecurityState, User, new_key
from sparklog.storage.objects import LocalStore
from sparklog.storage.security_store import change_security

_DECISIONS: Final = 20_000
_PRINCIPALS: Final = 100
_NAMES: Final = "0123456789abcdef" * 16
_PREFIXES_FEW, _PREFIXES_MANY = 10, 249
_PREFIXED_SHARE: Final = 10
"""One in this many ACLs is for a prefix."""


def _acls(prefix_lengths: int) -> list[Acl]:
    """Returns as many ACLs as a root can have, with prefixes of that many lengths."""
    found = []
    for number, user in product(range(ACLS_MAX // _PRINCIPALS), range(_PRINCIPALS)):
        is_prefixed = not number % _PREFIXED_SHARE
        found.append(
            Acl(
                ResourceType.TOPIC,
                _NAMES[: 1 + number % prefix_lengths] if is_prefixed else f"topic-{number}",
                PatternType.PREFIXED if is_prefixed else PatternType.LITERAL,
                f"User:{user}-{number}" if is_prefixed else f"User:{user}",
                "*",
                Operation.READ,
                Permission.ALLOW,
            )
        )
    return found


def _nanoseconds(decide: Callable[[str], object], names: Iterable[str]) -> float:
    """Returns the best of three means over the names."""
    names = list(names)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter_ns()
        for name in names:
            decide(name)
        best = min(best, (time.perf_counter_ns() - began) / len(names))
    return best


@measure
def acls(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures decisions by 100,000 ACLs, and the start of a broker that reads them."""
    for lengths, target_us in ((_PREFIXES_FEW, 5.0), (_PREFIXES_MANY, 80.0)):
        with doing(f"decisions with prefixes of {lengths} lengths"):
            index = AclIndex(_acls(lengths))
            view = View(Policy(mode=Mode.ENFORCE), index)

            question = "User:7", "10.0.0.7", Operation.READ, ResourceType.TOPIC
            # Long names match no prefix, but are compared with those of each length.
            names = [f"{_NAMES[:200]}-{number}" for number in range(_DECISIONS)]
            first_us = _nanoseconds(partial(index.allows, *question), names) / 1e3
            same = names[:1] * _DECISIONS
            again_us = _nanoseconds(partial(view.allows, *question), same) / 1e3
        yield Measurement(
            name=f"a decision by {ACLS_MAX:,} ACLs with prefixes of {lengths} lengths",
            value=f"{first_us:.2f} µs",
            target=f"≤ {target_us:.0f} µs",
            met=first_us <= target_us,
        )
        if lengths == _PREFIXES_FEW:
            yield Measurement(
                name="the same for one topic again and again",
                value=f"{again_us:.2f} µs",
                target="≤ 0.3 µs",
                met=again_us <= 0.3,
            )
    with FreshRoot(setup.folder) as folder, doing("a start with all users and ACLs"):
        root = folder / "root"
        _fill(root)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            seconds, mib = other.submit(_start, root).result()
    yield Measurement(
        name=f"a start with {users.USERS_MAX:,} users and {ACLS_MAX:,} ACLs: time and memory",
        value=f"{seconds:.2f} s, {mib:.0f} MiB",
        target="≤ 0.3 s, ≤ 120 MiB",
        met=seconds <= 0.3 and mib <= 120,
    )


def _fill(root: Path) -> None:
    """Creates a root with as many users and ACLs as it can have, all in its snapshot."""
    credentials = users.credentials_of("a long password")

    def change(state: SecurityState) -> SecurityState:
        named = {f"user-{number}": _user(number, credentials) for number in range(users.USERS_MAX)}
        return msgspec.structs.replace(
            state,
            users=named,
            acls=frozenset(_acls(_PREFIXES_FEW)),
            policy=Policy(mode=Mode.ENFORCE),
            root_key=new_key(),
        )

    author = Author(principal="Root:benchmark")
    change_security(LocalStore(str(root)), change, author=author, clock=SystemClock(), create=True)


def _user(number: int, credentials: dict[Mechanism, Verifier]) -> User:
    return User(id=f"{number:024x}", credentials=credentials)


def _start(root: Path) -> tuple[float, float]:
    """Returns the seconds and MiB that a broker needs to read and index the security state."""
    gc.disable()  # as `sparklog broker` does until it serves
    clock = SystemClock()
    before_bytes = _resident_bytes()
    began = time.perf_counter()
    watch = SecurityWatch(
        LocalStore(str(root)),
        clock=clock,
        follow_seconds=1.0,
        stale_seconds=10.0,
        refused=RefusedWork(clock),
    )
    watch.open()
    authorization = Authorization(watch, clock=clock)
    seconds = time.perf_counter() - began
    assert authorization.acl_count
    return seconds, (_resident_bytes() - before_bytes) / limits.MIB


def _resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
