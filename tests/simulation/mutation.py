"""A deliberate mistake in the real code, and the world that brings it to light."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.simulation.faults import Rates
from tests.simulation.puts import NO_BUDGET
from tests.simulation.world import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A mistake, and the world that brings it to light."""

    name: str
    patches: tuple[tuple[Any, str, Any], ...]
    """(owner, attribute, replacement)."""
    rates: Rates
    aim: str = ""
    profile: tuple[tuple[str, Any], ...] = ()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target, attribute, value in self.patches:
                stack.enter_context(mock.patch.object(target, attribute, value))
            yield

    def change(self, profile: Profile) -> Profile:
        """Returns the profile with this mutation's rates and other requirements.

        It has no mirror, no query of a topic that is deleted, no brief brokers, no budget of
        puts and no typed columns unless the mutation requires them, and segments only on a local
        disk.
        """
        usual = {
            "has_mirror": False,
            "is_rewritten": False,
            "is_brief": False,
            "puts_per_second": NO_BUDGET,
            "own_interval_ms": "",
            "typed": (),
        }
        required: dict[str, Any] = {**usual, **dict(self.profile)}
        if not required.get("is_local", profile.is_local):
            required["segment_blocks"] = 0
        return dataclasses.replace(profile, rates=self.rates, aim=self.aim, **required)
