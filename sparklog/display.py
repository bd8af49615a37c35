"""Numbers in words, and HTML tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def counted(number: int, one: str, many: str = "") -> str:
    """Returns a number of things in words: `1 record`, `2,000 records`.

    `many`: the plural; by default `one` with an s.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def html_table(caption: str, heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a caption and a table; all text is escaped, integers get thousands separators.

    Args:
        caption: shown in bold above the table.
        heading: the title of each column.
        rows: a value for each column; None is shown as a dash.
    """
    lines = [
        "<tr>" + "".join(f"<th>{html.escape(each)}</th>" for each in heading) + "</tr>",
        *("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows),
    ]
    return f"<b>{html.escape(caption)}</b><table>{''.join(lines)}</table>"


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align: right">{value:,}</td>'
    return f"<td>{'–' if value is None else html.escape(str(value))}</td>"
