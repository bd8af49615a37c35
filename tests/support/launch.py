"""`python -m MODULE …`, forked from the server of preloaded programs that the environment names.

Spark starts its Python processes by this program (`spark_variables`), and pages of the
documentation the command line (`fences`). It waits for the program that it has started, which ends
with it. Without a server, or for a script, it becomes an ordinary Python. It imports little,
because it is started often.
"""

import os
import signal
import socket
import sys

STANDARD_FILES = [0, 1, 2]


def request(connection: socket.socket, files: list[int], **program: object) -> None:
    """Asks a server for a program: see `preloaded.Request`, and `files` for its standard files."""
    import json

    data = json.dumps(program).encode()
    message = len(data).to_bytes(4, "big") + data
    sent = socket.send_fds(connection, [message], files)
    connection.sendall(message[sent:])


def main() -> None:
    """Exits as the program does."""
    arguments = sys.argv[1:]
    try:
        words = arguments[arguments.index("-m") + 1 :]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ["PRELOADED"])
    except (KeyError, OSError, ValueError):
        os.execv(sys.executable, [sys.executable, *arguments])
    cwd, environment = os.getcwd(), dict(os.environ)  # noqa: PTH109
    request(connection, STANDARD_FILES, words=words, cwd=cwd, environment=environment, is_tied=True)
    for file in STANDARD_FILES:
        os.close(file)  # ours would keep pipes open that the program closes
    lines = connection.recv(64)
    pid = int(lines.split()[0])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    while part := connection.recv(64):
        lines += part
    status = int(lines.split()[-1])
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
