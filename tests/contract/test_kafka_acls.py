"""A broker without access control says so as a Kafka does that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from tests.support.kafkas import broker, frames

DESCRIBE_ACLS = 29
ANY = 1


@pytest.mark.parametrize("resource_type", [ANY, 2, 77])
def test_access_control_is_disabled(tmp_path: Path, resource_type: int) -> None:
    """DescribeAcls replies SECURITY_DISABLED: MirrorMaker then continues without ACLs."""
    fields = {
        "resource_type_filter": resource_type,
        "resource_name_filter": None,
        "pattern_type_filter": ANY,
        "principal_filter": None,
        "host_filter": None,
        "operation": ANY,
        "permission_type": ANY,
    }
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        for version in (1, 2, 3):
            answer = client.ask(DESCRIBE_ACLS, version, fields)
            assert answer.error_code is ErrorCode.security_disabled
            assert answer.error_message == "No Authorizer is configured on the broker"
            assert answer.resources == ()
