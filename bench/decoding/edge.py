"""Decoding of 372 M parameters at batch 1 on this machine's cores: JAX, onnxruntime at 32, 8 and 4 bits, llama.cpp.

    python bench/decoding/edge.py [--tokens 32] [--prompt 512] [--only NAME ...] [--folder SCRATCH] [--json FILE]

The weights are random, in nautile_370m's shape, because speed does not depend on their values. They are written once
for each number of bits (2.1 GB in SCRATCH, by default a temporary folder). Each line is measured in a separate process,
on pages of 2 MB like `nautile chat` and `serve`: tokens a second after a prompt of 512 tokens, bytes of weights read a
second, and the seconds of the prompt; medians of three. llama.cpp runs the bundled SmolLM2-135M in Q4_1. At one row
each step reads every weight, so that the memory's bandwidth is its bound; `read` is that of two threads that read
512 MB, in a dot product of an array with itself.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, write_results
from common.processes import HUGE_PAGES

ROOT = Path(__file__).parents[2]
RUNS = ("read", "jax 32", "onnx 32", "onnx 8", "onnx 4", "llama.cpp")


def main():
    parser = argument_parser(__doc__, tokens=32, prompt=512, folder=None, only=list(RUNS), worker="")
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments)))
        return
    print(f"{os.cpu_count()} cores; prompt {arguments.prompt} tokens, then {arguments.tokens}", flush=True)
    print(f"{'':10}{'tokens/s':>10}{'GB/s':>8}{'prompt s':>10}{'MB':>8}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: measure_apart(name, arguments.folder or scratch, arguments) for name in arguments.only}
    write_results(results, arguments.json)


def measure_apart(name, folder, arguments):
    """Measure one line in a process of its own, so that only one form is in memory; print it and return its figures."""
    worker_options = ["--worker", name, "--tokens", str(arguments.tokens), "--prompt", str(arguments.prompt)]
    worker = subprocess.run(
        [sys.executable, __file__, *worker_options, "--folder", str(folder)],
        stdout=subprocess.PIPE, check=True, text=True,
        # Pages as `nautile chat` and `serve` have them; OpenBLAS must not divide a half of `read` among threads again.
        env={**os.environ, **HUGE_PAGES, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    row = json.loads(worker.stdout.splitlines()[-1])
    speed = row["tokens_s"] * row["bytes"] / 1e9
    print(f"{name:10}{row['tokens_s']:10.1f}{speed:8.2f}{row['prompt_s']:10.2f}{row['bytes'] / 1e6:8.0f}", flush=True)
    return row


def measure(name, arguments):
    """The figures of one line of the table."""
    if name == "read":
        return read_speed()
    if name == "llama.cpp":
        return llama_cpp_speed(arguments.prompt, arguments.tokens)
    import jax

    from configs.load import load
    from model.nautile import shapes

    config = load("nautile_370m").model.model_copy(update={"compute_dtype": "float32"})
    if name == "jax 32":
        from model.decoding.slot_programs import JaxSlots

        # Random, because zeros would share one page and take no memory.
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda leaf: jax.numpy.asarray(0.02 * rng.random(leaf.shape, np.float32)), shapes(config))
        slots, size = JaxSlots(params, config, (), 0, 1), 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    else:
        from model.exports.onnx.folder import WEIGHTS
        from model.runtimes.onnx_runtime import OnnxRuntime

        folder = arguments.folder / name.removeprefix("onnx ")
        if not folder.exists():
            write_export(folder, config, int(folder.name))
        slots, size = OnnxRuntime(folder).slots((), 0, 1), (folder / WEIGHTS).stat().st_size
    return {**decoding_speed(slots, arguments.prompt, arguments.tokens), "bytes": size}


def decoding_speed(slots, length, tokens):
    """Tokens a second after a prompt of `length` tokens, and the seconds of the prompt."""
    import jax

    from model.decoding.engine import STRIDE
    from model.decoding.requests import DecodeRequest
    from model.decoding.slots import slot_settings

    slots.start()
    prompt_1P = np.random.default_rng(0).integers(0, slots.config.vocabulary, (1, length)).astype(np.int32)
    request, first = DecodeRequest((0,), slots.config.context - length, temperature=0.0), np.zeros(1, np.int32)
    prompt_s, token_s = [], []
    for _ in range(4):
        start = time.perf_counter()
        prefilled, _ = jax.block_until_ready(slots.prefill(prompt_1P, np.array([length]), score=False))
        prompt_s.append(time.perf_counter() - start)
        slots.fill(prefilled, first, first, slot_settings([request], 0))
        # The first stride is left out: it compiles in the first round, and fills the caches in the others.
        slots.advance(np.ones(1, bool), STRIDE)
        start, strides = time.perf_counter(), -(-tokens // STRIDE)
        for _ in range(strides):
            np.asarray(slots.advance(np.ones(1, bool), STRIDE).count_B)
        token_s.append((time.perf_counter() - start) / (strides * STRIDE))
    return {"tokens_s": 1 / statistics.median(token_s[1:]), "prompt_s": statistics.median(prompt_s[1:])}


def write_export(folder, config, bits):
    """Write an export with random quantised blocks, which is faster than to quantise random weights."""
    import jax
    import onnx

    from configs.load import load
    from model.exports.onnx.folder import CONFIG, INT8_ACTIVATIONS, PROMPT, STEP, WEIGHTS
    from model.exports.onnx.graph import WeightFile
    from model.exports.onnx.graphs import prompt_graph, step_graph
    from model.exports.onnx.quantise import Quantised
    from model.exports.onnx.weights import write_weights
    from model.nautile import shapes
    from model.weights.digests import write_digests

    rng = np.random.default_rng(0)

    def random_blocks(weight_NI, bits, block):
        rows, blocks = len(weight_NI), -(-weight_NI.shape[1] // block)
        levels = rng.integers(0, 256, (rows, blocks, block * bits // 8), np.uint8)
        zero_points = np.full((rows, -(-blocks // 2)), 0x88, np.uint8) if bits == 4 else None
        return Quantised(levels, np.full((rows, blocks), 0.04 / 2**bits, np.float32), zero_points)

    folder.mkdir(parents=True)
    # Broadcast views of single numbers, so that a whole model takes no memory.
    params = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0.02), leaf.shape), shapes(config))
    with WeightFile(folder / WEIGHTS, bits, random_blocks) as weights:
        write_weights(weights, params, config)
    for name, graph in ((PROMPT, prompt_graph), (STEP, step_graph)):
        onnx.save(graph(weights, config, INT8_ACTIVATIONS), folder / name)
    tokenizer = load("nautile_370m").tokenizer.model_dump(mode="json")
    settings = {"format": 1, "model": config.model_dump(mode="json"), "tokenizer": tokenizer}
    settings["onnx"] = {"bits": bits, "weights_sha256": "random"}
    (folder / CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    write_digests(folder)


def read_speed():
    """Bytes a second that two threads read, best of five, as if of a model of 512 MB."""
    source = np.ones(2**27, np.float32)  # far larger than any cache, so that memory is measured
    times = []
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            start = time.perf_counter()
            # OpenBLAS's product sums each number into one of several registers; numpy's own sum takes a third longer.
            list(threads.map(lambda half: half @ half, np.split(source, 2)))
            times.append(time.perf_counter() - start)
    return {"tokens_s": 1 / min(times), "prompt_s": 0.0, "bytes": source.nbytes}


def llama_cpp_speed(length, tokens):
    """llama.cpp's own timings for the bundled model, on all cores."""
    import xllamacpp

    from data.endpoints.embedded import model_file

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model_file())
    parameters.n_ctx, parameters.n_parallel = 1024, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = os.cpu_count() or 2
    # No cache of prompts, or the second round would not read its prompt at all.
    parameters.cache_ram_mib = 0
    parameters.hostnames, parameters.port, parameters.ui, parameters.verbosity = ["127.0.0.1"], 0, False, 1
    server, timings = xllamacpp.Server(parameters), []
    # Another prompt each time, for the same reason.
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(100, 40_000, length).tolist()
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=200) as reply:
            timings.append(json.load(reply)["timings"])
    return {
        "tokens_s": statistics.median(row["predicted_per_second"] for row in timings[1:]),
        "prompt_s": statistics.median(row["prompt_ms"] / 1000 for row in timings[1:]),
        "bytes": model_file().stat().st_size,
    }


if __name__ == "__main__":
    main()
