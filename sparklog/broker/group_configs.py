"""Configurations of consumer groups, which are stored in the metadata (KIP-848).

A group need not exist to have one: its configuration applies from the moment it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

from sparklog import errors
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.formats import group_config
from sparklog.formats.config_rules import Edit
from sparklog.formats.group_config import GROUP_NAME_BYTES, GROUPS_WITH_CONFIG
from sparklog.limits import GROUP_CONFIGS_LEVEL
from sparklog.storage.metadata.model import ClusterMetadata

_log = structlog.get_logger("sparklog.broker")


class GroupConfigs:
    """Reads and changes them. May be called from any thread."""

    def __init__(self, metadata: LeaderMetadata) -> None:
        self._metadata = metadata

    def names(self) -> list[str]:
        """Returns the groups that have a configuration."""
        return list(self._metadata.known.groups)

    def config(self, group: str) -> Mapping[str, str]:
        """Returns the keys that are set for a group."""
        return self._metadata.known.groups.get(group, {})

    def edit(
        self,
        group: str,
        edits: Sequence[tuple[Edit, str, str | None]],
        *,
        only_checks: bool,
        client: str = "",
    ) -> None:
        """Changes individual keys by (edit, key, value), or only checks the change.

        `client` identifies the caller in the log. Raises `UnknownOption`, `BadOption`,
        `NeedsFeatureLevel`, and `BadRequest` for too many groups or too long a name.
        """
        self._change(
            group,
            lambda config: group_config.edited(config, edits),
            only_checks=only_checks,
            client=client,
        )

    def replace(
        self, group: str, config: Mapping[str, str], *, only_checks: bool, client: str = ""
    ) -> None:
        """Replaces the whole configuration. Raises what `edit` raises."""
        self._change(group, lambda _: config, only_checks=only_checks, client=client)

    def _change(
        self,
        group: str,
        change: Callable[[Mapping[str, str]], Mapping[str, str]],
        *,
        only_checks: bool,
        client: str,
    ) -> None:
        if len(group.encode()) > GROUP_NAME_BYTES:
            reason = f"a group with a configuration has a name of at most {GROUP_NAME_BYTES} bytes"
            raise errors.BadRequest(reason=reason)

        def decide(metadata: ClusterMetadata) -> ClusterMetadata | None:
            if metadata.level < GROUP_CONFIGS_LEVEL:
                raise errors.NeedsFeatureLevel(
                    what="the configuration of a group",
                    needed=GROUP_CONFIGS_LEVEL,
                    level=metadata.level,
                )
            known = metadata.groups
            config = group_config.check(change(known.get(group, {})))
            if config and group not in known and len(known) >= GROUPS_WITH_CONFIG:
                reason = (
                    f"{GROUPS_WITH_CONFIG:,} groups have a configuration, and no more are accepted:"
                    " delete the keys of groups that are no longer used"
                )
                raise errors.BadRequest(reason=reason)
            if config == known.get(group, {}):
                return None
            groups = {**known, group: config}
            if not config:
                del groups[group]
            return msgspec.structs.replace(metadata, groups=groups)

        with self._metadata.changing(f"configuration of group {group}"):
            if only_checks:
                decide(self._metadata.known)
                return
            was = self.config(group)
            now = self._metadata.change(decide).groups.get(group, {})
        changed = {key: now.get(key) for key in {**was, **now} if was.get(key) != now.get(key)}
        if changed and client:
            _log.info("altered a group", group=group, config=changed, client=client)
