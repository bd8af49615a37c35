"""The bill of an object store: prices, rates of the last minute, and the purpose of requests."""

from __future__ import annotations

import functools
import re
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from sparklog import bill_words
from sparklog.broker.agent import Agent
from sparklog.broker.metrics.bill import BILL_SAMPLE_SECONDS, RecentBill
from sparklog.cli import app
from sparklog.client.connection import Connection
from sparklog.client.log import Log
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats.store_bill import StoreBill, StoreRates, joint_bill
from sparklog.prices import SECONDS_PER_MONTH, Prices, price_table, prices_of
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    HotTailSettings,
    KafkaSettings,
    LogSettings,
    PriceSettings,
)
from sparklog.storage.objects import DelayedStore, MemoryStore, Purpose, total, usages

CENT = Prices(
    name="a cent for each put",
    dollars_per_million_puts=10_000,
    dollars_per_million_lists=0,
    dollars_per_million_reads=0,
)


# ------------------------------------------------------------------------------ prices


def test_each_store_of_the_price_table_can_be_chosen() -> None:
    """The setting offers the tables of the file, each with its region, month and source."""
    choices = get_args(get_type_hints(PriceSettings)["store"])
    assert {*choices} == {"auto", *price_table()}
    for each in price_table().values():
        assert each.source.startswith("https://")
        assert each.region
        assert each.month >= "2025-01"


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("s3://bucket/log", "S3 Standard"),
        ("s3://bucket--use1-az4--x-s3/log", "S3 Express One Zone"),
        ("gs://bucket--x-s3", "GCS Standard"),
        ("az://container", "Azure Blob Hot"),
        ("memory://store", "S3 Standard"),
    ],
)
def test_prices_follow_the_root(uri: str, name: str) -> None:
    """The scheme decides, and on S3 the kind of bucket."""
    assert PriceSettings().of(uri).name == prices_of(uri).name == name


def test_own_prices_replace_some_of_the_table() -> None:
    """The others stay, and the bill does not name the store any more."""
    own = PriceSettings(store="s3-express-one-zone", dollars_per_million_reads=0.0).of("gs://b")
    assert own.name == "your own prices"
    assert (own.dollars_per_million_puts, own.dollars_per_million_reads) == (1.13, 0.0)
    assert own.dollars(puts=1e6, reads=1e6, written_bytes=1e9) == pytest.approx(1.13 + 0.0032)


# ------------------------------------------------------------------------------ the last minute


def test_the_bill_is_that_of_the_last_minute() -> None:
    """Requests from before are forgotten, and the rest is a rate, for each purpose."""
    clock = ManualClock()
    store = DelayedStore(MemoryStore(clock), 0.0, clock)
    log, reads = store.counted_as(Purpose.LOG), store.counted_as(Purpose.READS)
    bill = RecentBill(
        functools.partial(usages, store), CENT, clock=clock, warn_dollars_per_month=7.0
    )
    for number in range(20):  # ten puts a second, then one
        for each in range(100 if number < 10 else 10):
            log.put(f"{number}-{each}", b"abc")
        reads.get("0-0")
        clock.advance(BILL_SAMPLE_SECONDS)
        bill.sample()
    found = bill.at_present()
    assert (found.prices, found.seconds) == (CENT.name, 60.0)
    assert found.warn_dollars_per_month == 7.0
    rates = {each.purpose: each for each in found.rates}
    assert rates.keys() == {"log", "reads"}
    assert (rates["log"].puts, rates["log"].written_bytes) == (1.0, 3.0)
    assert (rates["reads"].reads, rates["reads"].read_bytes) == (0.1, 0.3)
    assert found.total.dollars_per_month == pytest.approx(0.01 * SECONDS_PER_MONTH)


def test_a_bill_right_after_the_start() -> None:
    """The rate is not that of a moment."""
    clock = ManualClock()
    store = DelayedStore(MemoryStore(clock), 0.0, clock)
    bill = RecentBill(
        functools.partial(usages, store), CENT, clock=clock, warn_dollars_per_month=0.0
    )
    assert bill.at_present().rates == []
    store.put("a", b"")
    (only,) = bill.at_present().rates
    assert (only.purpose, only.puts) == ("other", 1.0)


def rates(purpose: str, puts: float, dollars: float) -> StoreRates:
    """Rates of a bill."""
    return StoreRates(purpose=purpose, puts=puts, reads=puts / 2, dollars_per_month=dollars)


def bill_of(*each: StoreRates, prices: str = "S3 Standard") -> StoreBill:
    """A bill of the last minute."""
    return StoreBill(prices=prices, seconds=60.0, rates=[*each])


def test_a_bill_in_words() -> None:
    """Rates have about two digits, the purposes come by their price, and trifles have no name."""
    bill = bill_of(rates("reads", 0.02, 0.1), rates("tables", 1.08, 20.4), rates("log", 3, 31.6))
    assert bill_words.requests(bill) == "4.1 puts/s, 0.0 listings/s, 2.0 reads/s"
    assert bill_words.monthly(bill) == "about 52 dollars a month at the prices of S3 Standard"
    assert bill_words.purposes(bill) == "log 32, tables 20"
    idle = bill_of(rates("metadata", 0.03, 0.4), prices="your own prices")
    assert bill_words.requests(idle).startswith("0.03 puts/s")
    assert bill_words.monthly(idle) == "less than a dollar a month at your own prices"
    assert bill_words.purposes(idle) == ""


def test_the_bill_of_a_cluster_is_the_sum() -> None:
    """By purpose; a cluster on a local root has none."""
    joint = joint_bill([bill_of(rates("log", 1, 10)), bill_of(rates("log", 2, 20))])
    assert joint == bill_of(rates("log", 3, 30))
    assert joint_bill([]) is None


# ------------------------------------------------------------------------------ purposes


def test_a_broker_counts_each_request_for_its_purpose() -> None:
    """Nothing is without a purpose, and each part of a broker counts its own."""
    store = DelayedStore(MemoryStore(SystemClock()), 0.0)
    settings = BrokerSettings(
        root=store.uri,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
        hot_tail=HotTailSettings(bytes=0),
        log=LogSettings(level="error"),
    )
    with (
        Agent(settings, store=store) as agent,
        Log(Connection(lambda: agent.address)) as log,
    ):
        log.create_topic("t", partitions=2)
        begin = usages(store)
        with log.producer() as producer:
            producer.send("t", b"a", partition=0)
        flush = usages(store)
        log.flush_to_table()
        agent.parts.wal_cleaner.checkpoint()
        end = usages(store)
        shown = CliRunner().invoke(app, ["status", "--bootstrap", agent.address])
    with Agent(settings, store=store) as agent:
        restarted = usages(store)
        assert [each.rows.num_rows for each in agent.parts.broker.read("t", 0, 0, 1)] == [1]
        read = usages(store)

    def done(purpose: Purpose) -> int:
        return end[purpose].since(flush[purpose]).puts

    assert flush[Purpose.LOG].since(begin[Purpose.LOG]).requests == {"put_new": 1}
    assert done(Purpose.TABLES) == 2  # a file and a commit
    assert done(Purpose.UPKEEP) >= 1
    assert begin[Purpose.METADATA].puts >= 1
    assert restarted[Purpose.RECOVERY].since(end[Purpose.RECOVERY]).reads > 0
    assert restarted[Purpose.READS].requests.total() == 0
    assert read[Purpose.READS].reads > 0
    assert read[Purpose.OTHER].requests.total() == 0
    assert re.search(r"requests +[\d.]+ puts/s, [\d.]+ listings/s, [\d.]+ reads/s\n", shown.stdout)
    assert re.search(
        r"bill +about [\d,]+ dollars a month at the prices of S3 Standard: .*log \d", shown.stdout
    )
    assert total(end.values()).written_bytes > total(begin.values()).written_bytes
