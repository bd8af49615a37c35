"""Checks of the arguments that programs pass, made before a call has any effect.

Each check returns the value as the single type that the code behind it expects, or raises
`BadOption` with the argument's name, the value and the expected form. numpy's numbers count as
numbers; True and False do not.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from sparklog import errors
from sparklog.formats.topic_names import check_topic_name

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def suggests_keywords(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes the TypeError for an unknown keyword name the nearest parameter of `function`."""
    known = [
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is not each.POSITIONAL_ONLY and name != "self"
    ]

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name not in known:
                nearest = difflib.get_close_matches(name.lower(), known, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}"
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}; {hint}"
                )
        return function(*args, **kwargs)

    return call


def whole(option: str, value: Any, *, least: int | None = None) -> int:
    """An integer of at least `least`."""
    bound = "" if least is None else f" of at least {least}"
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
    """An int or float, not NaN, of at least `least` or greater than `above`."""
    bound = "" if least is None else f" of at least {least:g}"
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
    """Seconds to wait, at least 0; None: no limit."""
    if value is None or value == math.inf:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or math.isnan(value):
        raise _bad(option, value, "expected a number of seconds, or None")
    return max(float(value), 0.0)


def flag(option: str, value: Any) -> bool:
    """True or False; other truthy and falsy values are rejected."""
    if not isinstance(value, bool):
        raise _bad(option, value, "expected True or False")
    return value


def text(option: str, value: Any) -> str:
    """A non-empty str."""
    if not isinstance(value, str) or not value:
        raise _bad(option, value, "expected a non-empty str")
    return value


def texts(option: str, value: Any) -> list[str]:
    """A list of strs; a single str is rejected rather than split into its characters."""
    what = "expected a list of str"
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise _bad(option, value, what)
    found = list(value)
    if not all(isinstance(one, str) for one in found):
        raise _bad(option, found, what)
    return found


def function(option: str, value: Any) -> Any:
    """A callable, or None."""
    if value is not None and not callable(value):
        raise _bad(option, value, "expected a function, or None")
    return value


def mapping(option: str, value: Any, what: str) -> Mapping[Any, Any]:
    """A mapping; `what` is its shape, for the error."""
    if not isinstance(value, Mapping):
        raise _bad(option, value, f"expected a dict, {what}")
    return value


def partition(option: str, value: Any) -> int:
    """The number of a partition."""
    return whole(option, value, least=0)


def topic(value: Any) -> str:
    """The name of a topic, which need not exist. Raises `BadTopicName`."""
    return value if isinstance(value, str) else check_topic_name(value)


def topic_partition(option: str, value: Any) -> tuple[str, int]:
    """`(topic, partition)`."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], str):
        raise _bad(option, value, "expected (topic, partition), such as ('orders', 0)")
    return value[0], partition(option, value[1])


def each(option: str, value: Any, check: Callable[[str, Any], Any], what: str) -> list[Any]:
    """A list of values, each as `check` returns it."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise _bad(option, value, f"expected {what}")
    return [check(option, one) for one in value]


def _bad(option: str, value: Any, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=_shown(value), reason=reason)


def _shown(value: Any) -> Any:
    """The value in JSON's types, since errors are sent as JSON; the `repr` of any other type."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
