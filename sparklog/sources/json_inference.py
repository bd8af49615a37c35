"""Adds the fields that `formats.values.inference` has found to a schema of Spark.

Fields that cannot be added to a Delta table are left out: those whose names contain characters that
Delta rejects, or differ from another name only in case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from sparklog.formats.values.ddl import is_usable, quoted
from sparklog.formats.values.inference import Kind

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def ddl_of(schema: StructType) -> str:
    """Returns the fields of a schema as DDL that means the same in every session."""
    return ", ".join(f"{quoted(each.name)} {_ddl_type(each.dataType)}" for each in schema)


def _ddl_type(kind: DataType) -> str:
    from pyspark.sql.types import ArrayType, MapType, StructType, TimestampType

    if isinstance(kind, TimestampType):
        return "TIMESTAMP_LTZ"  # TIMESTAMP depends on `spark.sql.timestampType`
    if isinstance(kind, StructType):
        return f"STRUCT<{ddl_of(kind)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{_ddl_type(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{_ddl_type(kind.keyType)}, {_ddl_type(kind.valueType)}>"
    return kind.simpleString()


def with_new_fields(
    schema: StructType, found: Mapping[str, Kind], reserved: Collection[str] = ()
) -> tuple[StructType, list[str]]:
    """Returns the schema with new fields appended to its structs, and the names left out.

    `reserved`: names of columns that are not fields.
    """
    left_out: list[str] = []
    return _extended(schema, found, "", {*map(str.lower, reserved)}, left_out), left_out


def _extended(
    schema: StructType, found: Mapping[str, Kind], path: str, taken: set[str], left_out: list[str]
) -> StructType:
    from pyspark.sql.types import StructField, StructType

    known = {field.name: field for field in schema}
    taken |= {name.lower() for name in known}
    fields = []
    for field in schema:
        kind = found.get(field.name)
        widened = _widened(field.dataType, kind, f"{path}{field.name}", left_out)
        fields.append(StructField(field.name, widened, field.nullable))
    for name in sorted(found.keys() - known.keys()):
        new = _spark_type(found[name], f"{path}{name}", left_out)
        if new is None:
            continue
        if name.lower() in taken or not is_usable(name):
            left_out.append(f"{path}{name}")
            continue
        taken.add(name.lower())
        fields.append(StructField(name, new))
    return StructType(fields)


def _widened(old: DataType, found: Kind, path: str, left_out: list[str]) -> DataType:
    """Returns a known type extended by the new fields of its objects."""
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(old, StructType) and isinstance(found, dict):
        return _extended(old, found, f"{path}.", set(), left_out)
    if isinstance(old, ArrayType) and isinstance(found, list):
        return ArrayType(_widened(old.elementType, found[0], path, left_out), old.containsNull)
    return old


def _spark_type(kind: Kind, path: str, left_out: list[str]) -> DataType | None:
    """Returns the type of a new field; None if its values do not determine one."""
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, dict):
        found = _extended(StructType([]), kind, f"{path}.", set(), left_out)
        return found if found.fields else None
    if isinstance(kind, list):
        element = _spark_type(kind[0], path, left_out)
        return None if element is None else ArrayType(element)
    return None if kind is None else _spark_types()[kind]


def _spark_types() -> dict[str, DataType]:
    from pyspark.sql import types

    return {
        "BOOLEAN": types.BooleanType(),
        "BIGINT": types.LongType(),
        "DOUBLE": types.DoubleType(),
        "STRING": types.StringType(),
    }
