"""The number of rows of a Parquet file to decode at a time, according to their size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow.parquet as pq

from sparklog import limits

FILE_BATCH_BYTES = 8 * limits.MIB  # of rows that are read at a time; Arrow uses 6 × as much

_DICTIONARY_BYTES: Final = 2 * limits.MIB
"""A larger column chunk is more than just a dictionary, which writers limit to 1 MiB."""
_DICTIONARY_ROWS: Final = 2_048


def light_rows(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    """Returns how many rows of the row groups fit in `FILE_BATCH_BYTES`; at least one.

    Estimated from their average encoded size, except for a column that is all dictionary, since a
    thousand rows may refer to one value of a megabyte. There, each row counts as the whole column
    chunk, but the result stays large enough to be worth reading.
    """
    found = [metadata.row_group(number) for number in groups]
    size_bytes = sum(group.total_byte_size for group in found)
    rows = sum(group.num_rows for group in found)
    light = FILE_BATCH_BYTES * rows // max(size_bytes, 1)
    for group in found:
        for index in range(group.num_columns):
            column = group.column(index)
            size = column.total_uncompressed_size
            if column.has_dictionary_page and size <= _DICTIONARY_BYTES and _may_be_large(column):
                most = FILE_BATCH_BYTES // max(size, 1)
                light = min(light, max(most, _DICTIONARY_ROWS))
    return max(light, 1)


def _may_be_large(column: pq.ColumnChunkMetaData) -> bool:
    """Returns whether the column holds bytes and is not `key` (a dictionary in our files)."""
    return bool(column.physical_type == "BYTE_ARRAY" and column.path_in_schema != "key")
