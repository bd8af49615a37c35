"""The end of a mirror: the last records, the groups' offsets, and topics that accept records.

Each step inspects both sides and needs nothing from the steps before, so a stopped cutover can be
run again. A topic that is no longer a mirror and has all the records of its source is cut over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sparklog import errors
from sparklog.clock import Clock, SystemClock
from sparklog.display import counted
from sparklog.formats.topic_names import MIRROR_SOURCE
from sparklog.jobs.mirroring.groups import GroupOffsets
from sparklog.jobs.mirroring.plan import Pair, goal_of, named
from sparklog.jobs.mirroring.rounds import Mirror
from sparklog.jobs.mirroring.sides import Source, Target
from sparklog.jobs.running import echo

_LOOK_SECONDS: Final = 0.2
_REPORT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Times of a cutover, in seconds."""

    quiet_seconds: float
    """The source counts as stopped after this long without a new record."""
    wait_seconds: float
    """The longest wait for that, and for consumers to stop."""


class Cutover:
    """One run."""

    def __init__(
        self,
        mirror: Mirror,
        source: Source,
        target: Target,
        groups: GroupOffsets,
        patience: Patience,
        clock: Clock | None = None,
    ) -> None:
        self._mirror = mirror
        self._source = source
        self._target = target
        self._groups = groups
        self._patience = patience
        self._clock = clock or SystemClock()

    def run(self) -> list[str]:
        """Returns the names of the topics in the target.

        Raises `BadRequest` if topics cannot be cut over, and `TimedOut` if the source does not come
        to rest, both before any mirror has ended; and `BadRequest` after that, if the source has
        received more records.
        """
        echo("1. copy what the source has")
        self._mirror.once()
        self._check()
        echo("2. stop the producers now, and consumers once they have read everything")
        pairs = self._at_rest()
        echo("3. copy the offsets of groups")
        outcome = self._mirror.patiently(lambda: self._groups.copy(pairs))
        for title, names in (
            ("copied", outcome.copied),
            ("with offsets beyond the end of a partition, which are not copied", outcome.ahead),
        ):
            if names:
                echo(f"   {title}: {', '.join(names)}")
        if outcome.refused:
            listed = "; ".join(f"{name}: {why}" for name, why in outcome.refused.items())
            raise errors.BadRequest(
                reason=f"the target does not accept the offsets of groups ({listed}): stop their"
                " members there, and run the cutover again"
            )
        echo("4. end the mirror")
        ends = goal_of(pairs)
        for pair in pairs:
            self._target.log.alter(pair.name, {MIRROR_SOURCE: None})
        self._check_source(pairs, ends)
        if self._mirror.cut_over:
            echo(
                f"   no longer mirrors before this run: {', '.join(self._mirror.cut_over)}; they"
                " have at least as many offsets as their sources"
            )
        return sorted([*(pair.name for pair in pairs), *self._mirror.cut_over])

    def _check(self) -> None:
        if self._mirror.faults:
            listed = "; ".join(f"{topic}: {why}" for topic, why in self._mirror.faults.items())
            raise errors.BadRequest(reason=f"no cutover: {listed}")

    def _at_rest(self) -> list[Pair]:
        """Copies until the source is quiet, the target is complete, and no consumer is left."""
        began = self._clock.monotonic()
        quiet_since, reported = began, began
        seen: Mapping[str, Mapping[int, int]] = {}
        while True:
            pairs = self._mirror.patiently(self._mirror.prepared)
            self._check()
            now = self._clock.monotonic()
            ends = goal_of(pairs)
            if ends != seen:
                seen, quiet_since = ends, now
            reason = self._restless(pairs, now - quiet_since)
            if reason is None:
                return pairs
            if now - began >= self._patience.wait_seconds:
                raise errors.TimedOut(
                    what=f"the cutover ({reason})", timeout_seconds=self._patience.wait_seconds
                )
            if now - reported >= _REPORT_SECONDS:
                echo(f"   waiting: {reason}")
                reported = now
            if any(pair.lag for pair in pairs):
                self._mirror.once(ends)
            else:
                self._clock.sleep(_LOOK_SECONDS)

    def _restless(self, pairs: Sequence[Pair], quiet_seconds: float) -> str | None:
        lag = sum(pair.lag for pair in pairs)
        if lag:
            return f"{counted(lag, 'record is', 'records are')} to be copied"
        for pair in pairs:
            if pair.source.leaderless:
                return f"{named(pair.source.leaderless)} no leader in {pair.topic}"
        if quiet_seconds < self._patience.quiet_seconds:
            return "producers may still write"
        marks = self._source.high_watermarks(pair.source for pair in pairs)
        for pair in pairs:
            for number, bounds in pair.source.partitions.items():
                if marks.get((pair.topic, number), bounds.end) > bounds.end:
                    return f"a transaction is open in {pair.topic}-{number}, or records arrive"
        active = self._mirror.patiently(lambda: self._groups.copy(pairs)).active
        return f"groups have members at the source: {', '.join(active)}" if active else None

    def _check_source(self, pairs: Sequence[Pair], ends: Mapping[str, Mapping[int, int]]) -> None:
        """Raises `BadRequest` if the source has received records that the target lacks."""
        now = self._source.topics(pair.topic for pair in pairs)
        late = [
            f"{topic}-{number} from {ends[topic].get(number, 0)} up to {bounds.end}"
            for topic, each in now.items()
            for number, bounds in each.partitions.items()
            if bounds.end > ends[topic].get(number, 0)
        ]
        if late:
            raise errors.BadRequest(
                reason="producers wrote to the source after its end was copied, so the target"
                f" lacks these offsets: {', '.join(late)}"
            )
