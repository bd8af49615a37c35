"""Rates under quotas: Kafka's formulas, the bounds of the table, and what one broker counts."""

from __future__ import annotations

import heapq
import random

import pytest

from sparklog import errors
from sparklog.broker import quotas as quotas_module
from sparklog.broker.quota_rates import SAMPLES, ByteRate, Rate, Rates, TokenBucket
from sparklog.broker.quotas import CONNECTION_THROTTLE_MAX_MS, THROTTLE_MAX_MS, Quotas
from sparklog.clock import ManualClock
from sparklog.security.quota import QuotaKey
from sparklog.security.quotas import changed, entity_of
from sparklog.storage.objects import MemoryStore
from tests.support.acls import watch_of
from tests.support.users import change_users

MB = 1_000_000


class KafkaRate:
    """Kafka's `Rate` of a `WindowedSum`, and `QuotaUtils.throttleTime`, line by line."""

    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []
        self.current = 0

    def _reset(self, sample: dict[str, float], now: int) -> None:
        sample.update(start=now, last=now, value=0.0)

    def record(self, value: int, now: int) -> None:
        if not self.samples:
            self.samples.append({})
            self._reset(self.samples[0], now)
        sample = self.samples[self.current]
        if now - sample["start"] >= 1_000:
            self.current = (self.current + 1) % (SAMPLES + 1)
            if self.current >= len(self.samples):
                self.samples.append({})
            sample = self.samples[self.current]
            self._reset(sample, now)
        sample["value"] += value
        sample["last"] = now

    def throttle_ms(self, quota: float, now: int) -> int:
        for sample in self.samples:
            if now - sample["last"] >= SAMPLES * 1_000:
                self._reset(sample, now)
        elapsed = now - min(sample["start"] for sample in self.samples)
        if elapsed // 1_000 < SAMPLES - 1:
            elapsed += (SAMPLES - 1 - elapsed // 1_000) * 1_000
        rate = sum(sample["value"] for sample in self.samples) / (max(elapsed, 1) / 1e3)
        return max(round((rate - quota) / quota * max(elapsed, 1)), 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_rate_is_that_of_kafka(seed: int) -> None:
    """At random times, in busy and in idle phases, the throttle time is the one of Kafka."""
    at = random.Random(seed)
    mine, theirs, now_ms = Rate(), KafkaRate(), at.randrange(10**9)
    throttled = 0
    for _ in range(400):
        now_ms += at.choice([0, 1, 40, 999, 1_000, 1_001, 3_500, 10_999, 11_000, 30_000])
        size = at.randrange(9 * MB)
        mine.add(size, now_ms)
        theirs.record(size, now_ms)
        expected = theirs.throttle_ms(MB, now_ms)
        assert mine.throttle_ms(MB, now_ms) == pytest.approx(expected, abs=1)
        throttled += expected > 0
    assert throttled > 50


@pytest.mark.parametrize(
    ("adds", "now_ms", "expected"),
    [
        ([(0, 10 * MB)], 0, 0),
        ([(0, 11 * MB)], 0, 1_000),
        ([(0, 20 * MB)], 0, 10_000),
        ([(0, 20 * MB)], 5_000, 10_000),
        ([(0, 20 * MB)], 10_999, 9_001),
        ([(0, 20 * MB)], 11_000, 0),
        ([(0, 10 * MB), (9_500, 10 * MB)], 9_500, 9_500),
    ],
)
def test_throttle_times(adds: list[tuple[int, int]], now_ms: int, expected: int) -> None:
    """Times by hand for a quota of 1 MB/s: (rate - quota) / quota, of a window of 10 to 11 s."""
    rate = Rate()
    for at_ms, size in adds:
        rate.add(size, at_ms)
    assert rate.throttle_ms(MB, now_ms) == expected


def test_a_token_bucket_is_that_of_kafka() -> None:
    """It begins full, with eleven seconds of its rate, and may be overdrawn once (KIP-599)."""
    bucket = TokenBucket()
    assert bucket.tokens(2.0, 1_000) == 22.0
    bucket.take(32, 2.0, 1_000)
    assert bucket.tokens(2.0, 1_000) == -10.0
    assert bucket.throttle_ms(2.0, 1_000) == 5_000
    assert bucket.throttle_ms(2.0, 6_000) == 0
    assert not bucket.is_idle(6_000)
    assert bucket.tokens(2.0, 10**9) == 22.0
    assert bucket.is_idle(10**9)


@pytest.mark.parametrize("producers", [1, 3, 30])
@pytest.mark.parametrize("size", [16_000, 300_000, 1_000_000])
def test_a_byte_rate_is_the_quota(producers: int, size: int) -> None:
    """Producers that send a request as soon as their throttle ends get the first ten seconds at
    once, and then exactly the quota: Kafka's windows alone allow up to twice as much.
    """
    rate, sent = ByteRate(), [0, 0]
    due = [(0, number) for number in range(producers)]
    while (now_ms := due[0][0]) < 75_000:
        _, number = heapq.heappop(due)
        rate.add(size, MB, now_ms)
        sent[now_ms >= 15_000] += size
        throttle_ms = rate.bucket.throttle_ms(MB, now_ms)
        if sum(sent) == 10 * MB + size:
            assert throttle_ms == pytest.approx(rate.rate.throttle_ms(MB, now_ms), abs=10)
        heapq.heappush(due, (now_ms + throttle_ms + 1, number))
    assert sum(sent) <= 85 * MB + producers * size
    assert sent[1] == pytest.approx(60 * MB, abs=0.02 * 60 * MB + size)


def test_names_beyond_the_bound_share_a_rate() -> None:
    """Promise: names that a group invents take neither unbounded memory nor the rates of others."""
    rates: Rates[str, Rate] = Rates(Rate, most=4, most_of_group=2)
    own = [rates.of("mallory", str(number), 0) for number in range(2)]
    for each in own:
        each.add(1, 0)
    shared = rates.of("mallory", "2", 0)
    assert shared is rates.of("mallory", "3", 0)
    assert shared is not rates.of("mallory", None, 0)
    assert rates.of("mallory", "0", 0) is own[0]
    assert rates.of("alice", "x", 0) is not shared
    assert len(rates) == 5
    assert rates.of("mallory", "4", 11_000) is not shared, "an idle rate makes room"


def test_a_debt_keeps_no_other_rate() -> None:
    """Promise: a client that owes years at its quota does not have the clients of others share."""
    rates: Rates[str, TokenBucket] = Rates(TokenBucket, most=20, most_of_group=4)
    for number in range(4):
        rates.of("mallory", str(number), 0).take(10**12, 1.0, 0)
    for number in range(4):
        rates.of("alice", f"run-{number}", 0).take(1, 1.0, 0)
    shared = rates.of("alice", "another", 0)
    assert shared is rates.of("alice", "and another", 0)
    own = [rates.of("alice", f"later-{number}", 60_000) for number in range(4)]
    assert len({id(each) for each in own}) == 4
    assert shared not in own
    for number in range(12):
        rates.of(f"user-{number}", "x", 60_000)
    assert len(rates) == 21
    assert rates.of("bob", "x", 120_000) is not rates.of("bob", "y", 120_000)
    assert rates.of("mallory", "0", 120_000).tokens(1.0, 120_000) < 0, "the debt is not forgotten"


@pytest.mark.parametrize("limit", [5e-324, 1e-300, 1e-7])
def test_times_that_are_no_number(limit: float) -> None:
    """A quota that allows nothing in the life of the universe throttles for a finite time."""
    rate, bucket = Rate(), TokenBucket()
    rate.add(1, 0)
    bucket.take(MB, limit, 0)
    assert 0 < rate.throttle_ms(limit, 0) <= 2**53
    assert 0 < bucket.throttle_ms(limit, 0) <= 2**53


def test_addresses_beyond_the_bound_replace_each_other() -> None:
    """Promise: a flood of addresses does not have others share a rate."""
    rates: Rates[str, Rate] = Rates(Rate, most=2, most_of_group=2, evicts=True)
    first = rates.of("", "a", 0)
    first.add(1, 0)
    rates.of("", "b", 0).add(1, 0)
    rates.of("", "c", 0)
    assert len(rates) == 2
    assert rates.of("", "a", 0) is not first


# ------------------------------------------------------------------------------ of a broker


class World:
    """The quotas of a broker whose clock a test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.set({"user": None}, producer_byte_rate=1)
        self.set({"user": None}, producer_byte_rate=None)
        self.watch = watch_of(self.store, self.clock)
        self.quotas = Quotas(self.watch, clock=self.clock)

    def set(self, parts: dict[str, str | None], **values: float | None) -> None:
        change_users(self.store, changed(entity_of(parts), values))
        if hasattr(self, "watch"):
            self.watch.refresh()


@pytest.fixture(name="world")
def _world() -> World:
    return World()


def test_a_broker_follows_the_quotas(world: World) -> None:
    """A quota is in force after a look, calls listeners once, and ends when it is removed."""
    told: list[bool] = []
    world.quotas.on_change.append(lambda: told.append(world.quotas.table is not None))
    assert world.quotas.table is None
    assert world.quotas.produced("alice", "etl", 100 * MB) == 0
    world.set({"user": "alice"}, producer_byte_rate=MB)
    assert world.quotas.produced("alice", "etl", 10 * MB) == 0
    assert world.quotas.produced("alice", "other", MB) == 1_000, "all clients of alice together"
    assert world.quotas.produced("bob", "etl", 100 * MB) == 0
    world.watch.refresh()  # nothing has changed
    world.set({"user": "alice"}, producer_byte_rate=None)
    assert world.quotas.produced("alice", "etl", 100 * MB) == 0
    assert told == [True, False]
    assert world.quotas.throttles == {QuotaKey.PRODUCER_BYTE_RATE: 1}
    assert world.quotas.throttled_ms == {QuotaKey.PRODUCER_BYTE_RATE: 1_000}


def test_a_throttle_is_bounded(world: World) -> None:
    """A request that takes hours at its quota throttles its client for ten minutes."""
    world.set({"user": None}, producer_byte_rate=1.0)
    assert world.quotas.produced("alice", "", 100 * MB) == THROTTLE_MAX_MS


def test_a_changed_quota_forgives(world: World) -> None:
    """A debt by an old quota is forgiven, unless another quota has changed."""
    quotas = world.quotas
    world.set({"user": "alice"}, producer_byte_rate=MB)
    assert quotas.produced("alice", "", 15 * MB) == 5_000
    world.set({"user": "bob"}, producer_byte_rate=MB)
    assert quotas.producer_debt_ms("alice", "") == 5_000
    assert quotas.producer_debt_ms("bob", "") == 0
    world.set({"user": "alice"}, producer_byte_rate=2 * MB)
    assert quotas.producer_debt_ms("alice", "") == 0
    assert quotas.produced("alice", "", 2 * MB) == 1_000, "the bucket is not refilled"


def test_a_fetch_gets_what_is_left(world: World) -> None:
    """A fetch gets the bytes that are left, at least a batch, and none while they are overdrawn."""
    quotas = world.quotas
    assert quotas.fetch_allowance("alice", "", 8 * MB) == (8 * MB, 0)
    world.set({"user": None}, consumer_byte_rate=MB)
    assert quotas.fetch_allowance("alice", "", 50 * MB) == (10 * MB, 0)
    assert quotas.fetched("alice", "", 4 * MB) == (True, 0)
    assert quotas.fetch_allowance("alice", "", 8 * MB) == (6 * MB, 0)
    assert quotas.fetched("alice", "", 8 * MB) == (True, 2_000), "a batch beyond it is sent once"
    assert quotas.fetched("alice", "", MB) == (False, 3_000), (
        "and records that were read meanwhile are not"
    )
    assert quotas.fetch_allowance("alice", "", 8 * MB) == (1, 2_000)
    assert quotas.fetched("alice", "", 0) == (True, 0)
    world.clock.advance(12.0)
    assert quotas.fetch_allowance("alice", "", 50 * MB) == (10 * MB, 0)


def test_mutations(world: World) -> None:
    """The strict quota refuses what follows an overdraft, the permissive one only throttles."""
    quotas = world.quotas
    world.set({"user": None}, controller_mutation_rate=1.0)
    assert quotas.mutated("alice", "", 15, is_strict=True) == 0
    with pytest.raises(errors.MutationQuotaExceeded) as refused:
        quotas.mutated("alice", "", 1, is_strict=True)
    assert refused.value.facts["throttle_ms"] == 4_000
    assert quotas.mutated("alice", "", 1, is_strict=False) == 5_000
    world.clock.advance(5.0)
    assert quotas.mutated("alice", "", 1, is_strict=True) == 0


@pytest.mark.parametrize("is_strict", [True, False])
def test_fewer_partitions_pay_no_debt(world: World, is_strict: bool) -> None:
    """Promise: a request for fewer partitions than there are, which fails, evades no quota."""
    world.set({"user": None}, controller_mutation_rate=1.0)
    world.quotas.mutated("alice", "", 11, is_strict=True)
    assert world.quotas.mutated("alice", "", -11, is_strict=is_strict) == 0
    assert world.quotas.mutated("alice", "", 2, is_strict=False) == 2_000
    assert world.quotas.mutated("alice", "", -1_000, is_strict=False) == 2_000


def test_connections(world: World) -> None:
    """Connections beyond the quota of an address wait, those beyond ten seconds are closed, and
    the addresses of an IPv6 network count together.
    """
    quotas = world.quotas
    assert quotas.connected("10.0.0.1") == 0
    world.set({"ip": None}, connection_creation_rate=1)
    assert [quotas.connected("10.0.0.1") for _ in range(12)] == [0] * 10 + [1_000, 2_000]
    waits = [quotas.connected(f"2001:db8::{number}") for number in range(40)]
    assert waits[:11] == [0] * 10 + [1_000]
    assert waits[19] == CONNECTION_THROTTLE_MAX_MS
    assert waits[20:] == [None] * 20
    assert quotas.connected("2001:db8:0:1::1") == 0


def test_rates_for_metrics_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics show the rates that were counted last, and no more than asked for."""
    monkeypatch.setattr(quotas_module, "RATES", 10_000)
    world.set({"client-id": None}, producer_byte_rate=MB)
    for number in range(20):
        world.quotas.produced("alice", str(number), 10 * MB)
    rates = world.quotas.byte_rates(5)
    assert [each.client_id for each in rates] == ["19", "18", "17", "16", "15"]
    assert {each.per_second for each in rates} == {MB}
