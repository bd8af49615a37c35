"""`sparklog quotas`: how much clients may do in a second, as `kafka-configs.sh` has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog.cli.security_root import (
    SecurityRootOption,
    change_state,
    check_place,
    known_state,
    root_store,
)
from sparklog.terminal.commands import Command, ExitCode
from sparklog.terminal.options import JsonOption, YesOption, confirm
from sparklog.terminal.printing import print_columns

if TYPE_CHECKING:
    from sparklog.security.quota import QuotaEntity

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Set, remove and list quotas: how much clients of brokers may do in a second.",
)

DEFAULT: Final = "<default>"
_UserOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"A user; {DEFAULT} is every user without a quota of its own.",
        show_default=False,
    ),
]
_ClientIdOption = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help=f"A client id, alone or of the user; {DEFAULT} is every other.",
        show_default=False,
    ),
]
_IpOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help=f"An IP address; {DEFAULT} is every other.",
        show_default=False,
    ),
]


@app.command("set", cls=Command)
def set_quotas(
    user: _UserOption = None,
    client_id: _ClientIdOption = None,
    ip: _IpOption = None,
    producer_byte_rate: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes of produce requests in a second, at each broker.",
            show_default=False,
        ),
    ] = None,
    consumer_byte_rate: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES", help="Bytes of records that are read in a second.", show_default=False
        ),
    ] = None,
    controller_mutation_rate: Annotated[
        float | None,
        typer.Option(
            metavar="PARTITIONS",
            help="Partitions that are created or deleted in a second.",
            show_default=False,
        ),
    ] = None,
    connection_creation_rate: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="New Kafka connections of an address in a second.",
            show_default=False,
        ),
    ] = None,
    root: SecurityRootOption = None,
) -> None:
    """Set quotas of a user, of a client id, of both together, or of an address.

    Of several quotas, the most specific one applies: that of the user and the client id, of the
    user, and of the client id, each before its default. Quotas that are not named stay.

    Example: sparklog quotas set --user alice --producer-byte-rate 1000000
    """
    from sparklog.security.quotas import changed

    given = {
        "producer_byte_rate": producer_byte_rate,
        "consumer_byte_rate": consumer_byte_rate,
        "controller_mutation_rate": controller_mutation_rate,
        "connection_creation_rate": connection_creation_rate,
    }
    values = {key: float(value) for key, value in given.items() if value is not None}
    if not values:
        raise typer.BadParameter("no quota is named: pass --producer-byte-rate, for example")
    entity = _entity(user, client_id, ip)
    change = changed(entity, values)
    store = root_store(root)
    check_place(store, known_state(store))
    change_state(store, change)
    for key, value in values.items():
        typer.echo(f"{entity}: {key} {value:,.12g}")


@app.command(cls=Command)
def remove(
    user: _UserOption = None,
    client_id: _ClientIdOption = None,
    ip: _IpOption = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this quota, such as producer_byte_rate; repeat it for more.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    root: SecurityRootOption = None,
) -> None:
    """Remove quotas of a user, of a client id, of both together, or of an address.

    Example: sparklog quotas remove --user alice --root ./data
    """
    from sparklog.security.quotas import changed

    entity = _entity(user, client_id, ip)
    if key:
        changed(entity, dict.fromkeys(key))  # refuses names that no quota has
    store = root_store(root)
    state = known_state(store)
    known = state.quotas.get(entity, {}) if state is not None else {}
    found = {each.value: value for each, value in known.items() if not key or each.value in key}
    if not found:
        typer.echo("sparklog: there is no such quota; `sparklog quotas list` shows all", err=True)
        raise typer.Exit(ExitCode.FAILED)
    for name, value in found.items():
        typer.echo(f"{entity}: {name} {value:,.12g}")
    if not yes:
        confirm("Remove?")
    change_state(store, changed(entity, dict.fromkeys(found)))
    typer.echo("removed")


@app.command("list", cls=Command)
def list_quotas(as_json: JsonOption = False, root: SecurityRootOption = None) -> None:
    """List the quotas.

    Example: sparklog quotas list --root ./data
    """
    import msgspec

    state = known_state(root_store(root))
    quotas = state.quotas if state is not None else {}
    found = [
        ({kind: name or DEFAULT for kind, name in entity.parts.items()}, key.value, value)
        for entity, values in quotas.items()
        for key, value in values.items()
    ]
    if as_json:
        objects = [{**parts, "quota": key, "value": value} for parts, key, value in found]
        typer.echo(msgspec.json.encode(objects).decode())
        return
    kinds = ("user", "client-id", "ip")
    rows = [
        (*(parts.get(kind, "-") for kind in kinds), key, f"{value:.12g}")
        for parts, key, value in found
    ]
    print_columns([(*kinds, "quota", "value"), *sorted(rows)])


def _entity(user: str | None, client_id: str | None, ip: str | None) -> QuotaEntity:
    from sparklog.security.quotas import entity_of

    given = {"user": user, "client-id": client_id, "ip": ip}
    parts = {
        kind: None if name == DEFAULT else name for kind, name in given.items() if name is not None
    }
    if not parts:
        raise typer.BadParameter("no entity is named: pass --user, --client-id or --ip")
    return entity_of(parts)
