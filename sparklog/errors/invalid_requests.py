"""Requests and options that are wrong regardless of the topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sparklog.errors.base import Invalid, nearest_name

_FEW_OPTIONS: Final = 24
"""The largest number of options that an error lists."""


class BadRequest(Invalid):
    """The request is malformed: correct it."""

    code = "bad_request"
    template = "{reason}"
    reason: str


class GroupRefused(Invalid):
    """The group's coordinator rejects a request; `error` is Kafka's name for the reason."""

    code = "group_refused"
    needs_proof = True
    template = "Group {group!r} refuses the request: {error}{hint}."
    group: str
    error: str
    hint: str


class UnknownOption(Invalid):
    """An option or a setting does not exist: correct its name."""

    code = "unknown_option"
    template = "There is no option {option!r} in {where}.{hint}"
    option: str
    where: str
    hint: str

    @classmethod
    def among(cls, where: str, option: str, known: Iterable[str]) -> UnknownOption:
        """Returns the error with the most similar option in `known`; if none, with all, if few."""
        names = sorted(known)
        nearest = nearest_name(option, names)
        if nearest is not None:
            hint = f" Did you mean {nearest!r}?"
        elif len(names) <= _FEW_OPTIONS:
            hint = f" Known options: {', '.join(names)}."
        else:
            hint = ""
        return cls(where=where, option=option, hint=hint)


class BadOption(Invalid):
    """The value of an option or a setting is invalid: correct it."""

    code = "bad_option"
    template = "Invalid option {option} = {value!r}: {reason}."
    option: str
    value: Any
    reason: str


class NotAuthorized(Invalid):
    """No ACL allows a principal what it has asked for, or one denies it."""

    code = "not_authorized"
    template = (
        "{principal} at {host} is not allowed to {operation} {resource} {name!r};"
        " `sparklog acls list` shows the ACLs that apply."
    )
    principal: str
    host: str
    operation: str
    resource: str
    name: str


class TopicNotAuthorized(NotAuthorized):
    """An operation on a topic is not allowed, whether the topic exists or not."""

    code = "topic_not_authorized"


class GroupNotAuthorized(NotAuthorized):
    """An operation on a consumer group is not allowed, whether the group exists or not."""

    code = "group_not_authorized"


class ClusterNotAuthorized(NotAuthorized):
    """An operation on the whole cluster is not allowed."""

    code = "cluster_not_authorized"


class TokenOutOfScope(NotAuthorized):
    """The token of a task only reads records, whatever ACLs allow its user."""

    code = "token_out_of_scope"
    template = (
        "The token of this task only reads records of its topics, so it does not permit"
        " {principal} at {host} to {operation} {resource} {name!r}: log in as a user for that."
    )


class NotAuthenticated(Invalid):
    """A login has failed, or a call needs one; `reason` says why."""

    code = "not_authenticated"
    template = "The broker does not accept this client: {reason}."
    reason: str


class UnknownCredential(Invalid):
    """A user has no credential for a mechanism, or does not exist."""

    code = "unknown_credential"
    template = (
        "The user {user!r} does not exist, or has no credential for {mechanism};"
        " `sparklog users list` shows the users."
    )
    user: str
    mechanism: str


class NotInstalled(Invalid):
    """Packages of an extra are not installed; `hint` says how to install them."""

    code = "not_installed"
    template = "Packages needed for {what} are not installed ({missing}): {hint}."
    what: str
    missing: str | None
    hint: str
