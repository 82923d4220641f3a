"""The export for transformers in real torch and transformers, against our own arithmetic.

Our side writes arrays; `tests/support/processes/torch_run.py` compares in the environment that `make torch` makes, with
the newest version 5 of transformers there is a pin for and with the oldest.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.configs.load import load
from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.benchmarks.stand_ins import wiki_choice
from nautile.evals.running.runner import CheckpointScorer
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.exports.transformers.export import export_transformers
from nautile.model.loss import next_logits, token_logprobs
from nautile.model.nautile import forward, shapes
from nautile.model.weights.author_import import import_weights, load_author_weights
from nautile.model.weights.author_layout import to_author
from nautile.model.weights.files import load_weights, save_weights
from tests.model.conftest import packed_rows, tiny_config
from tests.support.stages.toy_cli import ROOT

PYTHON = Path(os.environ.get("TORCH_PYTHON", Path(sys.prefix) / "torch" / "bin" / "python"))
OLDEST = PYTHON.parent.parent / "oldest"  # a folder for PYTHONPATH
TOKENIZER = TokenizerConfig(ranks=256)
CONTEXT = 1024
VARIANTS = {
    "relative": tiny_config(vocabulary=TOKENIZER.vocabulary, context=CONTEXT),
    "window": tiny_config(
        vocabulary=TOKENIZER.vocabulary, context=CONTEXT, decay="window", blocks=1, pattern="SSA", query_heads=4,
        spectral_samples=1, kv_heads=4, qk_norm=False, sca_norm_epsilon=1e-6,
    ),
    "paper": tiny_config(
        vocabulary=TOKENIZER.vocabulary, context=CONTEXT, blocks=1, pattern="ASSA", grid="free", integration="free",
    ),
    "padded": tiny_config(vocabulary=TOKENIZER.vocabulary + 20, context=CONTEXT, blocks=1).with_tokenizer(TOKENIZER),
}  # fmt: skip
ITEMS = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.timeout(600),  # importing lm-eval and peft takes half a minute of a busy machine each
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment with torch: `make torch` makes it"),
]


def in_torch(*arguments, folder, path=()):
    """Run python of that environment, offline, with one thread. `path`: folders before its own packages."""
    offline = {
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    done = subprocess.run(
        [PYTHON, *arguments], cwd=folder, env=environment, timeout=500,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def logits_of(config, params, tokens, segments, positions):
    hidden = jax.jit(forward, static_argnums=1)(params, config, tokens, segments, positions)
    return np.asarray(next_logits(hidden, params["embedding"], config)[..., : config.vocabulary])


def reference(folder, config):
    """Write a checkpoint, its export, and what our side computes of it."""
    rng = np.random.default_rng(0)

    def value(path, leaf):
        name = path[-1].key
        spread = 0.15 if name == "embedding" else leaf.shape[-2] ** -0.5 if leaf.ndim > 2 else 0.3
        return jnp.asarray(rng.normal(size=leaf.shape) * spread + (name in ("norm", "norm1", "norm2")), jnp.float32)

    params = jax.tree_util.tree_map_with_path(value, shapes(config))
    params["embedding"] = params["embedding"].at[config.vocabulary :].set(0)
    save_weights(folder / "checkpoint", params, config, TOKENIZER)
    export_transformers(folder / "checkpoint", folder / "export")
    long_ids = rng.integers(0, TOKENIZER.ranks, (1, CONTEXT))
    places = jnp.arange(CONTEXT)[None]
    arrays = {"long_ids": long_ids, "long_logits": logits_of(config, params, long_ids, jnp.ones_like(places), places)}
    batch = packed_rows(TOKENIZER.ranks, [[5, 40, 1, 18], [64], [33, 20], [30]], 64)
    # The last row is padded on the left, as prompts of a batch are.
    batch = {name: part.at[3].set(jnp.roll(part[3], 34)) for name, part in batch.items()}
    rows = (batch["tokens"], batch["segments"], batch["positions"])
    arrays |= dict(zip(("tokens", "segments", "positions"), rows, strict=True))
    arrays["row_logits"] = logits_of(config, params, *rows)

    def loss(params):
        logprobs_BL, _ = token_logprobs(params, config, forward(params, config, *rows), batch["targets"])
        return -jnp.sum(logprobs_BL * batch["weights"])

    sums, slope = jax.jit(jax.value_and_grad(loss))(params)
    weight = float(batch["weights"].sum())
    arrays["loss"] = sums / weight
    slope = jax.tree.map(lambda leaf: leaf / weight, slope)
    arrays |= {f"gradient.{name}": array for name, array in to_author(slope, config).items()}
    return params, arrays


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("torch")


@pytest.fixture(scope="module")
def items():
    return [item for item in wiki_choice(0, 100) if len(item.question) < 300][:ITEMS]


@pytest.fixture(scope="module")
def references(root, items):
    for name, config in VARIANTS.items():
        folder = root / name
        folder.mkdir()
        params, arrays = reference(folder, config)
        if name == "relative":
            prompts = [arrays["long_ids"][0, :9], arrays["long_ids"][0, 20:50]]
            generate = Generator(config, Sampling(max_tokens=64, temperature=0.0, stop_ids=()), 2, 30)
            completions = generate(params, [prompt.tolist() for prompt in prompts], [(0,), (1,)])
            arrays |= {f"prompt_{index}": prompt for index, prompt in enumerate(prompts)}
            arrays["greedy"] = np.stack([completion.ids for completion in completions])
        np.savez(folder / "reference.npz", **arrays)
    rows = [
        {"question": item.question, "options": list(item.options), "gold": item.letters.index(item.expected)}
        for item in items
    ]
    (root / "items.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def results(references):
    in_torch("-m", "tests.support.processes.torch_run", references, "newest", folder=references)
    return json.loads((references / "newest.json").read_text())


@pytest.fixture(scope="module", params=["newest", "oldest"])
def of_version(request, references):
    """The results of both versions, for what depends on transformers itself."""
    if request.param == "newest":
        return request.getfixturevalue("results")
    in_torch("-m", "tests.support.processes.torch_run", references, "oldest", folder=references, path=[OLDEST])
    return json.loads((references / "oldest.json").read_text())


def test_the_pinned_versions_run(of_version):
    name = {"newest": "torch.txt", "oldest": "torch-oldest.txt"}[of_version["asked"]]
    assert f"transformers=={of_version['version']}\n" in (ROOT / "requirements" / name).read_text()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_ours(of_version, name):
    """Alone at every length, packed with others and padded, at once or from the cache."""
    forward = of_version[name]["forward"]
    assert forward["deviation"] > 0.5
    assert len(forward["lengths"]) == 9
    assert max(forward["lengths"].values()) < 1e-4
    assert max(forward[part] for part in ("rows", "cached_long", "cached_packed")) < 1e-4
    assert forward["bfloat16"] < 0.1 * forward["deviation"] + 0.1
    assert len(forward["refused"]) == 3
    assert "past_key_value" in forward["refused"][0]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("way", ["plain", "checkpointed"])
def test_the_gradient_of_every_parameter_is_ours(of_version, name, way):
    errors = of_version[name]["gradients"]
    assert errors[f"loss_{way}"] < 1e-5
    assert max(errors[way].values()) < 1e-4
    assert errors["loss_padded"] < 1e-5
    assert errors["losses_without_target"] == [0, 0]


def test_generation(of_version):
    generation = of_version["relative"]["generation"]
    assert generation["left"]
    assert (generation["greedy"], generation["of"]) == (128, 128)
    assert generation["without_cache"]
    assert generation["continued"]
    assert generation["sampled"] == [True, False]
    assert not generation["padding_sampled"]
    assert generation["beams"] == [2, 38]
    assert generation["streamed"][0] > 5
    assert generation["streamed"][1]
    assert generation["pipeline"] == ["assistant", True]
    assert generation["prompt"] == encode_prompt(tokenizer_for(TOKENIZER), "What is 2 + 2?")
    assert "cache_implementation='static'" in generation["static"]


def test_an_export_that_was_not_tuned_takes_a_new_head(of_version):
    assert of_version["fresh"] == [1, 3]


@pytest.mark.parametrize("way", ["whole", "lora"])
def test_ten_steps_of_training_lower_the_loss(results, way):
    losses = results["training"][way]
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]
    assert results["training"]["trained_share"] < 0.5


def test_a_tuned_model_comes_back(results, root):
    """What `Trainer` saved is a checkpoint of ours with the same logits."""
    import_weights(root / "training" / "saved", root / "back", tiny_config(), TOKENIZER)
    params, config, tokenizer = load_weights(root / "back")
    assert (config, tokenizer) == (load_weights(root / "relative" / "checkpoint")[1], TOKENIZER)
    ids = jnp.arange(32)[None]
    ours = logits_of(config, params, ids, jnp.ones_like(ids), ids)
    np.testing.assert_allclose(ours, np.load(root / "training" / "tuned.npz")["logits"], atol=1e-4)


def test_lm_eval_and_our_runner_agree_on_every_item(results, root, items):
    harness = results["harness"]
    ours = CheckpointScorer(root / "relative" / "checkpoint", load("local").evaluate).weigh(items)
    assert len(items) == len(harness["rows"]) == ITEMS
    for item, weighed, row in zip(items, ours, harness["rows"], strict=True):
        np.testing.assert_allclose(row["logprobs"], weighed.logprobs, atol=1e-3)
        assert row["acc_bytes"] == (item.letters[weighed.by_bytes] == item.expected)
        assert row["acc"] == (item.letters[weighed.by_sum] == item.expected)
    assert 0 < sum(row["acc_bytes"] for row in harness["rows"]) < ITEMS


def test_the_command_for_a_pickle_works(results, root, tmp_path):
    """The one in the message that refuses it, on what the author's converter writes."""
    source = root / "window" / "export"
    theirs = {"d_model": 32, "num_layers": 3, "seqcond_ratio": 2, "maxlen": CONTEXT, "num_kv_heads": 4, "num_heads": 4}
    theirs |= {"seqcond_heads": 4, "num_query_heads": 4, "num_thetas": 1, "d_ff": 40, "qk_norm": False}
    write = (
        f"import torch, safetensors.torch as s; w = s.load_file({str(source / 'model.safetensors')!r}); "
        f"torch.save({{'config': {theirs!r}, 'state_dict': w}}, 'nautile.pt')"
    )
    in_torch("-c", write, folder=tmp_path)
    with pytest.raises(Exception, match="is a pickle") as caught:
        load_author_weights(tmp_path / "nautile.pt", None, TOKENIZER)
    command = re.search(r"(python -c .*), and import", str(caught.value))
    in_torch(*shlex.split(command[1])[1:], folder=tmp_path)
    converted = load_author_weights(tmp_path / "model.safetensors", None, TOKENIZER, sca_epsilon=1e-6)
    ours = load_weights(root / "window" / "checkpoint")
    jax.tree.map(np.testing.assert_array_equal, converted[0], ours[0])
    assert converted[1].model_dump(exclude={"compute_dtype", "remat", "chunk"}) == ours[1].model_dump(
        exclude={"compute_dtype", "remat", "chunk"}
    )
