"""Roots and brokers that cannot be used as requested."""

from __future__ import annotations

from typing import Final

from sparklog.errors.base import Invalid

_EMPTY_ROOT_ADVICE: Final = (
    "Use an empty or new folder as the root. To keep a log alongside these files, start it once"
    " with `sparklog broker --allow-non-empty`"
)


class BrokerAlive(Invalid):
    """Another broker serves the root, or has the same id: use it, stop it, or replace it."""

    code = "broker_alive"
    template = (
        "Root {root} already has a broker: {leader}. Use that broker, stop it first, or replace"
        " it with --take-over. Brokers with different --id share a root{condition}."
    )
    root: str
    leader: str
    condition: str = ""
    broker: int | None = None
    address: str = ""


class CannotDrain(Invalid):
    """A broker cannot hand over its partitions and stop: choose another, or stop it differently."""

    code = "cannot_drain"
    template = "Broker {broker} cannot be drained: {reason}."
    broker: int
    reason: str


class SecurityOfAnotherRoot(Invalid):
    """The users, ACLs and keys of a root were copied from another root, or from a backup."""

    code = "security_of_another_root"
    template = (
        "Root {root} is a copy, or was restored: security/ in it has the users and keys of the"
        " original. To serve this root, give it keys of its own with `sparklog security rekey`."
    )
    root: str


class RootNotWritable(Invalid):
    """The process is not allowed to write to the root: grant it access, or use another root."""

    code = "root_not_writable"
    template = (
        "Root {root} is not writable: {reason}. Grant this process write access, or use another"
        " root."
    )
    root: str
    reason: str


class RootReadOnly(RootNotWritable):
    """A request needs a broker, none serves the root, and this process cannot start one there."""

    code = "root_read_only"
    template = (
        "Root {root} is read-only for this process ({reason}), and no broker serves it, so {what}"
        " was refused. Start a broker that can write to the root, or grant this process write"
        " access."
    )
    root: str
    what: str
    reason: str


class FormatTooNew(Invalid):
    """A newer sparklog wrote the root: upgrade this one."""

    code = "format_too_new"
    template = (
        "Root {root} has {what} {found}, and this sparklog supports {what}s up to {known}: upgrade"
        " sparklog."
    )
    root: str
    found: int
    known: int
    what: str = "format version"


class NeedsFeatureLevel(Invalid):
    """A request needs a feature level that the root does not have yet: upgrade the root."""

    code = "needs_feature_level"
    template = (
        "{what} needs feature level {needed}, and the root has {level}: update all of its brokers,"
        " then run `sparklog cluster upgrade`."
    )
    what: str
    needed: int
    level: int


class NotARoot(Invalid):
    """The folder or bucket is not a sparklog root; `advice` says what to do."""

    code = "not_a_root"
    template = "{root} is not a sparklog root ({reason}): {advice}."
    root: str
    reason: str
    advice: str = "correct it, or start a broker on it first"


class RootNotEmpty(Invalid):
    """A folder that is not yet a root contains files of another program; `found` names some."""

    code = "root_not_empty"
    template = "{root} is not a sparklog root and is not empty: it holds {found}. {advice}."
    root: str
    found: str
    advice: str = _EMPTY_ROOT_ADVICE


class WrongCluster(Invalid):
    """The broker at the address that a root names serves another root: correct the address."""

    code = "wrong_cluster"
    template = (
        "Root {root} is cluster {expected}, but the broker at {address} serves cluster {found},"
        " {served}. Correct flight.advertised of the root's broker."
    )
    root: str
    expected: str
    address: str
    found: str
    served: str


class RootIsCopy(Invalid):
    """The root is a copy of another one: connect to the original, or end its synchronization."""

    code = "root_is_copy"
    template = (
        "Root {root} is a copy of {served}, which the broker at {address} serves, and is still kept"
        " in step with it. Connect to {served} or {address}; or, to use the copy, end its"
        " synchronization first."
    )
    root: str
    served: str
    address: str


class BrokerNotTrusted(Invalid):
    """The TLS connection to a broker fails: one side does not accept the other's certificate."""

    code = "broker_not_trusted"
    template = "No TLS connection to {address}: {reason}."
    address: str
    reason: str


class WrongPort(Invalid):
    """The address is not a Flight port: use the broker's Flight address."""

    code = "wrong_port"
    template = "{address} is not a Flight port: {reason}."
    address: str
    reason: str
