"""Proof that a broker serves this root, and not an original from which the root was copied.

A copy of a root (`cp -a`, a restored backup, a replicated bucket) contains the cluster id, the
metadata and the heartbeats of its original, and so the address of the original's broker. A program
that trusted them would change the original. A copy lacks all later writes, so either of two facts
proves that a broker serves the storage that the client can read:

- Its root is the same folder on the same machine, by device and inode. Hard-linked copies have
  their own folders. Nothing is written, so this also works on a full or frozen file system.
- It puts the client's nonce in its heartbeat before it replies, and the client then finds it there.
  The client checks only once: a replicated copy receives the nonce too, but later.

Heartbeats are hints, and so is silence. A broker that replies is alive, whether or not its
heartbeats can be written (`liveness.LeaderWatch`).
"""

from __future__ import annotations

import enum
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

import msgspec

from sparklog import errors
from sparklog.formats import flight_messages
from sparklog.formats.flight_messages import ProveRoot, RootProof
from sparklog.storage.metadata.cluster_file import read_cluster
from sparklog.storage.metadata.liveness import Answers, Leader, read_heartbeat
from sparklog.storage.metadata.processes import machine
from sparklog.storage.objects import Store

_NONCE_BYTES: Final = 16


class Ask(Protocol):
    """Sends a request to a broker."""

    def __call__(
        self, address: str, action: str, request: msgspec.Struct, *, timeout_seconds: float
    ) -> Any:
        """Returns the reply from the broker at `host:port`. Raises `SparklogError`."""


class Answer(enum.Enum):
    """Outcome of asking a broker whether it serves a root."""

    NONE = enum.auto()
    """Nothing answers at its address, or only a different broker or epoch."""
    SERVES = enum.auto()
    UNPROVEN = enum.auto()
    """The broker answers and has the right ids, but cannot write the proof to its root."""
    ORIGINAL = enum.auto()
    """The broker serves another root, of which this one is a copy."""
    OTHER_CLUSTER = enum.auto()


LIVES: Final = (Answer.SERVES, Answer.UNPROVEN)
"""Answers of a broker that is alive, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An answer and its details."""

    answer: Answer
    error: errors.SparklogError | None = None
    """The reason there was no response."""
    reason: str = ""
    """The reason the broker cannot write the proof."""
    cluster_id: str = ""
    root: str = ""
    """The cluster and the root that the broker serves; empty if it did not answer."""
    is_writing: bool = False
    """True if the broker says that it can write to its root."""


def place_of(store: Store) -> str:
    """Returns the identity of a root's folder on this machine; empty if it has none."""
    parts, here = urlsplit(store.uri), machine()
    if parts.scheme != "file" or not here:
        return ""
    try:
        found = Path(url2pathname(parts.path)).stat()
    except OSError:
        return ""
    # Virtual machines resumed from the same snapshot share a boot id.
    return f"{socket.gethostname()} {here} {found.st_dev}:{found.st_ino}"


def ask_broker(store: Store, leader: Leader, ask: Ask, *, timeout_seconds: float) -> Asked:
    """Asks the broker at the address of `leader` whether it serves the root of `store`.

    Raises the store's errors, and `NotARoot`; a request error becomes `Asked.error`.
    """
    cluster_id = read_cluster(store).cluster_id
    request = ProveRoot(nonce=secrets.token_hex(_NONCE_BYTES), place=place_of(store))
    try:
        proof = _proof(leader, request, ask, timeout_seconds)
    except errors.SparklogError as failure:
        return Asked(answer=Answer.NONE, error=failure)
    answer, reason = Answer.SERVES, ""
    if proof.cluster_id != cluster_id:
        answer = Answer.OTHER_CLUSTER
    elif (proof.broker, proof.epoch) != (leader.broker, leader.epoch):
        reason = f"epoch {proof.epoch} of broker {proof.broker} still answers, but has ended"
        error = errors.BrokerUnavailable(address=leader.flight, reason=reason)
        return Asked(answer=Answer.NONE, error=error)
    elif not proof.is_same_place:
        answer, reason = _check_nonce(store, leader, request.nonce, proof)
    return Asked(
        answer=answer,
        reason=reason,
        cluster_id=proof.cluster_id,
        root=proof.root,
        is_writing=proof.is_writing,
    )


def _proof(leader: Leader, request: ProveRoot, ask: Ask, timeout_seconds: float) -> RootProof:
    try:
        proof: RootProof = ask(
            leader.flight, "root.prove", request, timeout_seconds=timeout_seconds
        )
    except errors.BadRequest as error:
        if not str(error).startswith(flight_messages.NO_ACTION):
            raise
    else:
        return proof
    # A broker on an older release cannot prove anything; its ids must suffice until the upgrade.
    found: flight_messages.ClusterInfo = ask(
        leader.flight, "cluster", flight_messages.Empty(), timeout_seconds=timeout_seconds
    )
    own = found.brokers[0] if found.brokers else None
    return RootProof(
        cluster_id=found.cluster_id,
        root=found.root,
        broker=own.broker if own is not None else leader.broker,
        epoch=own.epoch if own is not None else leader.epoch,
        is_same_place=True,
        is_writing=False,  # unknown: others serve its partitions, as they always have
    )


def _check_nonce(store: Store, leader: Leader, nonce: str, proof: RootProof) -> tuple[Answer, str]:
    if proof.reason:
        return Answer.UNPROVEN, proof.reason
    found = read_heartbeat(store, leader.broker)
    if found is not None and found.epoch == leader.epoch and nonce in found.nonces:
        return Answer.SERVES, ""
    return Answer.ORIGINAL, ""


def answers(store: Store, ask: Ask, *, timeout_seconds: float) -> Answers:
    """Returns a function that asks whether a silent broker still serves the root of `store`.

    It also returns true for a broker that cannot write: its silence is no reason to replace it.
    """

    def is_answered(leader: Leader) -> bool:
        asked = ask_broker(store, leader, ask, timeout_seconds=timeout_seconds)
        return asked.answer in LIVES

    return is_answered


def writes(store: Store, ask: Ask, *, timeout_seconds: float) -> Answers:
    """Returns a function that asks whether a silent broker serves the root, and can write to it.

    If it cannot, other members serve its partitions.
    """

    def is_writing(leader: Leader) -> bool:
        asked = ask_broker(store, leader, ask, timeout_seconds=timeout_seconds)
        return asked.answer in LIVES and asked.is_writing

    return is_writing
