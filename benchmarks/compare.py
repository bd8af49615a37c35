"""Measurements that compare our figure with another system's in the same run."""

from __future__ import annotations

import math

from sparklog.bench.report import Measurement, Times


def faster(
    name: str,
    rows: int,
    ours_seconds: float,
    theirs_seconds: float | None,
    *,
    least: float,
    than: str,
) -> Measurement:
    """Returns our speed as a multiple of that of `than`; without theirs, our speed alone."""
    ours = rows / ours_seconds
    target = f"≥ {least:g} × {than}"
    if theirs_seconds is None:
        return Measurement(
            name=name, value=_rate(ours), target=target, detail=f"no {than} to compare"
        )
    theirs = rows / theirs_seconds
    return Measurement(
        name=name,
        value=f"{ours / theirs:.2f} ×",
        target=target,
        met=ours >= least * theirs,
        detail=f"{_rate(ours)}, {than} {_rate(theirs)}",
    )


def _rate(rows_per_second: float) -> str:
    return f"{rows_per_second / 1e6:.2f} M rows/s"


def sooner(
    name: str, ours: Times, theirs: Times | None, *, most: dict[float, float], than: str
) -> Measurement:
    """Returns our time as a multiple of that of `than`; without theirs, our time alone.

    Args:
        most: the maximum ratio for each reported percentile; infinite for no limit.
    """
    limits = [f"p{each:g} ≤ {limit:g} ×" for each, limit in most.items() if limit < math.inf]
    target = f"{', '.join(limits)} {than}'s" if limits else ""
    if theirs is None:
        return Measurement(
            name=name, value=_ms(ours), target=target, detail=f"no {than} to compare"
        )
    ratios = {each: ours.ms(each) / theirs.ms(each) for each in most}
    return Measurement(
        name=name,
        value=", ".join(f"p{percentile:g} {ratio:.2f} ×" for percentile, ratio in ratios.items()),
        target=target,
        met=all(ratios[each] <= limit for each, limit in most.items()) if limits else None,
        detail=f"{_ms(ours)}; {than} {_ms(theirs)}",
    )


def _ms(times: Times) -> str:
    digits = 2 if times.ms(99) < 100 else 0
    return f"p50 {times.ms(50):.{digits}f}, p99 {times.ms(99):.{digits}f} ms"


def no_dearer(name: str, young: Times, old: Times, *, most: float) -> Measurement:
    """Returns the ratio of the old median to the young one."""
    first, last = young.ms(50), old.ms(50)
    return Measurement(
        name=name,
        value=f"{last / first:.2f} ×",
        target=f"≤ {most:g} ×",
        met=last <= most * first,
        detail=f"{first:.0f} ms young, {last:.0f} ms old",
    )
