"""Requests with an unknown outcome, which may have taken effect."""

from __future__ import annotations

from sparklog.errors.base import SparklogError


class OutcomeUnknown(SparklogError):
    """The request may or may not have taken effect: check before you repeat it."""

    code = "outcome_unknown"
    template = (
        "The outcome of {what} is unknown, because no response arrived: {reason}. It may have taken"
        " effect; check before you repeat it."
    )
    what: str
    reason: str


class StillSending(OutcomeUnknown):
    """Records are not acked yet, and are still being sent: wait for the same future again."""

    code = "still_sending"
    template = (
        "Not acked within {timeout_seconds} s: {what}. The producer is still sending. Wait for the"
        " same future again, or flush again; sending the record again writes it twice."
    )
    timeout_seconds: float | None
    what: str
    reason: str = "no response has arrived yet"
