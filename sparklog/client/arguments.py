"""Arguments as programs give them, checked before anything is done with them.

Each function returns the value in the one type that the code behind it takes, or raises `BadOption`
with the argument's name, the value, and what was expected. numpy's numbers count as numbers; True
and False do not.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sparklog import errors
from sparklog.record import check_topic_name


def whole(option: str, value: Any, *, least: int | None = None) -> int:
    """An integer, from `least` up."""
    bound = "" if least is None else f" from {least} up"
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise _bad(option, value, f"expected an int{bound}") from None
    if least is not None and found < least:
        raise _bad(option, value, f"expected an int{bound}")
    return found


def number(
    option: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    may_be_infinite: bool = False,
) -> float:
    """An int or float that is no NaN, from `least` up or `above` a bound."""
    bound = "" if least is None else f" from {least:g} up"
    if above is not None:
        bound = f" above {above:g}"
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if (
        not is_number
        or math.isnan(value)
        or (math.isinf(value) and not (may_be_infinite and value > 0))
        or (least is not None and value < least)
        or (above is not None and value <= above)
    ):
        raise _bad(option, value, f"expected a number{bound}")
    return float(value)


def timeout(option: str, value: Any) -> float | None:
    """Seconds to wait; None: as long as it takes. What is over already is 0."""
    if value is None or value == math.inf:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or math.isnan(value):
        raise _bad(option, value, "expected a number of seconds, or None")
    return max(float(value), 0.0)


def flag(option: str, value: Any) -> bool:
    """True or False, and nothing that only counts as one."""
    if not isinstance(value, bool):
        raise _bad(option, value, "expected True or False")
    return value


def text(option: str, value: Any) -> str:
    """A str of one character or more."""
    if not isinstance(value, str) or not value:
        raise _bad(option, value, "expected a str that is not empty")
    return value


def texts(option: str, value: Any) -> list[str]:
    """Several strs; one alone is not taken for its characters."""
    what = "expected a list of str"
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise _bad(option, value, what)
    found = list(value)
    if not all(isinstance(one, str) for one in found):
        raise _bad(option, found, what)
    return found


def function(option: str, value: Any) -> Any:
    """Something that can be called, or None."""
    if value is not None and not callable(value):
        raise _bad(option, value, "expected a function, or None")
    return value


def mapping(option: str, value: Any, what: str) -> Mapping[Any, Any]:
    """`what`: its shape, for the error."""
    if not isinstance(value, Mapping):
        raise _bad(option, value, f"expected a dict, {what}")
    return value


def partition(option: str, value: Any) -> int:
    """The number of a partition."""
    return whole(option, value, least=0)


def topic(value: Any) -> str:
    """The name of a topic; whether there is one, the broker knows. Raises `BadTopicName`."""
    return value if isinstance(value, str) else check_topic_name(value)


def topic_partition(option: str, value: Any) -> tuple[str, int]:
    """`(topic, partition)`."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], str):
        raise _bad(option, value, "expected (topic, partition), such as ('orders', 0)")
    return value[0], partition(option, value[1])


def each(option: str, value: Any, check: Callable[[str, Any], Any], what: str) -> list[Any]:
    """Every one of several values, as `check` returns it."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise _bad(option, value, f"expected {what}")
    return [check(option, one) for one in value]


def _bad(option: str, value: Any, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=_shown(value), reason=reason)


def _shown(value: Any) -> Any:
    """Errors travel as JSON, so what is no value of JSON is told by its looks."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
