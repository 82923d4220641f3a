"""`nautile serve CHECKPOINT`: load a checkpoint and serve it over HTTP, on loopback by default.

SIGTERM and Ctrl-C shut the server down gracefully: it accepts no new connections, and open requests have `--grace`
seconds to finish.
"""

import os
import signal
import sys
import threading
import time
from typing import Annotated

import typer

from nautile.common.errors import ConfigError
from nautile.common.processes import ExitCode, collector_paused, is_loopback, listen, url_host
from nautile.flows.cli.terminal import CheckpointArgument, RuntimeOption, console_for, keep_programs
from nautile.flows.serve import QUEUE, SLOTS


def serve(
    checkpoint: CheckpointArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Default: this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Maximum number of completions in parallel.")] = SLOTS,
    queue: Annotated[int, typer.Option(min=1, help="Maximum number of waiting completions; then 429.")] = QUEUE,
    name: Annotated[
        str | None, typer.Option(help="Model name that clients use. Default: the artifact id, or the folder's name.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the API key that clients must send.")
    ] = None,
    runtime: RuntimeOption = "jax",
    grace: Annotated[float, typer.Option(min=1, help="Seconds that open requests have to finish on shutdown.")] = 30.0,
) -> None:
    """Serve a checkpoint over an OpenAI-compatible API: chat and text completions, batched across requests."""
    with collector_paused():
        import uvicorn

        from nautile.data.tokenizer import tokenizer_for
        from nautile.flows.chat import chat_engine
        from nautile.flows.cli.chat import heading
        from nautile.flows.named import checkpoint_folder
        from nautile.flows.operate.own_page import OwnPageOnly
        from nautile.flows.serve.http import ImpatientProtocol, ServedModel, application, raise_descriptor_limit
        from nautile.flows.serve.protocol import ApiError
        from nautile.model.runtimes.load import load_runtime
        from nautile.store.artifacts import checkpoint_name

    key = os.environ.get(key_env, "").strip() if key_env is not None else None
    if key == "":
        raise ConfigError(f"--key-env {key_env}: this environment variable is not set; set it, or omit the option")
    folder = checkpoint_folder(checkpoint)
    keep_programs()
    loaded = load_runtime(runtime, folder)
    model, tokenizer = loaded.config, tokenizer_for(loaded.tokenizer)
    # An id beyond the embedding would be clamped by JAX without an error, and the server would answer with nonsense.
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(
            f"{folder}: config.json pairs a tokenizer of {tokenizer.vocabulary} ids with a model of "
            f"{model.vocabulary} embedding rows; the checkpoint belongs to another tokenizer"
        )
    engine = chat_engine(loaded, slots, queue)
    name = name or checkpoint_name(folder)
    # Bound before the weights are compiled: an occupied port fails now, and port 0 has a number to print.
    listener = listen(host, port)
    address, port = listener.getsockname()[:2]
    # A page of another site must not reach it: its own name may resolve to this machine, which is then the same origin.
    guarded = OwnPageOnly(
        application(ServedModel(name, int(time.time()), tokenizer, engine, key)),
        address,
        port,
        lambda status, reason: ApiError(status, reason, code="forbidden").body(),
    )
    server_config = uvicorn.Config(
        guarded,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(grace)),
        server_header=False,
        lifespan="on",
        http=ImpatientProtocol,
    )
    raise_descriptor_limit()
    console = console_for()
    where = f"at http://{url_host(address)}:{port}/v1 ({slots} slots, {queue} may wait)"
    made = f" ({heading(folder, checkpoint_name(folder))})" if checkpoint is None else ""  # nobody has named it
    console.print(f"compiling {name}{made}, to be served {where}", soft_wrap=True)
    if key is None and not is_loopback(host):
        console.print(f"anyone who can reach {address} can use it: set an API key with --key-env", soft_wrap=True)

    def announce() -> None:
        engine.ready.wait()
        console.print(f"serving {name} {where}", soft_wrap=True)

    threading.Thread(target=announce, daemon=True).start()
    server = uvicorn.Server(server_config)
    # After its shutdown uvicorn raises the signal again. Without a handler the process would exit with its status.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    server.run(sockets=[listener])
    if not engine.close():
        # The engine still compiles, which takes up to half a minute and cannot be interrupted: end the process.
        sys.stdout.flush()
        os._exit(ExitCode.DONE)
