"""Options by name: one that nobody knows is refused, with the nearest that exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from sparklog import errors


def check_options(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises `UnknownOption` for the first name of `given` that is not in `known`.

    Args:
        where: who was given the options, as the error shall call it: `producer()`.
    """
    names = sorted(known)
    for option in given:
        if option not in names:
            nearest = difflib.get_close_matches(option, names, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; it has {', '.join(names)}"
            raise errors.UnknownOption(where=where, option=option, hint=hint)
