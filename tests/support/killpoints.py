"""Points on a batch's way into a topic at which a process is killed, once each.

A folder names them: `armed/<point>@<victim>` is moved to `met/` by the first process that reaches
the point, which then kills the victim. The processes are a Spark driver, its Python workers and a
broker; a `sitecustomize` on their path installs the points, without changes to their code.

| point | reached by | when |
|---|---|---|
| planned | the planner of a stream | a batch is planned, but no task has started |
| staged | a task | its rows are staged, but no other process knows |
| undecided | the committer | all tasks have staged, but there is no manifest |
| decided | the committer | the manifest exists, but the broker has not been asked |
| asked | the broker | it has been asked, but has done nothing |
| appended | the broker | the batch is durable, but the answer has not been sent |
| answered | the committer | the answer has arrived, but Spark does not know yet |
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tests.support import preloaded

_FOLDER: Final = "KILLPOINTS"
_DRIVER: Final = "KILLPOINTS_DRIVER"
_REPOSITORY: Final = Path(__file__).parents[2]
_ARM: Final = "from tests.support import killpoints\n\nkillpoints.arm({!r})\n"


class KillPoints:
    """The points under `folder`, for a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for state in ("armed", "met"):
            (folder / state).mkdir(parents=True)

    def environment(self, of: str) -> dict[str, str]:
        """Returns the environment for processes of `spark`, or for the `broker`."""
        site = self._folder / of
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(_ARM.format(of))
        path = [str(site), str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            _FOLDER: str(self._folder),
            "PYTHONPATH": os.pathsep.join(path),
            **preloaded.NONE,  # hooks do not run for modules already imported
        }

    def arm(self, point: str, victim: str) -> None:
        """Arms the point: the next process there kills `driver`, or itself (`worker`, `broker`)."""
        (self._folder / "armed" / f"{point}@{victim}").touch()

    def was_met(self, point: str, victim: str) -> bool:
        return (self._folder / "met" / f"{point}@{victim}").exists()


# ------------------------------------------------------------------------------ in the processes


def be_driver() -> None:
    """Names this process as the driver to all processes that it starts from now on."""
    os.environ[_DRIVER] = str(os.getpid())


def arm(kind: str) -> None:
    """Installs the points in this process, in each of their modules that it imports."""
    hooks = _OF_SPARK if kind == "spark" else _OF_BROKER
    sys.meta_path.insert(0, _Hooks(hooks))


class _Hooks(MetaPathFinder):
    """Calls a hook with its module once that has been imported; most processes need none."""

    def __init__(self, hooks: Mapping[str, Callable[[Any], None]]) -> None:
        self._hooks = dict(hooks)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        hook = self._hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_hook(module: ModuleType) -> None:
            execute(module)
            hook(module)

        loader.exec_module = execute_and_hook
        return spec


def _on_liveness(liveness: Any) -> None:
    """Makes a sink wait for the killed broker instead of starting its own in its place."""
    alive, dead = liveness.LeaderState.ALIVE, liveness.LeaderState.DEAD
    liveness.state_of = lambda leader, **_: dead if leader.stopped else alive


def _on_tasks(tasks: Any) -> None:
    _wrap(tasks, "pack_in_order", after="planned")


def _on_manifest(manifest: Any) -> None:
    _wrap(manifest.StagingWriter, "finish", after="staged")
    _wrap(manifest, "write", before="undecided", after="decided")


def _on_connection(connection: Any) -> None:
    _wrap(connection.Connection, "action", after="answered", only="batches.append_staged")


def _on_staged(staged: Any) -> None:
    _wrap(staged.StagedBatches, "append", before="asked", after="appended")


_OF_SPARK: Final = {
    "sparklog.sources.tasks": _on_tasks,
    "sparklog.storage.staging.manifest": _on_manifest,
    "sparklog.storage.metadata.liveness": _on_liveness,
    "sparklog.client.connection": _on_connection,
}
_OF_BROKER: Final = {"sparklog.broker.staged": _on_staged}


def _wrap(
    owner: Any,
    name: str,
    *,
    before: str | None = None,
    after: str | None = None,
    only: str | None = None,
) -> None:
    """Wraps a function with points; `only`: just for calls with this argument."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*args: Any, **options: Any) -> Any:
        counts = only is None or only in args
        if before is not None and counts:
            _come_to(before)
        found = real(*args, **options)
        if after is not None and counts:
            _come_to(after)
        return found

    setattr(owner, name, wrapped)


def _come_to(point: str) -> None:
    folder = Path(os.environ[_FOLDER])
    for victim in ("driver", "worker", "broker"):
        name = f"{point}@{victim}"
        try:
            (folder / "armed" / name).rename(folder / "met" / name)
        except FileNotFoundError:
            continue
        if victim == "driver":
            os.killpg(int(os.environ[_DRIVER]), signal.SIGKILL)
            os.killpg(os.getpgrp(), signal.SIGKILL)  # Spark's workers have their own group
        os.kill(os.getpid(), signal.SIGKILL)
