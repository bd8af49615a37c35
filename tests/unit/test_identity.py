"""Proof that a broker serves a root: copies of it have the same ids, and other storage."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparklog import errors
from sparklog.broker.failover.heartbeats import PROOF_PAUSE_REMOTE_SECONDS, Heartbeats
from sparklog.broker.log import takeover
from sparklog.broker.refused_work import RefusedWork
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import BrokerInfo, ClusterInfo, ProveRoot, RootProof
from sparklog.storage.metadata import identity
from sparklog.storage.metadata.identity import Answer, ask_broker, place_of
from sparklog.storage.metadata.liveness import Heartbeat, Leader
from sparklog.storage.metadata.processes import Process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore, MemoryStore, Store
from sparklog.storage.objects.faults import Fault, NoFaults, Operation, ScriptedFaults
from tests.support.brokers import registration
from tests.support.waiting import wait_until

SECONDS = 30.0
"""Far more than anything here takes."""
ELSEWHERE = Process(host="elsewhere", pid=7, machine="another boot", started="1")


class Peer:
    """A broker of `store` that answers without a network."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.leadership = takeover.acquire(
            store,
            MetadataStore(store, clock=clock),
            1,
            registration(1, process=ELSEWHERE),
            clock=clock,
            check_alive=False,
        )
        self.flushed_at = -float("inf")
        self.heartbeats = Heartbeats(
            store,
            self.leadership,
            clock=clock,
            dead_after_seconds=5.0,
            describe=self._heartbeat,
            wrote_at=lambda: self.flushed_at,
            check_leadership=lambda: None,
            refused=RefusedWork(clock),
        )
        self.heartbeats.write()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(broker=1, epoch=1, flight="h:1", at_us=self.clock.now_us())

    def ask(
        self, address: str, action: str, request: msgspec.Struct, *, timeout_seconds: float
    ) -> Any:
        assert (address, action) == ("h:1", "root.prove")
        assert isinstance(request, ProveRoot)
        return self.heartbeats.prove(request)


def leader(store: Store, clock: ManualClock) -> Leader:
    """The broker that the metadata of `store` names."""
    found = Leader.of(MetadataStore(store, clock=clock).reload(), store)
    assert found is not None
    return found


def asked(store: Store, clock: ManualClock, ask: identity.Ask) -> identity.Asked:
    """Asks the broker that the metadata of `store` names."""
    return ask_broker(store, leader(store, clock), ask, timeout_seconds=1.0)


def copied(store: MemoryStore) -> MemoryStore:
    """A copy of all objects, as a restored backup has them."""
    copy = MemoryStore(ManualClock(), name="copy")
    for stat in store.walk(""):
        copy.put(stat.name, bytes(store.get(stat.name)))
    return copy


def test_a_broker_of_the_root_proves_it(store: MemoryStore, clock: ManualClock) -> None:
    """It leaves the nonce in its heartbeat, where the asker finds it."""
    found = asked(store, clock, Peer(store, clock).ask)
    assert (found.answer, found.root, found.is_writing) == (Answer.SERVES, store.uri, True)


def test_a_copy_is_not_served_by_the_broker_of_its_original(
    store: MemoryStore, clock: ManualClock
) -> None:
    """All ids of a copy are those of the original; the nonce is in the original alone."""
    peer = Peer(store, clock)
    found = asked(copied(store), clock, peer.ask)
    assert (found.answer, found.root) == (Answer.ORIGINAL, store.uri)


def test_a_nonce_counts_only_in_the_heartbeat_that_answers(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A copy that is kept in step gets the nonce after the reply, which is too late."""
    peer = Peer(store, clock)
    copy = copied(store)
    assert asked(copy, clock, peer.ask).answer is Answer.ORIGINAL
    for stat in store.walk("heartbeats"):
        copy.put(f"heartbeats/{stat.name}", bytes(store.get(f"heartbeats/{stat.name}")))
    assert asked(copy, clock, peer.ask).answer is Answer.ORIGINAL


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


@pytest.mark.parametrize("copy", [shutil.copy2, _link], ids=["copies", "hard links"])
def test_a_folder_proves_itself(
    tmp_path: Path, clock: ManualClock, copy: Callable[[str, str], object]
) -> None:
    """A folder of the same machine is compared without a write; copies by hard links differ too."""
    store = LocalStore(str(tmp_path / "root"))
    peer = Peer(store, clock)
    before = store.get("heartbeats/1.json")
    assert asked(store, clock, peer.ask).answer is Answer.SERVES
    assert store.get("heartbeats/1.json") == before
    shutil.copytree(tmp_path / "root", tmp_path / "copy", copy_function=copy)
    assert asked(LocalStore(str(tmp_path / "copy")), clock, peer.ask).answer is Answer.ORIGINAL


def test_only_a_folder_has_a_place(tmp_path: Path, store: MemoryStore) -> None:
    """Buckets have none, and neither has a folder that does not exist."""
    assert place_of(store) == ""
    assert place_of(LocalStore(str(tmp_path))) == place_of(LocalStore(f"{tmp_path}/."))
    assert place_of(LocalStore(str(tmp_path / "none"))) == ""


def test_a_broker_that_cannot_write_is_unproven(store: MemoryStore, clock: ManualClock) -> None:
    """Its ids are right and its proof fails: it may not be replaced, and not be trusted."""
    full = errors.StorageFull(root=store.uri, free_bytes=0, reserve_bytes=1)
    fault = Fault(operation="put", prefix="heartbeats/", count=2, error=full)
    peer = Peer(store.view(ScriptedFaults(fault)), clock)
    found = asked(store, clock, peer.ask)
    assert found.answer is Answer.UNPROVEN
    assert found.reason == str(full)
    assert found.answer in identity.LIVES


def test_a_broker_writes_while_flushes_or_heartbeats_do(
    store: MemoryStore, clock: ManualClock
) -> None:
    """One that has written neither for as long as others wait says so."""
    peer = Peer(store, clock)
    clock.advance(4.9)
    assert peer.heartbeats.is_writing
    clock.advance(0.2)
    assert not peer.heartbeats.is_writing
    peer.flushed_at = clock.monotonic()
    assert peer.heartbeats.is_writing


def test_another_epoch_and_another_cluster_do_not_answer(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The broker of an ended epoch counts as absent, that of another cluster is named."""
    peer = Peer(store, clock)
    before = leader(store, clock)
    Peer(store, clock)
    found = ask_broker(store, leader(store, clock), peer.ask, timeout_seconds=1.0)
    assert found.answer is Answer.NONE
    assert "epoch 1 of broker 1" in str(found.error)
    other = MemoryStore(clock, name="other")
    Peer(other, clock)
    found = ask_broker(other, before, peer.ask, timeout_seconds=1.0)
    assert (found.answer, found.root) == (Answer.OTHER_CLUSTER, store.uri)


def test_a_broker_of_an_older_release_counts_by_its_ids(
    store: MemoryStore, clock: ManualClock
) -> None:
    """It does not know the request; its cluster, id and epoch are compared as before."""
    cluster_id = Peer(store, clock).leadership.cluster.cluster_id

    def ask(
        address: str, action: str, request: msgspec.Struct, *, timeout_seconds: float
    ) -> ClusterInfo:
        if action != "cluster":
            raise errors.BadRequest(reason=f"there is no action {action!r}")
        own = BrokerInfo(broker=1, epoch=1, address="h:1")
        return ClusterInfo(cluster_id=cluster_id, root="r", version="0", brokers=[own])

    assert asked(store, clock, ask).answer is Answer.SERVES


def test_many_that_ask_share_heartbeats(store: MemoryStore, clock: ManualClock) -> None:
    """Programs that ask while a heartbeat is written are all in the next one."""
    arrived, may_end, puts = threading.Event(), threading.Event(), list[str]()

    class Slow(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "put" and path.startswith("heartbeats/"):
                puts.append(path)
                if len(puts) == 2:
                    arrived.set()
                    assert may_end.wait(SECONDS)

    peer = Peer(store.view(Slow()), clock)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(peer.heartbeats.prove, ProveRoot(nonce="first"))
        assert arrived.wait(SECONDS)
        others = [pool.submit(peer.heartbeats.prove, ProveRoot(nonce=f"{n}")) for n in range(8)]
        wait_until(lambda: len(peer.heartbeats._nonces) == 9, "all have asked")
        may_end.set()
        assert {each.result(SECONDS).reason for each in (first, *others)} == {""}
    assert len(puts) == 3


def test_heartbeats_for_proofs_have_a_pause(store: MemoryStore, clock: ManualClock) -> None:
    """Programs that ask one after another do not make a put for each of them at once."""
    peer = Peer(store, clock)
    began = clock.monotonic()
    for number in range(10):
        assert peer.heartbeats.prove(ProveRoot(nonce=str(number))).reason == ""
    pause_seconds = PROOF_PAUSE_REMOTE_SECONDS
    assert clock.monotonic() - began == pytest.approx(9 * pause_seconds)


def test_no_proof_after_the_last_heartbeat(store: MemoryStore, clock: ManualClock) -> None:
    """A broker that has marked itself as stopped writes no heartbeat again."""
    peer = Peer(store, clock)
    peer.heartbeats.write(stopped=True)
    assert peer.heartbeats.prove(ProveRoot(nonce="n")) == RootProof(
        cluster_id=peer.leadership.cluster.cluster_id,
        root=store.uri,
        broker=1,
        epoch=1,
        reason="the broker is stopping",
    )
