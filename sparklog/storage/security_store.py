"""The security state of a root, as a chain of versions (`sparklog/security/state.py`).

It is not part of the metadata: every Spark job loads that, and must not get credentials. In a local
root only the user of the brokers can read the folder; in a bucket it is the operator's task to deny
it to everybody else (docs/security.md). A chain has a folder of its own, named by an id that the
metadata contains: if a program is killed while it creates the chain, its folder counts for nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Callable
from typing import Final

import msgspec
import pyarrow as pa
import structlog

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.security import state
from sparklog.security.acl import Acl
from sparklog.security.quota import Quota
from sparklog.security.state import Author, Policy, SecurityState, StateDelta, User, new_key
from sparklog.storage import packed
from sparklog.storage.metadata.cluster_file import level_of_new, open_cluster
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore, ObjectMissing, Store
from sparklog.storage.version_chain import VersionChain

_log = structlog.get_logger("sparklog.storage")
FOLDER: Final = "security"
SECURITY_SNAPSHOT_EVERY: Final = 20  # versions of the state
_MANY_ACLS: Final = 10_000
_LARGE_SNAPSHOT_FACTOR: Final = 10
"""Snapshots of a state with many ACLs, which take megabytes, are that much rarer."""
_MAGIC: Final = b"SLS1"


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole version, with users sorted by name, and ACLs."""

    version: int
    change_id: str
    names: list[str]
    users: list[User]
    salt_key: bytes
    author: Author
    policy: Policy = Policy()
    acls: msgspec.Raw = msgspec.Raw(b"[]")
    home: str = ""
    root_key: bytes = b""
    ca: str = ""
    quotas: list[Quota] | msgspec.UnsetType = msgspec.UNSET
    """Missing if there are none, as in the snapshots of releases without quotas."""

    def __repr__(self) -> str:
        return f"_Content(version={self.version})"


_encoder = msgspec.json.Encoder(order="deterministic")
_delta_decoder = msgspec.json.Decoder(StateDelta)
_content_decoder = msgspec.json.Decoder(_Content)
_acls_decoder = msgspec.json.Decoder(frozenset[Acl])


class _SecurityFormat:
    """See `ChainFormat`."""

    first = SecurityState()
    delta_of = staticmethod(state.delta_of)

    def __init__(self, chain_id: str) -> None:
        self.folder = f"{FOLDER}/{chain_id}"

    def apply(self, before: SecurityState, delta: StateDelta) -> SecurityState:
        after = state.apply(before, delta)
        if delta.snapshot_crc not in (None, zlib.crc32(self.content_of(after))):
            raise ValueError("its checksum does not match the state that it leads to")
        return after

    def encode_delta(self, delta: StateDelta) -> bytes:
        return _encoder.encode(delta)

    def decode_version(self, version: int, data: pa.Buffer) -> StateDelta | SecurityState:
        try:
            found = _delta_decoder.decode(data)
        except msgspec.ValidationError as error:
            raise ValueError(f"{error}; if a newer release has put it, update this one") from error
        if found.version != version:
            raise ValueError(f"it says that it is version {found.version}")
        return found

    def content_of(self, state: SecurityState) -> bytes:
        users = sorted(state.users.items())
        return _encoder.encode(
            _Content(
                version=state.version,
                change_id=state.change_id,
                names=[name for name, _ in users],
                users=[user for _, user in users],
                salt_key=state.salt_key,
                author=state.author,
                policy=state.policy,
                # Encoded texts are sorted faster than ACLs, of which there may be 100,000.
                acls=msgspec.Raw(b"[%b]" % b",".join(sorted(map(_encoder.encode, state.acls)))),
                home=state.home,
                root_key=state.root_key,
                ca=state.ca,
                quotas=_quotas_of(state) or msgspec.UNSET,
            )
        )

    def encode_snapshot(self, _: SecurityState, content: bytes) -> bytes:
        return packed.pack(_MAGIC, content)

    def decode_snapshot(self, version: int, data: pa.Buffer) -> SecurityState:
        content = packed.unpack((_MAGIC,), data, what="a snapshot of a security state")
        try:
            found = _content_decoder.decode(content)
            acls = _acls_decoder.decode(found.acls)
        except msgspec.ValidationError as error:  # its checksum is right
            raise packed.NewerFormat(f"{error}: update this release, and leave the file") from error
        if found.version != version:
            raise ValueError(f"it says that it is version {found.version}")
        return SecurityState(
            version=found.version,
            change_id=found.change_id,
            users=dict(zip(found.names, found.users, strict=True)),
            salt_key=found.salt_key,
            author=found.author,
            policy=found.policy,
            acls=acls,
            home=found.home,
            root_key=found.root_key,
            ca=found.ca,
            quotas={each.entity: each.values for each in found.quotas or ()},
        )

    def snapshot_every(self, state: SecurityState) -> int:
        is_large = len(state.acls) > _MANY_ACLS
        return SECURITY_SNAPSHOT_EVERY * (_LARGE_SNAPSHOT_FACTOR if is_large else 1)


def _quotas_of(state: SecurityState) -> list[Quota]:
    """Returns the quotas, in an order that does not depend on how the state came about."""
    quotas = (Quota(entity=entity, values=values) for entity, values in state.quotas.items())
    return sorted(quotas, key=lambda each: _encoder.encode(each.entity))


class SecurityStore(VersionChain[SecurityState, StateDelta]):
    """Reads and changes the security state of one root. May be used by several threads."""

    def __init__(self, store: Store, chain_id: str, *, clock: Clock) -> None:
        """`chain_id`: as `ClusterMetadata.security` names it."""
        super().__init__(store, _SecurityFormat(chain_id), clock=clock)
        self.chain_id = chain_id
        self._folder = f"{store.uri}/{FOLDER}/{chain_id}"
        self.on_read: Callable[[SecurityState, StateDelta], None] | None = None
        """Called with each version that is read: the state before it, and its changes. A version
        may be read more than once."""

    def _next(
        self, known: SecurityState, change: StateDelta | SecurityState
    ) -> SecurityState | None:
        following = super()._next(known, change)
        if self.on_read is not None and following is not None and isinstance(change, StateDelta):
            self.on_read(known, change)
        return following

    def discard(self) -> None:
        """Deletes a chain of one version that the metadata does not name."""
        if self.current.version:
            self._store.delete([self._path(self.current.version)])

    def look(self) -> SecurityState:
        """Returns the newest version. Raises `CorruptObject` if it does not exist (any more).

        A chain whose folder was removed has no next version either: only a look at the newest one
        distinguishes it from a chain that has not changed.
        """
        found = self.refresh()
        try:
            if found.version:
                self._store.stat(self._path(found.version))
                return found
        except ObjectMissing:
            pass
        raise errors.CorruptObject(
            path=self._folder,
            check="it is missing, and with it the users of the root: restore it from a backup",
        )


def open_security(store: Store, *, clock: Clock) -> SecurityStore | None:
    """Returns the security state of a root, unread; None if the root has none.

    Raises `NotARoot`, `FormatTooNew`, `CorruptObject`.
    """
    open_cluster(store, clock=clock, create=False)
    chain_id = MetadataStore(store, clock=clock).refresh().security
    return security_of(store, chain_id, clock=clock) if chain_id else None


def security_of(store: Store, chain_id: str, *, clock: Clock) -> SecurityStore:
    """Returns the security state that the metadata names, unread. Restores its modes if needed."""
    found: list[str] = []
    if isinstance(store, LocalStore):
        with contextlib.suppress(OSError):  # reading the state raises it, with its path
            found = store.make_private(FOLDER)
    if found:
        _log.warning(
            "other users could read files of security/; modes 0700 and 0600 are restored if they"
            " belong to this user",
            files=len(found),
            first=found[0],
        )
    return SecurityStore(store, chain_id, clock=clock)


def home_of(store: Store) -> str:
    """Returns the place of a root's security state, which a copy of the root does not have.

    A folder that is renamed, or mounted elsewhere, is the same place.
    """
    return store.identity_of(FOLDER) if isinstance(store, LocalStore) else store.uri


def check_home(store: Store, state: SecurityState) -> None:
    """Raises `SecurityOfAnotherRoot` for a state that was copied here."""
    if state.home and state.home != home_of(store):
        raise errors.SecurityOfAnotherRoot(root=store.uri)


def change_security(
    store: Store,
    change: Callable[[SecurityState], SecurityState | None],
    *,
    author: Author,
    clock: Clock,
    create: bool = False,
) -> SecurityState:
    """Changes the security state of a root, and returns the newest version.

    With `create`, creates the root and the state if there is none; without, `change` then gets a
    state without users. A call that was interrupted can be repeated. Raises what `change` raises,
    `NeedsFeatureLevel`, and what `open_cluster` raises.
    """
    cluster = open_cluster(store, clock=clock, create=create)
    metadata = MetadataStore(store, clock=clock)

    def decide(state: SecurityState) -> SecurityState | None:
        after = change(state)
        if after is None:
            return None
        if not after.home:
            after = msgspec.structs.replace(after, home=home_of(store), root_key=new_key())
        return msgspec.structs.replace(after, author=author)

    if known_id := metadata.refresh().security:
        chain = SecurityStore(store, known_id, clock=clock)
        chain.look()
        return chain.change(decide)

    first = decide(state.first_state())
    if first is None:
        return state.first_state()
    chain = SecurityStore(store, secrets.token_hex(8), clock=clock)

    def name_chain(known: ClusterMetadata) -> ClusterMetadata | None:
        level = known.level if known.version else level_of_new(cluster)
        if level < limits.SECURITY_LEVEL:
            raise errors.NeedsFeatureLevel(
                what="users, ACLs and quotas", needed=limits.SECURITY_LEVEL, level=level
            )
        if known.security:
            return None  # another program has created it meanwhile
        if not chain.current.version:  # it exists before the metadata names it
            chain.change(lambda _: first)
        return msgspec.structs.replace(known, level=level, security=chain.chain_id)

    if metadata.change(name_chain).security != chain.chain_id:
        chain.discard()
        return change_security(store, change, author=author, clock=clock)
    return chain.current
