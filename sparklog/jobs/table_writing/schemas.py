"""Checks the schemas of a Delta table and a job: names that Delta rejects, types that differ.

Columns are matched case-insensitively, as Delta does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparklog import errors
from sparklog.formats.values.ddl import is_usable
from sparklog.formats.values.inference import Kind
from sparklog.sources.values import json_type

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def check_names(wanted: StructType, found: StructType) -> None:
    """Raises `WrongSchema` if Delta would reject the name of a field that is new to `found`."""
    known = _types(found)
    names = [field.name.lower() for field in wanted]
    for field in wanted:
        name = field.name.lower()
        if names.count(name) > 1 or not (name in known or is_usable(name)):
            raise errors.WrongSchema(
                reason=f"The field {field.name!r} of --schema cannot be a column: its name occurs"
                " twice, differs from another only in case, or has a character that Delta"
                " refuses."
            )
        _check_names_in(field.dataType, known.get(name))


def _check_names_in(wanted: DataType, found: DataType | None) -> None:
    """Checks the names of structs, which may be in arrays and maps."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(wanted, StructType):
        check_names(wanted, found if isinstance(found, StructType) else StructType([]))
    elif isinstance(wanted, ArrayType):
        element = found.elementType if isinstance(found, ArrayType) else None
        _check_names_in(wanted.elementType, element)
    elif isinstance(wanted, MapType):
        known = found if isinstance(found, MapType) else None
        _check_names_in(wanted.keyType, known and known.keyType)
        _check_names_in(wanted.valueType, known and known.valueType)


def check_readable(fields: StructType) -> None:
    """Raises `BadOption` if a field has a type that JSON values cannot be read as."""
    try:
        json_type(fields)
    except errors.BadOption as error:  # it names the Spark source's option
        raise errors.BadOption(
            option="--schema", value=error.value, reason=str(error.reason)
        ) from None


def other_case(fields: DataType, found: Kind, path: str = "") -> tuple[str, str] | None:
    """Returns a field and the objects' name for it if they differ in case only; None if none does.

    Names in JSON are case-sensitive, as in Spark's `from_json`.
    """
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(fields, ArrayType) and isinstance(found, list):
        return other_case(fields.elementType, found[0], path)
    if not (isinstance(fields, StructType) and isinstance(found, dict)):
        return None
    names = {name.lower(): name for name in found}
    for field in fields:
        name = names.get(field.name.lower())
        if name is not None and field.name not in found and name not in fields.names:
            return f"{path}{field.name}", f"{path}{name}"
        inside = other_case(field.dataType, found.get(field.name), f"{path}{field.name}.")
        if inside is not None:
            return inside
    return None


def check_fits(found: StructType, wanted: StructType, path: str = "") -> None:
    """Raises `WrongSchema` if a field of `wanted` has a different type in `found`."""
    known = _types(found)
    for field in wanted:
        if (kind := known.get(field.name.lower())) is not None:
            _check_type(f"{path}{field.name}", kind, field.dataType)


def with_fields_of(schema: StructType, other: StructType) -> StructType:
    """Returns the schema, plus the fields of `other` that it lacks."""
    from pyspark.sql.types import StructType

    known = _types(schema)
    return StructType([*schema, *(each for each in other if each.name.lower() not in known)])


def _types(schema: StructType) -> dict[str, DataType]:
    return {field.name.lower(): field.dataType for field in schema}


def _check_type(path: str, found: DataType, wanted: DataType) -> None:
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(found, StructType) and isinstance(wanted, StructType):
        check_fits(found, wanted, f"{path}.")
    elif isinstance(found, ArrayType) and isinstance(wanted, ArrayType):
        _check_type(f"{path}[]", found.elementType, wanted.elementType)
    elif isinstance(found, MapType) and isinstance(wanted, MapType):
        _check_type(f"{path}{{}}", found.valueType, wanted.valueType)
    elif found != wanted:
        raise errors.WrongSchema(
            reason=f"The table's column {path} is {found.simpleString().upper()}, and the job's is"
            f" {wanted.simpleString().upper()}. Use the table's type in --schema."
        )


def has_fields(found: DataType, wanted: DataType) -> bool:
    """Returns whether `found` has all fields of `wanted`, whose types fit."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(found, StructType) and isinstance(wanted, StructType):
        known = _types(found)
        return all(
            (kind := known.get(each.name.lower())) is not None and has_fields(kind, each.dataType)
            for each in wanted
        )
    if isinstance(found, ArrayType) and isinstance(wanted, ArrayType):
        return has_fields(found.elementType, wanted.elementType)
    if isinstance(found, MapType) and isinstance(wanted, MapType):
        return has_fields(found.valueType, wanted.valueType)
    return True
