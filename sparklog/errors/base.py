"""Base of all errors, the four kinds, and the transfer of an error to another process."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, dataclass_transform

_SENTENCE_ENDS: Final = ".?…"
_DOUBLE_STOP: Final = re.compile(rf"(?<![./])([{_SENTENCE_ENDS}])\.(?= |$)")
"""The end of a reason that is itself a sentence, followed by the message's full stop."""

_DOUBLE_STOPS: Final = tuple(f"{end}." for end in _SENTENCE_ENDS)

_Error = TypeVar("_Error", bound="SparklogError")


@dataclass_transform(kw_only_default=True, eq_default=False)
class SparklogError(Exception):
    """Base of all failures.

    The annotated names of a class are its facts: both keyword arguments of the constructor and
    attributes. They are JSON values. A peer that runs another release may send others.
    """

    __module__ = "sparklog.errors"
    code: ClassVar[str] = ""
    template: ClassVar[str] = "{reason}"
    needs_proof: ClassVar[bool] = False
    """True if the error implies that the client is ahead of the broker. A broker that has been
    replaced would raise it wrongly, so a broker first proves that it leads
    (`broker/leader_metadata.py`)."""

    if TYPE_CHECKING:  # the constructor takes the annotated names

        @property
        def facts(self) -> dict[str, Any]:
            """All facts, by name."""

    else:

        def __init__(self, **facts: Any) -> None:
            self.facts = {**self._defaults, **facts}
            self.__dict__.update(self.facts)
            message = self.template.format(**self.facts)
            if any(stops in message for stops in _DOUBLE_STOPS):  # rare, and the regex is slow
                message = _DOUBLE_STOP.sub(r"\1", message)
            super().__init__(message)

    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: vars(cls)[name] for name in inspect.get_annotations(cls) if name in vars(cls)}
        cls._defaults = {**cls._defaults, **own}
        if cls.__module__.startswith(f"{__package__}."):
            cls.__module__ = __package__  # users import it from there, and tracebacks show that

    def __reduce__(self) -> tuple[Any, ...]:
        return (revive, (self.code, self.facts))


class UnexpectedError(SparklogError):
    """A failure without a class of its own, or of a class that this release lacks."""

    code = "error"
    reason: str


class Retriable(SparklogError):
    """The request had no effect, and may succeed later: send it again."""

    code = "retriable"


class Invalid(SparklogError, ValueError):
    """The request is wrong and had no effect: correct it, since repeating it does not help."""

    code = "invalid"


class Fenced(SparklogError):
    """A newer broker, producer or member has taken over: stop."""

    code = "fenced"


class Corrupt(SparklogError):
    """Stored data differs from the data that was written: a person must inspect it."""

    code = "corrupt"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the name in `known` that is most similar to `name`; None if none is similar."""
    names = {each.lower(): each for each in sorted(known)}
    nearest = difflib.get_close_matches(name.lower(), names, n=1)
    return names[nearest[0]] if nearest else None


def bare(error: _Error) -> _Error:
    """Returns the error without its traceback, cause and context.

    They refer to the frames that raised it, which in turn refer to a rejected batch and its decoded
    form. A frame that refers to the error completes a cycle, which Python frees late.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def all_codes(root: type[SparklogError]) -> dict[str, type[SparklogError]]:
    """Returns `root` and all its subclasses, by code."""
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= all_codes(child)
    return found


def revive(code: str, facts: dict[str, Any]) -> SparklogError:
    """Returns the error that a peer reported; an unknown code keeps its facts as text."""
    known = all_codes(SparklogError).get(code, UnexpectedError)
    try:
        return known(**facts)
    except (KeyError, IndexError):
        return UnexpectedError(reason=f"{code}: {facts}")
