"""An S3-compatible server (moto) in this process, behind a real socket, and a proxy that breaks connections to it.

`python -m tests.support.servers.object_store ROOT` uploads everything in the store at ROOT, so that a test can kill it.
"""

import logging
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def object_store() -> Iterator[str]:
    """The address of a running server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def bucket() -> str:
    """A new bucket at the server that the environment names."""
    import s3fs

    name = f"nautile-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(name)
    return name


class CuttingProxy:
    """A proxy that passes `bytes_through` bytes to the server, then drops that connection and every later one."""

    def __init__(self, address: str, bytes_through: int) -> None:
        host, port = address.removeprefix("http://").split(":")
        self._behind = (host, int(port))
        self.left = bytes_through
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def restore(self) -> None:
        """Drop no more connections."""
        self.left = sys.maxsize

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._behind)
            for source, target, counted in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=(source, target, counted), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        try:
            while block := source.recv(2**14):
                if counted:
                    self.left -= len(block)
                if self.left <= 0:
                    break
                target.sendall(block)
        except OSError:
            pass
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def main(root: str) -> None:
    from nautile.store.mirror import open_store

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    store = open_store(root)
    store.push_all()
    sys.stdout.write(f"sent by {os.getpid()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
