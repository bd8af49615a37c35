"""`python -m MODULE …`, forked from the server of preloaded programs that the environment names.

Spark starts its Python processes through this program (`spark_variables`), documentation pages the
command line (`fences`), and forked programs the brokers that they start. It waits for the program
that it has started and exits with its status; if it is killed, so is the program. Without a server,
for a script, or with files open besides the standard ones, it becomes an ordinary Python. It
imports little, because it is started often.
"""

import os
import signal
import socket
import sys

STANDARD_FILES = [0, 1, 2]


def request(connection: socket.socket, files: list[int], **program: object) -> None:
    """Asks a server to start a program (`preloaded.Request`) with `files` as its standard files."""
    import json

    data = json.dumps(program).encode()
    message = len(data).to_bytes(4, "big") + data
    sent = socket.send_fds(connection, [message], files)
    connection.sendall(message[sent:])


def main() -> None:
    """Exits as the program does."""
    arguments = sys.argv[1:]
    files = [int(each) for each in os.listdir("/proc/self/fd")]  # noqa: PTH208
    try:
        if len(files) > len(STANDARD_FILES) + 1:  # the one of the folder
            raise ValueError("a server takes no other files")
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
    code = os.waitstatus_to_exitcode(int(lines.split()[-1]))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
