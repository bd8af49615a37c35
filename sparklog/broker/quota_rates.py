"""Rates that quotas limit, measured as Kafka measures them; pure, with the time as an argument.

A rate is counted in samples of one second, and is that of the last eleven (`SampledStat`, `Rate`
and `QuotaUtils.throttleTime`). A token bucket allows the same at once, and throttles for the same
time once it is overdrawn, but forgets nothing (KIP-599). The numbers are Kafka's defaults of
`quota.window.num` and `quota.window.size.seconds`.

`Rates` holds a bounded number of them. A rate that nothing has been counted in for a whole window
holds no information, and makes room first. A bucket with a debt stays, but keeps no others.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, Protocol, TypeVar

SAMPLES: Final = 11
SAMPLE_MS: Final = 1_000
WINDOW_MS: Final = SAMPLES * SAMPLE_MS
WHOLE_SAMPLES: Final = SAMPLES - 1
"""The samples of a rate that are always complete; the last one is being filled."""
LONGEST_MS: Final = 2**53
"""The longest throttle that is computed: that of a very low quota is not finite."""
_EXAMINED: Final = 8
"""The number of rates that are examined to make room for another."""


class Sampled(Protocol):
    """A rate, or a bucket."""

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether a new one would do the same."""


class Rate:
    """A rate over the last `SAMPLES` seconds."""

    __slots__ = ("_samples", "_total")

    def __init__(self) -> None:
        self._samples: list[list[int]] = []
        """[first time in ms, last time in ms, count], oldest first."""
        self._total = 0

    def add(self, count: int, now_ms: int) -> None:
        """Counts. A negative count takes back an earlier one."""
        samples = self._samples
        if not samples or now_ms - samples[-1][0] >= SAMPLE_MS:
            samples.append([now_ms, now_ms, 0])
            if len(samples) > SAMPLES + 1:
                self._total -= samples.pop(0)[2]
        samples[-1][1] = now_ms
        samples[-1][2] += count
        self._total += count

    def per_second(self, now_ms: int) -> float:
        """Returns the rate."""
        self._expire(now_ms)
        return self._total / self._span_ms(now_ms) * 1e3

    def throttle_ms(self, limit: float, now_ms: int) -> int:
        """Returns for how long nothing may be counted until the rate is the limit; 0 if it is not
        above it.
        """
        rate = self.per_second(now_ms)
        if rate <= limit:
            return 0
        return round(min((rate - limit) / limit * self._span_ms(now_ms), LONGEST_MS))

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether nothing was counted within the window."""
        self._expire(now_ms)
        return not self._samples

    def _expire(self, now_ms: int) -> None:
        while self._samples and now_ms - self._samples[0][1] >= WINDOW_MS:
            self._total -= self._samples.pop(0)[2]

    def _span_ms(self, now_ms: int) -> int:
        """Returns the time that the samples cover, at least `WHOLE_SAMPLES` whole ones."""
        elapsed_ms = now_ms - self._samples[0][0] if self._samples else 0
        lacking = max(WHOLE_SAMPLES - elapsed_ms // SAMPLE_MS, 0)
        return max(elapsed_ms + lacking * SAMPLE_MS, 1)


class TokenBucket:
    """Tokens that a request may take while there are any; their number may become negative."""

    __slots__ = ("_limit", "_seconds", "_tokens", "_updated_ms", "_version")

    def __init__(self, seconds: int = SAMPLES) -> None:
        """`seconds`: the time in which an empty bucket becomes full."""
        self._seconds = seconds
        self._version = 0
        self._limit = 0.0
        self._tokens = 0.0
        self._updated_ms = 0

    def follow(self, version: int, limit: float) -> None:
        """Forgives a debt, if another version of the quotas has another limit."""
        if version != self._version:
            self._version = version
            if limit != self._limit:
                self._tokens = max(self._tokens, 0.0)

    def tokens(self, limit: float, now_ms: int) -> float:
        """Returns the tokens, of which `limit` are added in a second; a new bucket is full."""
        burst = limit * self._seconds
        if not self._limit:
            self._tokens = burst
        added = limit * (now_ms - self._updated_ms) / 1e3
        self._tokens = min(burst, self._tokens + added)
        self._limit, self._updated_ms = limit, now_ms
        return self._tokens

    def take(self, count: float, limit: float, now_ms: int) -> None:
        """Takes tokens, even if there are fewer."""
        self._tokens = self.tokens(limit, now_ms) - count

    def throttle_ms(self, limit: float, now_ms: int) -> int:
        """Returns the time until the number is not negative."""
        return max(round(min(-self.tokens(limit, now_ms) / limit * 1e3, LONGEST_MS)), 0)

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether it is full."""
        return not self._limit or self.tokens(self._limit, now_ms) >= self._limit * self._seconds


class ByteRate:
    """Bytes under a quota: a bucket that decides, and the rate for the metrics."""

    __slots__ = ("bucket", "rate")

    def __init__(self) -> None:
        self.bucket = TokenBucket(WHOLE_SAMPLES)
        self.rate = Rate()

    def add(self, size_bytes: int, limit: float, now_ms: int) -> None:
        """Counts bytes. A negative size takes back an earlier one."""
        self.bucket.take(size_bytes, limit, now_ms)
        self.rate.add(size_bytes, now_ms)

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether a new one would do the same."""
        return self.bucket.is_idle(now_ms) and self.rate.is_idle(now_ms)


_Group = TypeVar("_Group", bound=Hashable)
_SampledT = TypeVar("_SampledT", bound=Sampled)


class Rates(Generic[_Group, _SampledT]):
    """Rates by a group, such as a user, and a name that clients may invent."""

    def __init__(
        self, make: Callable[[], _SampledT], *, most: int, most_of_group: int, evicts: bool = False
    ) -> None:
        """Creates an empty table.

        Args:
            make: returns a new rate.
            most: the number of rates with a name.
            most_of_group: the number of those in one group.
            evicts: in a full table, a new rate replaces the one that was not used for longest;
                otherwise the names that have none share one of their group.
        """
        self._make = make
        self._most = most
        self._most_of_group = most_of_group
        self._evicts = evicts
        self._named: OrderedDict[tuple[_Group, str], _SampledT] = OrderedDict()
        """The latest used last."""
        self._names: dict[_Group, OrderedDict[str, None]] = {}
        """The names of each group, in the same order."""
        self._of_groups: OrderedDict[tuple[_Group, bool], _SampledT] = OrderedDict()
        """The rates of whole groups, and those that names of a group share (True)."""

    def __len__(self) -> int:
        return len(self._named) + len(self._of_groups)

    def newest(self, most: int) -> Iterator[tuple[_Group, str | None, _SampledT]]:
        """Yields at most so many rates with their group and name, the latest used first."""
        for (group, is_shared), rate in itertools.islice(reversed(self._of_groups.items()), most):
            if not is_shared:
                yield group, None, rate
        for (group, name), rate in itertools.islice(reversed(self._named.items()), most):
            yield group, name, rate

    def of(self, group: _Group, name: str | None, now_ms: int) -> _SampledT:
        """Returns the rate of a name; of the whole group, for None."""
        if name is None:
            return self._of_group(group, is_shared=False)
        place = group, name
        rate = self._named.get(place)
        if rate is not None:
            self._note_use(place)
            return rate
        if self._is_full(group):
            self._make_room(group, now_ms)
            if self._is_full(group):
                return self._of_group(group, is_shared=True)
        self._names.setdefault(group, OrderedDict())[name] = None
        rate = self._named[place] = self._make()
        return rate

    def _is_full(self, group: _Group) -> bool:
        return len(self._named) >= self._most or self._is_group_full(group)

    def _is_group_full(self, group: _Group) -> bool:
        return len(self._names.get(group, ())) >= self._most_of_group

    def _note_use(self, place: tuple[_Group, str]) -> None:
        group, name = place
        self._named.move_to_end(place)
        self._names[group].move_to_end(name)

    def _of_group(self, group: _Group, *, is_shared: bool) -> _SampledT:
        place = group, is_shared
        rate = self._of_groups.get(place)
        if rate is None:
            if len(self._of_groups) >= self._most:
                self._of_groups.popitem(last=False)
            rate = self._of_groups[place] = self._make()
        self._of_groups.move_to_end(place)
        return rate

    def _make_room(self, group: _Group, now_ms: int) -> None:
        """Removes a rate that was not used for long, and may be forgotten, if one is found soon.

        `group`: if it is full, the rate is one of its own.
        """
        for _ in range(_EXAMINED):
            if self._is_group_full(group):
                place = group, next(iter(self._names[group]))
            else:
                place = next(iter(self._named))
            if self._evicts or self._named[place].is_idle(now_ms):
                self._remove(place)
                return
            self._note_use(place)  # so that the next ones are examined

    def _remove(self, place: tuple[_Group, str]) -> None:
        group, name = place
        del self._named[place], self._names[group][name]
        if not self._names[group]:
            del self._names[group]
