"""Runs the notebooks and writes their results into them: `python -m tools.notebooks [NAME …]`.

Each one runs from top to bottom in a new folder. Standard error is left out: it has the log of
Spark's start, with the paths of the machine.
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
    """Runs all cells in `folder`, and keeps their results in `notebook`.

    Raises `nbclient.exceptions.CellExecutionError` for the first cell that fails.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPARKLOG_")},
        "SPARKLOG_ROOT": str(folder / "root"),
        "PYTHONPATH": str(FOLDER.parent),
        # A debugger, which is not used here, warns about frozen modules.
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with tempfile.TemporaryDirectory() as sockets:
        client = nbclient.NotebookClient(
            notebook,
            # Not TCP, whose ports another process may take before the kernel does.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            kernel_name="python3",
            timeout=RUN_SECONDS,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which would differ each time
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]


def main() -> None:
    """The program."""
    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    chosen = sys.argv[1:] or known
    if unknown := set(chosen) - set(known):
        sys.exit(f"no notebook is named {', '.join(sorted(unknown))}; choose of {', '.join(known)}")
    for name in chosen:
        print(name, flush=True)
        path = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            run(notebook, Path(folder))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
