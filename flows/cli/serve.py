"""The options of `nautile serve`. What is heavy is imported once they are read."""

from typing import Annotated

import typer


def serve(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="an id, or a folder; the newest in the store if none")
    ] = None,
    host: Annotated[str, typer.Option(help="where to listen; loopback alone unless another is named")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="completions written at once")] = 16,
    queue: Annotated[int, typer.Option(min=1, help="how many more may wait; beyond that clients get 429")] = 128,
    name: Annotated[str | None, typer.Option(help="what clients call the model; its id, or its folder's name")] = None,
    key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="the environment variable with the key that clients must show")
    ] = None,
    grace: Annotated[float, typer.Option(min=1, help="seconds for requests under way when it is stopped")] = 30.0,
) -> None:
    """Serve a checkpoint to OpenAI's clients: chat and plain completions, batched across requests."""
    from rich.console import Console

    from flows.serve.command import Serving
    from flows.serve.command import serve as run

    console = Console(markup=False, highlight=False)
    run(
        checkpoint,
        Serving(host, port, slots, queue, name, key_env, grace),
        lambda line: console.print(line, soft_wrap=True),
    )
