"""The exported PyTorch form compared with JAX: forward, and forward and backward, of 372 M parameters in float32.

    make torch; python bench/training/torch_form.py [--length 512] [--tokens 32] [--repeats 3] [--folder SCRATCH]
        [--json FILE]

Random weights in nautile_370m's shape, one row of `length` tokens, on all cores of this machine. Each form has its own
process and environment (.venv/torch for PyTorch). The backward pass is that of the mean cross-entropy, with every block
recomputed in both forms. Medians. A greedy token after the prompt is timed for PyTorch only; bench/decoding/edge.py
times JAX's.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import argument_parser, median_seconds, write_results

ROOT = Path(__file__).parents[2]
PYTHONS = {"jax": Path(sys.executable), "torch": ROOT / ".venv" / "torch" / "bin" / "python"}
CHECKPOINT, EXPORT = "checkpoint", "export"


def main():
    parser = argument_parser(__doc__, length=512, tokens=32, repeats=3, folder=None, worker="")
    arguments = parser.parse_args()
    if arguments.worker:
        print(
            json.dumps({"jax": time_jax, "torch": time_torch, "write": write_checkpoint}[arguments.worker](arguments))
        )
        return
    if not PYTHONS["torch"].is_file():
        parser.error(f"{PYTHONS['torch']} does not exist: run `make torch`")
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        # One after the other: 372 M parameters with gradients fill the memory of a small machine once.
        for name in ("write", "jax", "torch"):
            if name == "write" and (folder / EXPORT).exists():
                continue
            numbers = [f"--{key}={getattr(arguments, key)}" for key in ("length", "tokens", "repeats")]
            worker = subprocess.run(
                [PYTHONS.get(name, sys.executable), __file__, "--worker", name, *numbers, "--folder", folder],
                stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            if name == "write":
                continue
            results[name] = json.loads(worker.stdout.splitlines()[-1])
            print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    for key, value in results["jax"].items():
        print(f"{key}: PyTorch takes {results['torch'][key] / value:.2f} times as long as JAX")
    write_results(results, arguments.json)


def write_checkpoint(arguments):
    """Write a checkpoint with random weights, and its export."""
    import jax
    import numpy as np

    from configs.load import load
    from model.exports.transformers.export import export_transformers
    from model.nautile import shapes
    from model.weights.files import save_weights

    config, rng = load("nautile_370m"), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.random(leaf.shape, np.float32) * np.float32(0.02), shapes(config.model))
    save_weights(arguments.folder / CHECKPOINT, params, config.model, config.tokenizer)
    export_transformers(arguments.folder / CHECKPOINT, arguments.folder / EXPORT)


def median_times(calls, repeats):
    """Name -> median seconds. Each call is repeated by itself, because only one form is in memory at a time."""
    return {name: median_seconds(call, repeats) for name, call in calls.items()}


def time_jax(arguments):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from model.loss import token_logprobs
    from model.nautile import forward
    from model.weights.files import load_weights

    params, config, _ = load_weights(arguments.folder / CHECKPOINT)
    config = config.model_copy(update={"compute_dtype": "float32", "mixing": "chunked", "remat": "block"})
    ids_BL = np.random.default_rng(0).integers(0, 1000, (1, arguments.length), np.int32)
    ones_BL, positions_BL = np.ones_like(ids_BL), np.arange(arguments.length, dtype=np.int32)[None]

    def loss(params):
        hidden_BLD = forward(params, config, ids_BL, ones_BL, positions_BL)
        return -jnp.mean(token_logprobs(params, config, hidden_BLD, ids_BL)[0])

    calls = {
        "forward": lambda program=jax.jit(loss): jax.block_until_ready(program(params)),
        "forward and backward": lambda program=jax.jit(jax.value_and_grad(loss)): jax.block_until_ready(
            program(params)
        ),
    }
    return median_times(calls, arguments.repeats)


def time_torch(arguments):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.folder / EXPORT, trust_remote_code=True, dtype=torch.float32)
    ids = torch.randint(1, 1000, (1, arguments.length), generator=torch.Generator().manual_seed(0))

    def forward():
        with torch.no_grad():
            model(ids, labels=ids)

    def backward():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    def reply(tokens):
        with torch.no_grad():
            out = model(ids, use_cache=True, logits_to_keep=1)
            for _ in range(tokens):
                chosen = out.logits.argmax(-1)
                out = model(chosen, past_key_values=out.past_key_values, use_cache=True)

    model.eval()
    seconds = median_times({"forward": forward}, arguments.repeats)
    model.train()
    # JAX recomputes each block in the backward pass as well: without this, PyTorch would save time by memory.
    model.gradient_checkpointing_enable()
    seconds |= median_times({"forward and backward": backward}, arguments.repeats)
    model.gradient_checkpointing_disable()
    model.eval()
    model.zero_grad()
    # The time of a token is the difference of two reply lengths, which cancels the prompt.
    both = median_times({1: lambda: reply(arguments.tokens), 2: lambda: reply(2 * arguments.tokens)}, arguments.repeats)
    return {**seconds, "a token": (both[2] - both[1]) / arguments.tokens}


if __name__ == "__main__":
    main()
