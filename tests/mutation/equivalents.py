"""The mutations that no test can notice, with the reason of each.

An entry of equivalent.toml has a reason, and one or more places: module, function, and how the text
reads before and after. A place is matched by text, without regard to lines and spaces, so it holds
while code around it moves; one whose code has changed is an error: its reason has to be thought
over.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.mutation.operators import Mutation

_PLACE = Path(__file__).with_name("equivalent.toml")
_Key: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalents:
    """Why a mutation changes nothing that can be seen, by what it changes."""

    reasons: dict[_Key, str]

    @classmethod
    def read(cls, path: Path = _PLACE) -> Equivalents:
        """Reads the list; KeyError where an entry lacks a part."""
        reasons = {}
        for each in tomllib.loads(path.read_text()).get("equivalent", ()):
            for at in each["at"]:
                key = _key(at["module"], at["function"], at["before"], at["after"])
                reasons[key] = " ".join(each["why"].split())
        return cls(reasons=reasons)

    def reason(self, module: str, mutation: Mutation) -> str:
        """Returns why a mutation is not counted; empty where it counts."""
        return self.reasons.get(_key_of(module, mutation), "")

    def unknown(self, mutations: Iterable[tuple[str, Mutation]]) -> list[str]:
        """Returns the entries that none of `mutations` fits."""
        known = {_key_of(module, mutation) for module, mutation in mutations}
        return [f"{key[0]} {key[1]}: {key[2]}" for key in self.reasons if key not in known]


def _key_of(module: str, mutation: Mutation) -> _Key:
    return _key(module, mutation.function, mutation.before, mutation.after)


def _key(module: str, function: str, before: str, after: str) -> _Key:
    return (module, function, " ".join(before.split()), " ".join(after.split()))
