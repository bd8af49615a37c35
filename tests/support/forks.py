"""Work in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable


def said_in_child(work: Callable[[], object]) -> str:
    """Returns the result or the error of `work` in a forked child, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said
