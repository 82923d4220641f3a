"""`nautile evaluate` and `nautile bench` of a checkpoint and of its ONNX export, both small and random."""

import io
import json

import jax
import pytest
from rich.console import Console

from nautile.configs.load import load
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.flows.cli import measure as evaluation
from nautile.flows.cli.measure import bench_view, state_sizes
from nautile.model.decoding.slots import empty_slots
from tests.flows.cli.test_chat import nautile  # noqa: F401 - a fixture
from tests.model.exports.onnx.conftest import MODEL, exports, weights  # noqa: F401 - fixtures


@pytest.fixture
def settings(tmp_path):
    """The local configuration with this model, and few short problems."""
    model = "\n".join(f"{name} = {json.dumps(value)}" for name, value in MODEL.model_dump(mode="json").items())
    path = tmp_path / "small.toml"
    path.write_text(
        f'extends = "local"\nname = "small"\n[tokenizer]\nranks = 256\n[ingest]\nrow_length = 32\n'
        f"[evaluate]\nbatch = 4\nmax_tokens = 8\nprompt_length = 240\n[model]\n{model}\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.slow
def test_an_export_is_compared_with_its_checkpoint_in_its_card(nautile, exports, settings):  # noqa: F811
    options = ("--runtime", "onnx", "--against", exports["checkpoint"], "--config", settings, "--problems", 3)
    code, out, err = nautile("evaluate", exports[8], *options, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["problems"] + result["left_out"] == 3
    assert result["model"].startswith("onnx 8 bits")
    assert result["against"].startswith("checkpoint")
    card = (exports[8] / "README.md").read_text(encoding="utf-8")
    assert f"{result['problems']} held-out problems of `small`" in card.partition("## Measured")[2]
    code, out, err = nautile("chat", exports[8], "--runtime", "onnx", "--prompt", "2 + 2", "--max-tokens", 5, "--json")
    assert code == 0, err
    assert 1 <= json.loads(out)["tokens"] <= 5


@pytest.mark.slow
def test_speeds_and_sizes_of_both_runtimes(nautile, exports):  # noqa: F811
    code, out, err = nautile("bench", exports["checkpoint"], "--against", exports[4], "--streams", 2, "--json")
    assert code == 0, err
    ours, theirs = json.loads(out)
    assert (ours["runtime"], theirs["runtime"]) == ("jax", "onnx")
    assert theirs["weights_mib"] < ours["weights_mib"] / 2
    for result in (ours, theirs):
        [row] = result["speeds"]
        assert row["streams"] == 2
        assert min(row.values()) > 0
    console = Console(file=io.StringIO(), width=200)
    console.print(bench_view([ours, theirs]))
    shown = console.file.getvalue()
    assert shown.count("transformer of its size") == 2
    assert f"{theirs['speeds'][0]['decode_tokens_s']:,.1f}" in shown


def test_the_formula_for_the_state_counts_the_arrays():
    for tokens in (1024, 65536):
        config = MODEL.model_copy(update={"context": tokens})
        slots = jax.eval_shape(lambda config=config: empty_slots(config, 1))
        arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots.blocks))
        assert state_sizes(MODEL, tokens)[0] == arrays
    # Attention in every layer: as many times the keys and values as a block has layers.
    own, other = (state_sizes(MODEL, 2)[index] - state_sizes(MODEL, 1)[index] for index in (0, 1))
    assert other == own * len(MODEL.pattern)
    # Without attention a stream's state does not grow, and the transformer's does.
    alone, other = (state_sizes(MODEL.model_copy(update={"pattern": "SS"}), tokens) for tokens in (1, 2))
    assert alone[0] == other[0]
    assert other[1] - alone[1] == own * 2


def test_the_card_names_the_precision_in_which_the_checkpoint_was_computed(monkeypatch, tmp_path):
    """On an accelerator the `compute_dtype` of its configuration, here float32."""
    (tmp_path / "config.json").write_text(json.dumps({"model": {"compute_dtype": "bfloat16"}}))
    test = {"n": 10, "a": 0.5, "b": 0.4, "lead": -0.1, "low": -0.2, "high": 0.0, "p": 0.5, "only_a": 1, "only_b": 0}
    row = {"left_out": None, "strict": True}
    measured = []
    monkeypatch.setattr(evaluation, "held_out", lambda *_: [])
    monkeypatch.setattr(evaluation, "_answer", lambda folder, *_: (folder.name, [row]))
    monkeypatch.setattr(evaluation, "compare", lambda *_, **__: {"benchmarks": {HELD_OUT: test}})
    monkeypatch.setattr(evaluation, "add_measurement", lambda folder, text: measured.append(text))
    evaluation.evaluate_folder(tmp_path / "export", "onnx", tmp_path, load("local"), None)
    assert "in float32 with JAX" in measured[0]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    evaluation.evaluate_folder(tmp_path / "export", "onnx", tmp_path, load("local"), None)
    assert "in bfloat16 with JAX" in measured[1]
