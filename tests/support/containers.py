"""The files of deploy/, parsed: the image, the Compose services, the Kubernetes objects."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support import fences
from tools import dist

DEPLOY: Final = fences.ROOT / "deploy"
DOCKERFILE: Final = DEPLOY / "Dockerfile"
COMPOSE: Final = DEPLOY / "compose.yaml"
MANIFESTS: Final = DEPLOY / "kubernetes"
PAGE: Final = fences.ROOT / "docs" / "guides" / "containers.md"


# ------------------------------------------------------------------------------ the image


def instructions(name: str) -> list[str]:
    """The arguments of all instructions of that name, in order."""
    return dist.instructions(DOCKERFILE.read_text("utf-8"), name)


def environment() -> dict[str, str]:
    """The variables that the image sets."""
    _, found, _ = dist.image_commands(DOCKERFILE.read_text("utf-8"))
    return found


def pip_line() -> list[str]:
    """The words of the command that installs the package."""
    found, _, _ = dist.image_commands(DOCKERFILE.read_text("utf-8"))
    return found


def extra() -> str:
    """The extra that the image installs."""
    found = re.search(r"\[(\w+)\]", pip_line()[-1])
    assert found is not None
    return found[1]


# ------------------------------------------------------------------------------ Compose


@cache
def compose() -> dict[str, Any]:
    """The parsed Compose file."""
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))
    return found


def brokers() -> dict[str, dict[str, Any]]:
    """The Compose services that are brokers, by name."""
    services = compose()["services"]
    return {name: each for name, each in services.items() if name.startswith("broker")}


def published(service: dict[str, Any]) -> dict[int, int]:
    """Host ports by container port; asserts that all of them are on loopback."""
    ports = [each.split(":") for each in service["ports"]]
    assert {host for host, _, _ in ports} == {"127.0.0.1"}
    return {int(inner): int(outer) for _, outer, inner in ports}


# ------------------------------------------------------------------------------ Kubernetes


@cache
def manifests() -> dict[tuple[str, str], Any]:
    """All objects by kind and name."""
    found: dict[tuple[str, str], Any] = {}
    for path in manifest_files():
        for each in yaml.safe_load_all(path.read_text("utf-8")):
            key = each["kind"], each["metadata"]["name"]
            assert key not in found, key
            found[key] = each
    return found


def manifest_files() -> list[Path]:
    """The files of Kubernetes objects, whose folder is applied by `kubectl apply --filename`."""
    return sorted(MANIFESTS.iterdir())


def pod() -> dict[str, Any]:
    """The template of a broker's pod."""
    found: dict[str, Any] = manifests()["StatefulSet", "sparklog"]["spec"]["template"]
    return found


def container() -> dict[str, Any]:
    """The container of a broker's pod."""
    (found,) = pod()["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment_of(ordinal: int, *, namespace: str, zone: str) -> dict[str, str]:
    """A pod's variables, as Kubernetes computes them: `$(NAME)` refers to one defined earlier."""
    fields = {
        "metadata.name": f"sparklog-{ordinal}",
        "metadata.namespace": namespace,
        "metadata.labels['topology.kubernetes.io/zone']": zone,
    }
    given = environment() | manifests()["ConfigMap", "sparklog"]["data"]
    own: dict[str, str] = {}
    for each in container()["env"]:
        if "valueFrom" in each:
            own[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            own[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], each["value"])
    return given | own


# ------------------------------------------------------------------------------ variables


def unknown_variables(given: Mapping[str, str]) -> set[str]:
    """Variables that are named like settings but are not, even if a broker ignores them."""
    with (fences.ROOT / "conf" / "broker.toml").open("rb") as file:
        shipped = tomllib.load(file)
    known = {
        f"SPARKLOG_{'_'.join(path)}".upper()
        for top, entry in shipped.items()
        for path in ([(top, key) for key in entry] if isinstance(entry, dict) else [(top,)])
    }
    return {
        name
        for name in given
        if name.startswith("SPARKLOG_")
        and not name.startswith("SPARKLOG_STORAGE_")
        and name not in known
    }


def without_settings(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that have no effect on a broker."""
    return {
        name: value for name, value in given.items() if not name.startswith(("SPARKLOG_", "AWS_"))
    }
