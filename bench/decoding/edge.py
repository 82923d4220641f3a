"""Decoding of 372 M parameters at batch 1 on this machine's cores: JAX, onnxruntime at 32, 8 and 4 bits, llama.cpp.

    python bench/decoding/edge.py [--tokens 32] [--prompt 512] [--rounds 1] [--only copy read ...] [--folder SCRATCH]
        [--json FILE]

The weights are random, in nautile_370m's shape, because speed does not depend on their values. They are written once
for each number of bits (2.1 GB in SCRATCH, by default a temporary folder). Each line is measured in a separate process,
on pages of 2 MB like `nautile chat` and `serve`: tokens a second after a prompt of 512 tokens, bytes of weights read a
second, and the seconds of the prompt; medians of three. llama.cpp runs the bundled SmolLM2-135M in Q4_1.

The bytes that a step reads are compared with two measures of the memory, by two threads over 512 MB. A `copy` counts
the bytes that it reads and those that it writes; half of that is the speed at which bytes are copied. A `read` is a dot
product of an array with itself, which writes nothing, like a step. Other tenants of a machine change its bandwidth from
minute to minute, so with `--rounds` the lines are measured in turns, and the shares are medians over the rounds.
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
RUNS = ("copy", "read", "jax 32", "onnx 32", "onnx 8", "onnx 4", "llama.cpp")
COPIED = 2**29  # bytes; far larger than any cache, so memory is measured


def main():
    parser = argument_parser(__doc__, tokens=32, prompt=512, folder=None, only=list(RUNS), rounds=1, worker="")
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments)))
        return
    results = {}
    shares = {name: [] for name in ("copy", "read") if {name, "jax 32"} <= set(arguments.only)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        print(f"{os.cpu_count()} cores; prompt {arguments.prompt} tokens, then {arguments.tokens}", flush=True)
        print(f"{'':10}{'tokens/s':>10}{'GB/s':>8}{'prompt s':>10}{'MB':>8}", flush=True)
        for _ in range(arguments.rounds):
            results = {name: measure_apart(name, folder, arguments) for name in arguments.only}
            for name, values in shares.items():
                step = results["jax 32"]
                values.append(100 * step["tokens_s"] * step["bytes"] / results[name]["bytes_s"])
    # At one row, decoding reads every weight for each token, so memory bandwidth is its bound.
    for name, values in shares.items():
        median, least, most = statistics.median(values), min(values), max(values)
        line = f"JAX's step reads its weights at {median:.0f} % of the speed of a {name} ({least:.0f} to {most:.0f})"
        if name == "copy":
            line += f", {2 * median:.0f} % of the bytes that are copied in that time"
        print(line)
    for bits in (8, 4):
        if {"onnx 32", f"onnx {bits}"} <= set(results):
            times = results[f"onnx {bits}"]["tokens_s"] / results["onnx 32"]["tokens_s"]
            print(f"{bits} bits: {times:.2f} times the tokens/s of 32 bits with onnxruntime", end="")
            if "jax 32" in results:
                print(
                    f", {results[f'onnx {bits}']['tokens_s'] / results['jax 32']['tokens_s']:.2f} times JAX's", end=""
                )
            print()
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
    if name in ("copy", "read"):
        print(f"{name:10}{'':10}{row['bytes_s'] / 1e9:8.1f}", flush=True)
        return row
    speed = row["tokens_s"] * row["bytes"] / 1e9
    print(
        f"{name:10}{row['tokens_s']:10.1f}{speed:8.2f}{row['prompt_s']:10.2f}{row['bytes'] / 1e6:8.0f}",
        flush=True,
    )
    return row


def measure(name, arguments):
    """The figures of one line of the table."""
    if name in ("copy", "read"):
        return {"bytes_s": memory_speed(name)}
    if name == "llama.cpp":
        return llama_cpp_speed(arguments.prompt, arguments.tokens)
    from configs.load import load

    config = load("nautile_370m").model.model_copy(update={"compute_dtype": "float32"})
    if name == "jax 32":
        from model.decoding.slot_programs import JaxSlots

        params = random_params(config)
        slots = JaxSlots(params, config, (), 0, 1)
        size = 4 * (sum(leaf.size for leaf in leaves(params)))
    else:
        from model.exports.onnx.folder import WEIGHTS
        from model.runtimes.onnx_runtime import OnnxRuntime

        folder = arguments.folder / name.removeprefix("onnx ")
        if not folder.exists():
            write_export(folder, config, int(folder.name))
        slots = OnnxRuntime(folder).slots((), 0, 1)
        size = (folder / WEIGHTS).stat().st_size
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


def leaves(params):
    import jax

    return jax.tree.leaves(params)


def random_params(config):
    """Random parameters in the model's shapes. Zeros would share one page and take no memory."""
    import jax

    from model.nautile import shapes

    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jax.numpy.asarray(rng.random(leaf.shape, np.float32) * np.float32(0.02)), shapes(config)
    )


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
    settings = {
        "format": 1,
        "model": config.model_dump(mode="json"),
        "tokenizer": load("nautile_370m").tokenizer.model_dump(mode="json"),
        "onnx": {"bits": bits, "weights_sha256": "random"},
    }
    (folder / CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    write_digests(folder)


def memory_speed(name):
    """Bytes a second of two threads, best of five: read and written by a "copy", read by a "read"."""
    source, target = np.ones(COPIED // 4, np.float32), np.ones(COPIED // 4, np.float32)
    halves = (slice(0, COPIED // 8), slice(COPIED // 8, None))

    def work(half):
        # OpenBLAS's product sums each number into one of several registers; numpy's own sum takes a third longer.
        np.copyto(target[half], source[half]) if name == "copy" else source[half] @ source[half]

    times = []
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            start = time.perf_counter()
            list(threads.map(work, halves))
            times.append(time.perf_counter() - start)
    return (2 if name == "copy" else 1) * COPIED / min(times)


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
    server = xllamacpp.Server(parameters)
    rows = []
    # Another prompt each time, for the same reason.
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(100, 40_000, length).tolist()
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=200) as reply:
            rows.append(json.load(reply)["timings"])
    return {
        "tokens_s": statistics.median(row["predicted_per_second"] for row in rows[1:]),
        "prompt_s": statistics.median(row["prompt_ms"] / 1000 for row in rows[1:]),
        "bytes": model_file().stat().st_size,
    }


if __name__ == "__main__":
    main()
