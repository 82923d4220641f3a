"""A PostgreSQL server of its own on loopback, from the binaries that the machine has (Debian: postgresql)."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nautile.common.processes import free_port

PASSWORD = "planted/5772156649@01532"  # with what an address has to encode
DATABASE = "PREFECT_SERVER_DATABASE_"


def binary(name: str) -> str | None:
    """The path of a program of PostgreSQL's: Debian keeps those of a server in a folder of their own."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))


@contextmanager
def postgres() -> Iterator[dict[str, str]]:
    """The settings by which Prefect's server finds it, the password as PREFECT_SERVER_DATABASE_PASSWORD.

    It refuses to run as root, who starts it as `nobody` then.
    """
    initdb, server = binary("initdb"), binary("postgres")
    assert initdb
    assert server
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        folder, port = Path(name), free_port()
        (folder / "password").write_text(PASSWORD, encoding="utf-8")
        (folder / "data").mkdir(mode=0o700)
        if user:
            for path in (folder, folder / "password", folder / "data"):
                shutil.chown(path, user)
        access = ["--username=prefect", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"]
        command = [initdb, "--pgdata", str(folder / "data"), "--no-sync", "--encoding=UTF8", "--locale=C", *access]
        subprocess.run(command, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with (folder / "log").open("wb") as log:
            command = [server, "-D", str(folder / "data"), *options]
            process = subprocess.Popen(command, user=user, cwd=folder, stdout=log, stderr=log)
        try:
            where = ["--host=127.0.0.1", f"--port={port}", "--username=prefect", "--dbname=postgres", "--timeout=60"]
            ready = subprocess.run([binary("pg_isready") or "", *where], check=False, stdout=subprocess.DEVNULL)
            while ready.returncode and process.poll() is None:
                ready = subprocess.run(ready.args, check=False, stdout=subprocess.DEVNULL)
            assert process.poll() is None, (folder / "log").read_text()
            yield {
                f"{DATABASE}DRIVER": "postgresql+asyncpg",
                f"{DATABASE}HOST": "127.0.0.1",
                f"{DATABASE}PORT": str(port),
                f"{DATABASE}USER": "prefect",
                f"{DATABASE}NAME": "postgres",
                f"{DATABASE}PASSWORD": PASSWORD,
            }
        finally:
            process.send_signal(signal.SIGINT)  # does not wait for clients that stay
            process.wait(60)
