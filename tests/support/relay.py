"""A TCP relay in front of a port, so that a test can break or stall connections like a network."""

from __future__ import annotations

import contextlib
import socket
import threading

_PIECE_BYTES = 64 * 1024


class Relay:
    """Passes bytes between `address` and a port of this machine, until it is stopped."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._acceptor = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._acceptor.start()

    def cut(self) -> None:
        """Breaks all connections; new ones are accepted."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Stops passing bytes, like a frozen peer."""
        self._flowing.clear()

    def let_flow(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        """Breaks all connections, and refuses new ones."""
        self.let_flow()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._sockets |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._pump, args=(source, sink), name="relay", daemon=True
                    ).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                self._flowing.wait()
                sink.sendall(piece)
        # Either end closes both, and the other pump ends with them.
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sockets.discard(source)
        source.close()
