"""`nautile serve CHECKPOINT`: the command around the server. It listens on loopback unless told otherwise.

SIGTERM and Ctrl-C end it in good order: no new connections, what is under way has `--grace` seconds to come to its end.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from common.errors import ConfigError
from data.tokenizer import tokenizer_for
from flows.cli.inspect import checkpoint_folder
from flows.serve.http import Served, application
from model.compile_cache import enable_compile_cache
from model.decoding.engine import Engine
from model.weights.files import load_weights
from store.mirror import open_store

logger = logging.getLogger(__name__)
LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class Serving:
    """How to serve. `key_env` names the environment variable that holds the key clients must show."""

    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 16
    queue: int = 128
    name: str | None = None
    key_env: str | None = None
    grace: float = 30.0


def serve(checkpoint: str | None, serving: Serving, tell: Callable[[str], None]) -> None:
    """Serve until a signal comes. `tell` gets a line with the address once clients can connect.

    Raises ConfigError for a checkpoint that cannot be read, an address that cannot be had, or a key that is not there.
    """
    key = _key(serving.key_env)
    folder = checkpoint_folder(checkpoint)
    store = open_store()
    if store.root.exists():
        enable_compile_cache(store.root / "compiled")
    params, model, tokenizer_config = load_weights(folder)
    tokenizer = tokenizer_for(tokenizer_config)
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(
            f"{folder}: config.json pairs a tokenizer of {tokenizer.vocabulary} ids with a model of "
            f"{model.vocabulary} rows; the checkpoint belongs to another tokenizer"
        )
    stops = (tokenizer.im_end, tokenizer.end_of_text)
    engine = Engine(params, model, stops, tokenizer.think_end, serving.slots, serving.queue)
    name = serving.name or _name(folder)
    listening = _listen(serving.host, serving.port)
    host, port = listening.getsockname()[:2]
    application_ = application(Served(name, int(time.time()), tokenizer, engine, key))
    config = uvicorn.Config(
        application_, log_level="warning", access_log=False, timeout_graceful_shutdown=max(1, round(serving.grace)),
        server_header=False, lifespan="on",
    )  # fmt: skip
    shown = f"[{host}]" if ":" in host else host
    tell(f"serving {name} at http://{shown}:{port}/v1 ({serving.slots} slots, {serving.queue} may wait)")
    if key is None and not serving.host.startswith(LOOPBACK):
        tell(f"anyone who reaches {host} can use it: --key-env asks clients for a key")
    # uvicorn raises the signal again once it has ended in good order; without a handler that would kill us after all.
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listening])


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError(f"--key-env {name}: the environment holds no such key; set it, or leave the option out")
    return os.environ[name]


def _name(folder: Path) -> str:
    """An artifact by its id, any other folder by its name."""
    resolved = folder.resolve()
    if (resolved / "manifest.json").is_file():
        return f"{resolved.parent.name}/{resolved.name[:12]}"
    return resolved.name


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error}); name another") from None
    listening.set_inheritable(True)
    return listening
