"""Links of Markdown files, as a repository host such as GitHub follows them.

A link is a path relative to the folder of its file; an anchor names a heading of the file at that
path. Code and links to other hosts are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_FENCE: Final = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK: Final = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^)\s]+)\)")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:")
_HEADING: Final = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
_SHOWN: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_EMPHASIS: Final = re.compile(r"(?<!\w)(\*{1,3}|_{1,3})(?=\S)(.+?)(?<=\S)\1(?!\w)")
_NOT_IN_SLUG: Final = re.compile(r"[^\w\- ]")


def dead_links(page: Path, root: Path) -> list[str]:
    """Returns the links of a page that lead to no file, folder or heading below `root`."""
    return [
        f"{page.relative_to(root)}: {link}" for link in _links(page) if not _leads(page, link, root)
    ]


def slug(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading, unless a heading above has the same one."""
    pieces = re.split(r"(`[^`]*`)", _SHOWN.sub(r"\1", heading))
    text = "".join(each if each[:1] == "`" else _EMPHASIS.sub(r"\2", each) for each in pieces)
    return _NOT_IN_SLUG.sub("", text.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Returns the anchors of all headings of a file."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def _links(page: Path) -> Iterator[str]:
    text = _CODE.sub("", _FENCE.sub("", page.read_text("utf-8")))
    return (link for link in _LINK.findall(text) if not _SCHEME.match(link))


def _leads(page: Path, link: str, root: Path) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / unquote(path)).resolve() if path else page
    if not target.is_relative_to(root.resolve()) or not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and anchor in anchors(target.read_text("utf-8")))
