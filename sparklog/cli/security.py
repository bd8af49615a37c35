"""`sparklog security`: the mode in which brokers evaluate ACLs, and the super users."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.cli import security_files
from sparklog.cli.security_root import (
    BesideTheDataOption,
    SecurityRootOption,
    change_state,
    check_bucket,
    check_place,
    known_state,
    root_store,
)
from sparklog.options import is_private
from sparklog.terminal.commands import Command, ExitCode
from sparklog.terminal.options import JsonOption, YesOption, confirm

if TYPE_CHECKING:
    from sparklog.security.state import Mode, SecurityState
    from sparklog.security.users import Change
    from sparklog.storage.metadata.liveness import Leader
    from sparklog.storage.objects import Store

_IN_FORCE_SECONDS: Final = 10.0
"""The wait for brokers to follow a change; usually it takes a second or two."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and change whether brokers evaluate ACLs, and the super users.",
)

_SuperUserOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="User:NAME",
        help="Add a super user, which may do everything; repeat it for more.",
        show_default=False,
    ),
]
_RemoveSuperUserOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="User:NAME", help="Remove a super user; repeat it for more.", show_default=False
    ),
]
_AllowEveryoneOption = Annotated[
    bool | None,
    typer.Option(
        "--allow-everyone-if-no-acl-found/--no-allow-everyone-if-no-acl-found",
        help="Whether everybody may do everything with a resource that no ACL mentions. Without the"
        " option, that stays as it is; at first, they may not.",
        show_default=False,
    ),
]


@app.command(cls=Command)
def status(as_json: JsonOption = False, root: SecurityRootOption = None) -> None:
    """Show whether ACLs are enforced, the super users, and the author of the last change.

    Example: sparklog security status --root ./data
    """
    import msgspec

    from sparklog.security.state import NO_USERS

    state = known_state(root_store(root)) or NO_USERS
    if as_json:
        typer.echo(msgspec.json.encode(_facts(state)).decode())
    else:
        _print(state)


@app.command(cls=Command)
def enforce(
    super_user: _SuperUserOption = None,
    remove_super_user: _RemoveSuperUserOption = None,
    allow_everyone: _AllowEveryoneOption = None,
    yes: YesOption = False,
    root: SecurityRootOption = None,
) -> None:
    """Have brokers refuse what no ACL allows.

    ACLs bind clients of brokers, not programs that can read the root itself. Run `observe` first,
    and wait until the brokers' logs have no more requests that would be refused. The command can be
    repeated to change the super users.

    Brokers of the cluster, and programs that open the root, prove who they are over TLS or on the
    broker's machine only. So the command fails while a live broker has a first Flight address
    without TLS that is not a loopback one.

    Example: sparklog security enforce --super-user User:admin --root ./data
    """
    from sparklog.security.state import Mode

    _set(Mode.ENFORCE, super_user, remove_super_user, allow_everyone, is_sure=yes, root=root)


@app.command(cls=Command)
def observe(
    super_user: _SuperUserOption = None,
    remove_super_user: _RemoveSuperUserOption = None,
    allow_everyone: _AllowEveryoneOption = None,
    yes: YesOption = False,
    root: SecurityRootOption = None,
) -> None:
    """Have brokers log what `enforce` would refuse, and serve it.

    Only changes of ACLs through a broker are refused where no ACL allows them: otherwise any client
    could become an administrator.

    Example: sparklog security observe --super-user User:admin --root ./data
    """
    from sparklog.security.state import Mode

    _set(Mode.OBSERVE, super_user, remove_super_user, allow_everyone, is_sure=yes, root=root)


@app.command(cls=Command)
def off(yes: YesOption = False, root: SecurityRootOption = None) -> None:
    """Have brokers evaluate no ACLs: every client may do everything.

    ACLs and super users stay for later.

    Example: sparklog security off --root ./data
    """
    from sparklog.security.state import Mode

    _set(Mode.OFF, is_sure=yes, root=root)


@app.command(cls=Command)
def rekey(yes: YesOption = False, root: SecurityRootOption = None) -> None:
    """Give a root that was copied, or restored from a backup, keys of its own.

    Brokers do not start on such a root while it has the keys of the original: an administrator of
    the one would be an administrator of the other. Users, passwords and ACLs stay as they are.

    Example: sparklog security rekey --root ./restored
    """
    from sparklog.security.policies import rekeyed

    store = root_store(root)
    if known_state(store) is None:
        typer.echo("nothing to do: the root has no users, ACLs or keys")
        return
    if not yes:
        confirm("Replace the keys?")
    change_state(store, rekeyed)
    typer.echo("the root has keys of its own")


@app.command("set-ca", cls=Command)
def set_ca(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="PEM, with one or more CAs.")],
    root: SecurityRootOption = None,
) -> None:
    """Set the CA by which programs with access to the root check the certificates of brokers.

    They are the other brokers of the cluster, commands with --root, notebooks and Spark jobs that
    open the root. Without it, they use SPARKLOG_CLIENT_CA, or the CAs that their machine trusts.
    Clients that connect to an address have a setting of their own.

    Example: sparklog security set-ca certs/ca.pem --root ./data
    """
    from sparklog.security.policies import with_ca

    try:
        pem = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise errors.BadOption(option="FILE", value=str(file), reason=reason) from None
    store = root_store(root)
    check_place(store, known_state(store, may_create=True))
    change_state(store, with_ca(pem), create=True)
    typer.echo("programs with access to the root check the certificates of brokers by this CA")


@app.command(cls=Command)
def init(
    host: Annotated[
        list[str],
        typer.Option(
            metavar="HOST",
            help="The host name or address that clients connect to; repeat it for more. The broker"
            " advertises the first one.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder for keys, certificates and settings."),
    ],
    user: Annotated[str, typer.Option(metavar="NAME", help="The administrator.")] = "admin",
    kafka_port: Annotated[
        int, typer.Option(metavar="PORT", min=1, max=65_535, help="For Kafka clients.")
    ] = 9_092,
    flight_port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=1, max=65_535, help="For native clients, Spark and other brokers."
        ),
    ] = 8_815,
    beside_the_data: BesideTheDataOption = False,
    root: SecurityRootOption = None,
) -> None:
    """Secure a log: certificates, an administrator, and settings for the broker and clients.

    Makes a CA and a certificate for the broker, adds a user with a random password as a super
    user, and stores the CA in the root. In a new root, ACLs are enforced. In one that has topics,
    they are only observed until you enforce them. The folder DIR gets the settings of a broker,
    and those of clients of the administrator.

    The command can be repeated: it leaves alone what exists, and replaces the broker's certificate
    if other hosts are given or it expires within 30 days. Keep ca.key in a safe place; brokers do
    not need it.

    Example: sparklog security init --host k1.example.org --out keys --root data
    """
    from sparklog.security.client_settings import broker_settings

    store = root_store(root)
    check_bucket(store, known_state(store, may_create=True), beside_the_data=beside_the_data)
    folder, now = security_files.private_folder(out), datetime.now(UTC)
    ca = security_files.authority(folder, now=now)
    is_new = security_files.broker_certificate(
        folder, ca, [*host, "localhost", "127.0.0.1", "::1"], now=now
    )
    own = security_files.private_folder(folder / user)
    mode = _secure(store, user, own, ca.pem.decode())
    settings = folder / "broker.toml"
    if not settings.exists():
        text = broker_settings(
            root=_named(store),
            certificate=str(folder / "broker.pem"),
            key=str(folder / "broker.key"),
            host=host[0],
            kafka_port=kafka_port,
            flight_port=flight_port,
        )
        security_files.write(settings, text.encode(), is_secret=False)
    _write_client(own, user, f"{host[0]}:{kafka_port}", f"{host[0]}:{flight_port}", ca.pem)
    if is_new:
        typer.echo(f"wrote a certificate for {', '.join(host)}")
    typer.echo(f"user {user} is a super user; {_EFFECTS[mode.value]}")
    typer.echo(f"start a broker: sparklog broker --config {settings}")
    typer.echo(f"settings of its clients are in {own}")


@app.command(cls=Command)
def client(
    user: Annotated[str, typer.Argument(metavar="NAME", help="The user.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the settings.")],
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address of the Kafka listener. Default: that of the running broker.",
            show_default=False,
        ),
    ] = None,
    flight: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address of the Flight listener. Default: that of the running broker.",
            show_default=False,
        ),
    ] = None,
    root: SecurityRootOption = None,
) -> None:
    """Write the settings of clients for a user, who is added if there is no such user.

    DIR gets the CA, the password, java.properties for Java clients, Kafka's tools and Spark's Kafka
    connector, librdkafka.properties, kafka-python.json, and sparklog.env with the variables of
    sparklog's own clients. A new user gets a random password; for one that exists, write its
    password into DIR/password first. The user may do nothing until `sparklog acls add` allows it
    something.

    Example: sparklog security client app --out ./app --root ./data
    """
    store = root_store(root)
    state = known_state(store)
    if state is None or not state.ca:
        raise typer.BadParameter(
            "the root has no CA: run `sparklog security init`, or `sparklog security set-ca` if you"
            " have certificates"
        )
    running = _addresses(store)
    kafka, flight = kafka or running[0], flight or running[1]
    if not kafka or not flight:
        raise typer.BadParameter(
            "no running broker has registered listeners with SASL_SSL: pass --kafka and --flight"
        )
    folder = security_files.private_folder(out)
    change_state(store, _with_user(user, security_files.password(folder / _PASSWORD)))
    _write_client(folder, user, kafka, flight, state.ca.encode())
    typer.echo(f"settings of clients of {user} are in {folder}")


_PASSWORD: Final = "password"
"""The name of the file."""


def _named(store: Store) -> str:
    """Returns the root as settings name it; a folder by its absolute path."""
    from sparklog.storage.objects import LocalStore

    return str(store.root) if isinstance(store, LocalStore) else store.uri


def _secure(store: Store, user: str, folder: Path, ca: str) -> Mode:
    """Adds the administrator and the CA to the root, and returns the mode of its ACLs."""
    from sparklog.clock import SystemClock
    from sparklog.security.policies import with_ca, with_policy
    from sparklog.security.state import Mode
    from sparklog.storage.metadata.store import MetadataStore

    metadata = MetadataStore(store, clock=SystemClock()).refresh()
    add = _with_user(user, security_files.password(folder / _PASSWORD))

    def change(state: SecurityState) -> SecurityState | None:
        mode = state.policy.mode
        if mode is Mode.OFF:
            mode = Mode.OBSERVE if metadata.topics else Mode.ENFORCE
        after = state
        for each in (
            add,
            with_ca(ca),
            with_policy(mode=mode, add_super_users=[f"User:{user}"]),
        ):
            after = each(after) or after
        return after if after != state else None

    return change_state(store, change, create=True).policy.mode


def _with_user(user: str, password: str) -> Change:
    """Adds a user, or checks the password of one that exists. Raises `BadOption`."""
    from sparklog.security.scram import Mechanism, is_password
    from sparklog.security.users import added, credentials_of

    credentials = credentials_of(password)

    def change(state: SecurityState) -> SecurityState | None:
        known = state.users.get(user)
        if known is None:
            return added(user, credentials)(state)
        verifier = known.credentials.get(Mechanism.SHA_256)
        if verifier is None or not is_password(Mechanism.SHA_256, verifier, password):
            reason = (
                "the user exists, and has another password than the file `password` in the folder:"
                " write its password there, or choose another user"
            )
            raise errors.BadOption(option="user", value=user, reason=reason)
        return None

    return change


def _addresses(store: Store) -> tuple[str, str]:
    """Returns the addresses of the Kafka and the Flight listener with SASL_SSL; "" without one."""
    from sparklog import listeners
    from sparklog.storage.metadata.liveness import read_heartbeats

    kafka = flight = ""
    for heartbeat in read_heartbeats(store).values():
        if heartbeat.stopped:
            continue
        found = [
            each.address
            for each in listeners.parse(heartbeat.kafka_listeners)
            if each.protocol == listeners.SASL_SSL
        ]
        kafka = kafka or (found[0] if found else "")
        if heartbeat.flight.startswith(listeners.TLS_SCHEME):
            flight = flight or heartbeat.flight.removeprefix(listeners.TLS_SCHEME)
    return kafka, flight


def _write_client(folder: Path, user: str, kafka: str, flight: str, ca: bytes) -> None:
    from sparklog.security.client_settings import files_of_client

    path = folder / "ca.pem"
    security_files.write(path, ca, is_secret=False)
    files = files_of_client(
        kafka=kafka,
        flight=flight,
        user=user,
        password=security_files.password(folder / _PASSWORD),
        ca=str(path),
        password_file=str(folder / _PASSWORD),
    )
    security_files.client_files(folder, files)


def _set(
    mode: Mode,
    add_super_users: list[str] | None = None,
    remove_super_users: list[str] | None = None,
    allow_everyone: bool | None = None,
    *,
    is_sure: bool,
    root: str | None,
) -> None:
    """Changes the policy, after confirmation if that is needed."""
    from sparklog.security.policies import with_policy
    from sparklog.security.state import NO_USERS, Mode

    change = with_policy(
        mode=mode,
        add_super_users=add_super_users or (),
        remove_super_users=remove_super_users or (),
        allow_everyone=allow_everyone,
    )
    store = root_store(root)
    known = known_state(store)
    before = known or NO_USERS
    after = change(before)
    if after is None:
        typer.echo(f"nothing to change: {_EFFECTS[mode]}")
        return
    check_place(store, known)
    if mode is Mode.ENFORCE and before.policy.mode is not Mode.ENFORCE:
        _check_flight(store)
    _print(after, is_planned=True)
    for line in _warnings(before, after):
        typer.echo(f"sparklog: {line}", err=True)
    is_leap = {before.policy.mode, mode} == {Mode.OFF, Mode.ENFORCE}
    is_opened = before.policy.mode is Mode.ENFORCE and mode is not Mode.ENFORCE
    if (is_leap or is_opened) and not is_sure:
        confirm("Continue?")
    version = change_state(store, change).version
    typer.echo(_EFFECTS[mode])
    _await_brokers(store, version)


def _await_brokers(store: Store, version: int) -> None:
    """Waits until all brokers go by the version; exits with 3 if some do not."""
    from sparklog import cluster
    from sparklog.clock import SystemClock

    clock = SystemClock()
    view = cluster.RootView(store, clock, waits=lambda _leaders, _seconds: None)
    late = cluster.await_security(view, version, clock, timeout_seconds=_IN_FORCE_SECONDS)
    for broker, reason in sorted(late.items()):
        typer.echo(f"sparklog: not in force at broker {broker}: {reason}", err=True)
    if late:
        raise typer.Exit(ExitCode.UNHEALTHY)


_EFFECTS: Final = {
    "off": "ACLs are not evaluated",
    "observe": "ACLs are evaluated, and refusals only logged",
    "enforce": "ACLs are enforced",
}
"""By mode."""


def _warnings(before: SecurityState, after: SecurityState) -> Iterator[str]:
    from sparklog.security.acl import ANONYMOUS
    from sparklog.security.state import Mode

    policy = after.policy
    for each in policy.super_users:
        name = each.partition(":")[2]
        if each not in before.policy.super_users and name not in after.users:
            yield f"there is no user {name} yet"
    if ANONYMOUS in policy.super_users:
        yield "clients that have not logged in are a super user: everybody may do everything"
    if policy.mode is not Mode.OFF and not policy.super_users:
        yield (
            "there is no super user: ACLs can only be changed by commands with --root, unless one"
            " of them allows ALTER on the cluster"
        )
    if (before.policy.mode, policy.mode) == (Mode.OFF, Mode.ENFORCE):
        yield "`sparklog security observe` would first log the requests that will be refused"


# ------------------------------------------------------------------------------ status


def _facts(state: SecurityState) -> dict[str, object]:
    policy, author = state.policy, state.author
    return {
        "mode": policy.mode.value,
        "super_users": list(policy.super_users),
        "allow_everyone_if_no_acl_found": policy.allow_everyone_if_no_acl_found,
        "users": len(state.users),
        "acls": len(state.acls),
        "version": state.version,
        "author": author.principal or None,
        "host": author.host or None,
        "changed_at": _time(author.at_us) if author.at_us else None,
    }


def _print(state: SecurityState, *, is_planned: bool = False) -> None:
    """Prints the state; `is_planned`: one that follows the newest version."""
    policy = state.policy
    disabled = sum(user.disabled for user in state.users.values())
    unlisted = "everybody" if policy.allow_everyone_if_no_acl_found else "super users only"
    lines = {
        "mode": f"{policy.mode.value}: {_EFFECTS[policy.mode.value]}",
        "super users": ", ".join(policy.super_users) or "-",
        "without ACLs": f"a resource is open to {unlisted}",
        "users": f"{len(state.users):,}" + (f", {disabled:,} of them disabled" if disabled else ""),
        "ACLs": f"{len(state.acls):,}",
    }
    if state.version:
        name = "last change" if is_planned else "version"
        number = "" if is_planned else f"{state.version}, "
        author = state.author
        host = f" from {author.host}" if author.host else ""
        by = f"by {author.principal}{host} at {_time(author.at_us)}"
        lines[name] = f"{number}{by}"
    for name, words in lines.items():
        typer.echo(f"{name:<14} {words}")
    typer.echo(
        "ACLs bind clients of brokers. A program that can read the root can read every record."
    )


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).isoformat().replace("+00:00", "Z")


# ------------------------------------------------------------------------------ Flight


def _check_flight(store: Store) -> None:
    """Raises `BadOption` while tokens cannot be sent to the Flight address of a live broker."""
    from sparklog import limits
    from sparklog.clock import SystemClock
    from sparklog.storage.metadata.leadership import is_up
    from sparklog.storage.metadata.liveness import LeaderState, LeaderWatch
    from sparklog.storage.metadata.store import MetadataStore

    def waits(leader: Leader, seconds: float) -> None:
        waiting = f"waiting up to {seconds:g} s to see whether broker {leader.broker} is alive"
        typer.echo(f"sparklog: {waiting}", err=True)

    clock = SystemClock()
    metadata = MetadataStore(store, clock=clock).refresh()
    for broker, known in sorted(metadata.brokers.items()):
        if not known.flight or is_private(known.flight) or not is_up(metadata, broker):
            continue
        watch = LeaderWatch(
            store, clock=clock, dead_after_seconds=limits.DEAD_AFTER_SECONDS, broker=broker
        )
        found = watch.wait_for_state(metadata, on_wait=waits)
        if found is None or found.state is LeaderState.DEAD or is_private(found.leader.flight):
            continue
        raise errors.BadOption(
            option="mode",
            value="enforce",
            reason=f"broker {broker} has the Flight address {found.leader.flight}, at which it"
            " cannot recognise the other brokers, nor programs that open the root: they send tokens"
            " over TLS or to loopback addresses only. Write SASL_SSL:// or SSL:// before the first"
            " address in flight.listen of the broker, or use a loopback address, and restart it",
        )
