"""`sparklog acls`: what principals may do at a broker, as `kafka-acls.sh` has it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from sparklog.cli.security_root import (
    SecurityRootOption,
    change_state,
    check_place,
    known_state,
    root_store,
)
from sparklog.display import counted
from sparklog.terminal.commands import Command, ExitCode
from sparklog.terminal.options import JsonOption, YesOption, confirm
from sparklog.terminal.printing import print_columns

if TYPE_CHECKING:
    from sparklog.security.acl import Acl, Operation, PatternType, Permission, ResourceType
    from sparklog.security.state import SecurityState

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Add, remove and list ACLs: what clients of brokers may do.",
)

_Names: TypeAlias = list[str] | None
_PRINCIPAL_HELP: Final = "The client, as User:NAME; User:* is everybody."
_PrincipalArgument = Annotated[
    str, typer.Argument(metavar="PRINCIPAL", help=_PRINCIPAL_HELP, show_default=False)
]
_OptionalPrincipalArgument = Annotated[
    str | None, typer.Argument(metavar="PRINCIPAL", help=_PRINCIPAL_HELP, show_default=False)
]
_AllowOption = Annotated[
    bool,
    typer.Option(
        "--allow/--deny", help="ACLs that allow, or ACLs that deny, which take precedence."
    ),
]
_OperationOption = Annotated[
    _Names,
    typer.Option(
        metavar="NAME",
        help="Such as read, write, describe, describe-configs or all; repeat it for more.",
        show_default=False,
    ),
]
_ProducerOption = Annotated[
    bool,
    typer.Option(
        "--producer",
        help="The operations of a producer: WRITE, DESCRIBE and CREATE on topics, WRITE and"
        " DESCRIBE on transactional ids.",
    ),
]
_ConsumerOption = Annotated[
    bool,
    typer.Option(
        "--consumer",
        help="The operations of a group's consumer: READ and DESCRIBE on topics, READ on groups.",
    ),
]
_TopicOption = Annotated[
    _Names, typer.Option(metavar="NAME", help="A topic; repeat it for more.", show_default=False)
]
_GroupOption = Annotated[
    _Names, typer.Option(metavar="NAME", help="A group; repeat it for more.", show_default=False)
]
_ClusterOption = Annotated[bool, typer.Option("--cluster", help="The cluster.")]
_TransactionalIdOption = Annotated[
    _Names,
    typer.Option(metavar="ID", help="A transactional id; repeat it for more.", show_default=False),
]
_PrefixedOption = Annotated[
    bool, typer.Option("--prefixed", help="The names are prefixes. Without it, * is every name.")
]


@app.command(cls=Command)
def add(
    principal: _PrincipalArgument,
    allow: _AllowOption = True,
    operation: _OperationOption = None,
    producer: _ProducerOption = False,
    consumer: _ConsumerOption = False,
    topic: _TopicOption = None,
    group: _GroupOption = None,
    transactional_id: _TransactionalIdOption = None,
    cluster: _ClusterOption = False,
    prefixed: _PrefixedOption = False,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Only for a client at this IP address; * is every address."
        ),
    ] = "*",
    root: SecurityRootOption = None,
) -> None:
    """Allow or deny a principal operations on resources.

    Each operation is allowed on each of the resources. READ, WRITE, DELETE and ALTER include
    DESCRIBE, and ALTER_CONFIGS includes DESCRIBE_CONFIGS, but only where they are allowed. The
    resources need not exist. ACLs that exist stay as they are.

    Example: sparklog acls add User:alice --producer --topic orders --root ./data
    """
    from sparklog.security import acls
    from sparklog.security.acl import Acl

    selection = _Selection(
        allow=allow,
        operations=operation or (),
        producer=producer,
        consumer=consumer,
        topics=topic or (),
        groups=group or (),
        transactional_ids=transactional_id or (),
        cluster=cluster,
        prefixed=prefixed,
    )
    given = [
        Acl(
            resource=resource,
            name=name,
            pattern=selection.pattern_of(resource),
            principal=principal,
            host=host,
            operation=each,
            permission=selection.permission,
        )
        for resource, name in selection.resources()
        for each in selection.operations_on(resource)
    ]
    if not selection.has_resources:
        raise typer.BadParameter(
            "no resource is named: pass --topic, --group, --transactional-id or --cluster"
        )
    if not given:
        raise typer.BadParameter("no operation is named: --operation, --producer or --consumer")
    change = acls.added(given)
    store = root_store(root)
    known = known_state(store)
    check_place(store, known)
    change_state(store, change)
    new = set(given) - (known.acls if known is not None else set())
    for acl in sorted(new):
        typer.echo(acls.described(acl))
    existed = f", {len(set(given) - new):,} existed" if len(new) < len(set(given)) else ""
    typer.echo(f"{counted(len(new), 'ACL')} added{existed}")
    _note_lack_of_effect(known, principal)


@app.command(cls=Command)
def remove(
    principal: _OptionalPrincipalArgument = None,
    allow: _AllowOption = True,
    operation: _OperationOption = None,
    producer: _ProducerOption = False,
    consumer: _ConsumerOption = False,
    topic: _TopicOption = None,
    group: _GroupOption = None,
    transactional_id: _TransactionalIdOption = None,
    cluster: _ClusterOption = False,
    prefixed: _PrefixedOption = False,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Only ACLs for this address; * selects those for every address.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    root: SecurityRootOption = None,
) -> None:
    """Remove the ACLs that the same options would add.

    Options that are left out select all: a principal alone selects every ACL that allows it
    something, or with --deny, every one that denies it something.

    Example: sparklog acls remove User:alice --topic orders --root ./data
    """
    from sparklog.security import acls
    from sparklog.security.acl import AclFilter, Operation, PatternType, ResourceType

    selection = _Selection(
        allow=allow,
        operations=operation or (),
        producer=producer,
        consumer=consumer,
        topics=topic or (),
        groups=group or (),
        transactional_ids=transactional_id or (),
        cluster=cluster,
        prefixed=prefixed,
    )
    if principal is None and not selection.has_resources:
        raise typer.BadParameter("nothing is selected: pass a principal or a resource")
    if principal is not None:
        acls.check_principal(principal)
    resources: list[tuple[ResourceType, str | None, PatternType]] = [
        (resource, name, selection.pattern_of(resource)) for resource, name in selection.resources()
    ]
    filters = [
        AclFilter(
            resource=resource,
            name=name,
            pattern=pattern,
            principal=principal,
            host=host,
            operation=each,
            permission=selection.permission,
        )
        for resource, name, pattern in resources or [(ResourceType.ANY, None, PatternType.ANY)]
        for each in selection.operations_on(resource) or [Operation.ANY]
    ]
    store = root_store(root)
    known = known_state(store)
    found = acls.matching(known, *filters) if known is not None else frozenset()
    if not found:
        typer.echo("sparklog: no ACL matches; `sparklog acls list` shows all", err=True)
        raise typer.Exit(ExitCode.FAILED)
    for acl in sorted(found):
        typer.echo(acls.described(acl))
    if not yes:
        confirm(f"Remove {counted(len(found), 'ACL')}?")
    change_state(store, acls.removed(found))
    typer.echo(f"{counted(len(found), 'ACL')} removed")


@app.command("list", cls=Command)
def list_acls(
    principal: Annotated[
        str | None,
        typer.Option(metavar="User:NAME", help="Only ACLs of this principal.", show_default=False),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only ACLs that concern this topic, by its name, by a prefix or by *.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only ACLs that concern this group.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    root: SecurityRootOption = None,
) -> None:
    """List the ACLs.

    Example: sparklog acls list --topic orders --root ./data
    """
    import msgspec

    from sparklog.security import acls
    from sparklog.security.acl import AclFilter, PatternType, ResourceType

    filters = [
        AclFilter(resource=resource, name=name, pattern=PatternType.MATCH, principal=principal)
        for resource, name in ((ResourceType.TOPIC, topic), (ResourceType.GROUP, group))
        if name is not None
    ]
    state = known_state(root_store(root))
    found = (
        acls.matching(state, *(filters or [AclFilter(principal=principal)]))
        if state is not None
        else frozenset()
    )
    rows = [_row(acl) for acl in sorted(found)]
    if as_json:
        objects = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        typer.echo(msgspec.json.encode(objects).decode())
        return
    print_columns([_COLUMNS, *rows])


_COLUMNS: Final = ("resource", "name", "pattern", "principal", "permission", "operation", "host")


def _row(acl: Acl) -> tuple[str, ...]:
    return (
        acl.resource.name,
        acl.name,
        acl.pattern.name,
        acl.principal,
        acl.permission.name,
        acl.operation.name,
        acl.host,
    )


# ------------------------------------------------------------------------------ selection


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Operations on resources, as the command line names them.

    Raises a usage error for options that contradict each other.
    """

    allow: bool
    operations: Collection[str]
    producer: bool
    consumer: bool
    topics: Collection[str]
    groups: Collection[str]
    transactional_ids: Collection[str]
    cluster: bool
    prefixed: bool

    def __post_init__(self) -> None:
        if self.prefixed and "*" in (*self.topics, *self.groups, *self.transactional_ids):
            raise typer.BadParameter("* is every name: pass it without --prefixed")
        if not (self.producer or self.consumer):
            return
        if self.operations or not self.allow:
            raise typer.BadParameter(
                "--producer and --consumer stand for operations that are allowed: pass them without"
                " --operation and --deny"
            )
        if self.producer and not (self.topics or self.transactional_ids):
            raise typer.BadParameter("--producer needs --topic or --transactional-id")
        if self.consumer and not (self.topics and self.groups):
            raise typer.BadParameter("--consumer needs --topic and --group")
        is_unused = (
            self.cluster,
            self.groups and not self.consumer,
            self.transactional_ids and not self.producer,
        )
        if any(is_unused):
            raise typer.BadParameter(
                "--producer is for topics and transactional ids, and --consumer for topics and"
                " groups: other resources need --operation"
            )

    @property
    def has_resources(self) -> bool:
        return bool(self.topics or self.groups or self.transactional_ids or self.cluster)

    def resources(self) -> Iterator[tuple[ResourceType, str]]:
        """Yields the type and the name of each resource."""
        from sparklog.security.acl import CLUSTER_NAME, ResourceType

        for resource, names in (
            (ResourceType.TOPIC, self.topics),
            (ResourceType.GROUP, self.groups),
            (ResourceType.TRANSACTIONAL_ID, self.transactional_ids),
            (ResourceType.CLUSTER, [CLUSTER_NAME] if self.cluster else []),
        ):
            for name in names:
                yield resource, name

    def pattern_of(self, resource: ResourceType) -> PatternType:
        """Returns the pattern type for the names of resources of a type."""
        from sparklog.security.acl import PatternType, ResourceType

        is_prefix = self.prefixed and resource is not ResourceType.CLUSTER
        return PatternType.PREFIXED if is_prefix else PatternType.LITERAL

    def operations_on(self, resource: ResourceType) -> list[Operation]:
        """Returns the operations on resources of a type; none if the command line names none."""
        from sparklog.security.acls import CONSUMER, PRODUCER

        return [
            *map(_operation, self.operations),
            *(PRODUCER.get(resource, ()) if self.producer else ()),
            *(CONSUMER.get(resource, ()) if self.consumer else ()),
        ]

    @property
    def permission(self) -> Permission:
        from sparklog.security.acl import Permission

        return Permission.ALLOW if self.allow else Permission.DENY


def _operation(text: str) -> Operation:
    """Parses `describe-configs`, or as Kafka's tools write it, `DescribeConfigs`."""
    from sparklog.security.acl import Operation

    def plain(name: str) -> str:
        return name.replace("-", "").replace("_", "").lower()

    known = {plain(each.name): each for each in Operation if each is not Operation.ANY}
    found = known.get(plain(text))
    if found is None:
        names = ", ".join(each.name.lower().replace("_", "-") for each in known.values())
        raise typer.BadParameter(f"there is no operation {text!r}; the operations are {names}")
    return found


def _note_lack_of_effect(known: SecurityState | None, principal: str) -> None:
    """Prints why ACLs that were added may have no effect."""
    from sparklog.security.acl import ANONYMOUS, ANYONE
    from sparklog.security.state import NO_USERS, Mode

    state = known or NO_USERS
    name = principal.partition(":")[2]
    if principal not in (ANYONE, ANONYMOUS) and name not in state.users:
        typer.echo(f"sparklog: there is no user {name} yet", err=True)
    if state.policy.mode is not Mode.ENFORCE:
        how = "`sparklog security enforce` does so"
        typer.echo(f"sparklog: ACLs are not enforced yet; {how}", err=True)
