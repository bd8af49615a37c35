"""The Flight port by h2spec, which knows HTTP/2's rules, and by a client that speaks no gRPC.

h2spec is for RFC 7540; RFC 9113 has taken its place. Go brings it, as far as its settings let it;
where there is no Go, the test says so.
"""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import pytest

from sparklog.broker.agent import Agent
from tests.support.flights import BrokerClient
from tests.support.golang import built

PATIENCE_SECONDS: Final = 240.0
_CASE_SECONDS: Final = 4
"""For each case, on a machine that does much else."""

NOT_APPLICABLE: Final = {
    (
        "http2/4.2",
        "Sends a DATA frame with 2^14 octets in length",
    ): "it sends as much as the largest frame may have, 4 MiB, in a window of 64 KiB",
    (
        "http2/5.1.2",
        "Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded",
    ): "no limit of streams is announced: they are bounded for all clients together",
    (
        "http2/5.3.1",
        "Sends HEADERS frame that depend on itself",
    ): "RFC 9113 has no dependencies of streams any more (5.3.2)",
    (
        "http2/5.3.1",
        "Sends PRIORITY frame that depend on itself",
    ): "RFC 9113 has no dependencies of streams any more (5.3.2)",
}


@pytest.mark.soak(mode="clients")
@pytest.mark.timeout(900)
def test_h2spec(agent: Agent, tmp_path: Path) -> None:
    """Every case of its sections generic, http2 and hpack, but for those that do not apply."""
    program = built(tmp_path, "flight", "github.com/summerwind/h2spec/cmd/h2spec")
    report = tmp_path / "report.xml"
    host, _, port = agent.address.rpartition(":")
    limits = ["-o", str(_CASE_SECONDS), "-j", str(report)]
    done = subprocess.run(
        [str(program), "-h", host, "-p", port, *limits, "generic", "http2", "hpack"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    cases = [
        ((case.get("package", ""), case.get("classname", "")), case)
        for case in ET.parse(report).getroot().iter("testcase")
    ]
    assert len(cases) > 140, done.stdout
    passed = {name for name, case in cases if not len(case)}
    assert {name for name, _ in cases} - passed == set(NOT_APPLICABLE), done.stdout
    with BrokerClient(agent.address) as door:
        door.create()


def test_curl(agent: Agent) -> None:
    """An HTTP/2 client learns the purpose of the port from any request, and disturbs no other
    client.
    """
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    version = subprocess.run([curl, "--version"], capture_output=True, text=True, check=True)
    if "HTTP2" not in version.stdout:
        pytest.skip("curl speaks no HTTP/2")

    usual = ["-sS", "-m", "20", "--http2-prior-knowledge", "-w", "%{stderr}%{http_code}"]

    def asked(*options: str, data: bytes = b"") -> tuple[int, str]:
        done = subprocess.run(
            [curl, *usual, *options, f"http://{agent.address}/"],
            input=data,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return int(done.stderr.split()[-1]), done.stdout.decode()

    assert asked()[0] == 405
    assert "Arrow Flight" in asked()[1]
    assert asked("-I")[0] == 405
    status, text = asked("-H", "content-type: text/plain", "--data-binary", "@-", data=b"a" * 10)
    assert (status, "Arrow Flight" in text) == (415, True)
    large = bytes(3_000_000)
    # Some curls take it for an error that a server wants no more of an upload (RFC 9113, 8.1).
    assert asked("-H", "content-type: a/b", "--data-binary", "@-", data=large)[0] in (0, 415)
    with BrokerClient(agent.address) as door:
        door.create()
