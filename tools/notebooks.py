"""Runs the notebooks and saves their results in them: `python -m tools.notebooks [NAME …]`.

Each one runs from top to bottom in a new folder. Standard error is dropped: it contains Spark's
startup log, with paths of this machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import nbclient
import nbformat
from traitlets.config import Config

FOLDER: Final = Path(__file__).resolve().parents[1] / "notebooks"
RUN_SECONDS: Final = 300


def run(notebook: Any, folder: Path) -> None:
    """Runs all cells in `folder`, and stores their results in `notebook`.

    Raises `nbclient.exceptions.CellExecutionError` for the first cell that fails.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPARKLOG_")},
        "SPARKLOG_ROOT": str(folder / "root"),
        "PYTHONPATH": str(FOLDER.parent),
        # Silences the debugger, which is not used here, but warns about frozen modules.
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with tempfile.TemporaryDirectory() as sockets:
        client = nbclient.NotebookClient(
            notebook,
            # Not TCP: another process may bind the port before the kernel does.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            kernel_name="python3",
            timeout=RUN_SECONDS,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # timestamps, which differ in each run
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]


def main() -> None:
    """Runs the named notebooks, or all."""
    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    chosen = sys.argv[1:] or known
    if unknown := set(chosen) - set(known):
        sys.exit(f"no notebook named {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    for name in chosen:
        print(name, flush=True)
        path = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            run(notebook, Path(folder))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
