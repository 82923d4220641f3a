"""The pretraining loop: its outputs and metrics, resuming to the same bytes, rollback, and refused settings."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import silent
from nautile.data.tokens.loader import Loader
from nautile.data.tokens.source_reading import reading_line
from nautile.model.capacity.flops import forward_flops, parameter_counts, training_flops
from nautile.model.nautile import shapes
from nautile.model.sharding import make_mesh, put_rows
from nautile.model.training import loop as training
from nautile.model.training.loop import TrainMetrics
from nautile.model.training.step import BATCH
from nautile.model.weights.files import load_weights
from tests.model.conftest import tiny_config
from tests.support.processes.training import (
    MODEL,
    ROW,
    STEPS,
    TOKENIZER,
    run,
    settings,
    shared_programs,
    sources,
    write_chat_tokens,
    write_tokens,
)
from tests.support.samples.stage_store import flip_byte

pytestmark = pytest.mark.slow


class Killed(Exception):
    """Ends a run in place of a signal."""


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Program", shared_programs())
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run: its root (with the run in `run`), facts and events."""
    root, events = tmp_path_factory.mktemp("training"), []
    facts = run(root, emit=lambda kind, **fields: events.append((kind, fields)))
    return root, facts, events


def weights_of(root, name="run"):
    return (root / name / "out" / "weights.safetensors").read_bytes()


def values(events, name, source=None):
    return {
        fields["step"]: fields["value"]
        for kind, fields in events
        if kind == "metric" and fields["name"] == name and fields.get("source") == source
    }


def test_a_run_learns_and_returns_its_facts(finished):
    root, facts, _ = finished
    params, model, tokenizer = load_weights(root / "run" / "out")
    assert (model, tokenizer) == (MODEL, TOKENIZER)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert facts["steps"] == STEPS
    assert facts["tokens"] == sum(facts["tokens_by_source"].values()) == STEPS * 4 * ROW
    assert facts["tokens_by_source"] == {"web": 18 * 4 * ROW, "synth": 6 * 4 * ROW}
    assert facts["parameters"] == sum(parameter_counts(MODEL).values())
    assert facts["train_loss"] < np.log(MODEL.vocabulary) - 0.5
    assert set(facts["train_loss_by_source"]) == set(facts["validation"]) == {"web", "synth"}
    assert 0 < facts["targets"] < facts["tokens"]
    assert facts["skipped_updates"] == 0
    assert 0 < facts["seconds_in_steps"] < 1000
    assert facts["tokens_per_second"] == pytest.approx(4 * ROW / facts["step_seconds_p50"])


def test_the_metrics_of_a_run(finished):
    _, facts, events = finished
    loss, rate = values(events, "loss"), values(events, "learning_rate")
    assert list(loss) == list(range(3, STEPS + 1, 3))
    assert loss[STEPS] == facts["train_loss"]
    assert loss[3] == pytest.approx(np.log(MODEL.vocabulary), abs=0.2)
    assert list(values(events, "loss", "synth")) == [15, 18, 21, 24]  # from the second phase on
    assert rate[3] == pytest.approx(0.01)
    assert rate[STEPS] == pytest.approx(1e-5)
    for name in ("gradient_norm", "update_norm", "step_seconds", "tokens_per_second", "bits_per_byte"):
        assert min(values(events, name).values()) > 0
    for source in ("web", "synth"):
        assert list(values(events, "validation_loss", source)) == [8, 16, 24]
        assert values(events, "validation_bits_per_byte", source)[24] == facts["validation"][source]["bits_per_byte"]
    progress = [fields for kind, fields in events if kind == "progress"]
    assert [fields["done"] for fields in progress] == list(range(1, STEPS + 1))
    assert progress[-1]["note"].startswith(f"loss {facts['train_loss']:.2f}, ")


def test_bits_per_byte_counts_the_bytes_of_the_targets(finished):
    root, facts, _ = finished
    loader = Loader(sources(root), settings().phases, 4, 0, TOKENIZER)
    batch = loader.validation("web", 6)
    result = facts["validation"]["web"]
    nats = result["loss"] * batch["weights"].sum()
    assert result["bits_per_byte"] == pytest.approx(nats / np.log(2) / batch["bytes"].sum())


@pytest.fixture(scope="module")
def on_replies(tmp_path_factory):
    """As `finished`, with a second source of chat records, of which only the replies are trained on."""
    root, events = tmp_path_factory.mktemp("replies"), []
    write_chat_tokens(root / "synth", 1)
    facts = run(root, emit=lambda kind, **fields: events.append((kind, fields)), train_on={"synth": "replies"})
    return root, facts, events


def test_on_replies_alone_prompts_are_no_part_of_loss_bytes_or_targets(on_replies):
    root, facts, events = on_replies
    loader = Loader(sources(root), settings().phases, 4, 0, TOKENIZER, train_on={"synth": "replies"})
    batches = [loader.batch(step) for step in range(STEPS)]
    assert facts["targets"] == sum(batch["weights"].sum() for batch in batches)
    assert facts["tokens"] == STEPS * 4 * ROW, "all positions count as read"
    held_out = loader.validation("synth", 6)
    result = facts["validation"]["synth"]
    nats = result["loss"] * held_out["weights"].sum()
    assert result["bits_per_byte"] == pytest.approx(nats / np.log(2) / held_out["bytes"].sum())
    whole = Loader(sources(root), settings().phases, 4, 0, TOKENIZER).validation("synth", 6)
    assert 0 < held_out["bytes"].sum() < whole["bytes"].sum()
    reading = facts["reading_by_source"]
    assert {name: values["train_on"] for name, values in reading.items()} == {"web": "all", "synth": "replies"}
    assert reading["synth"]["trained_share"] == pytest.approx(loader.reading()["synth"].trained_share, abs=1e-4)
    assert 0.2 < reading["synth"]["trained_share"] < 0.8
    note = [fields["note"] for kind, fields in events if kind == "progress"][-1]
    assert note.startswith(f"loss {facts['train_loss']:.2f}, ")
    assert note.endswith(reading_line(loader.reading()))


def test_a_run_on_other_targets_does_not_resume(on_replies):
    root, _, _ = on_replies
    with pytest.raises(ConfigError, match=r"another run: train_on"):
        run(root)


def test_the_gradient_is_over_the_weighted_targets_whatever_the_micro_batches(on_replies):
    """Rows of few targets, of many and of none: one mean over all of them, and no mean of means."""
    root, _, _ = on_replies
    loader = Loader(sources(root), settings().phases, 4, 0, TOKENIZER, train_on={"synth": "replies"})
    batch = loader.batch(STEPS - 1)
    batch["weights"][0] = 0.0
    batch["weights"][1, 3:] = 0.0
    after = []
    for micro in (None, 1):
        program = training.Program(settings(micro_rows=micro), MODEL, make_mesh(1), STEPS, 2, ROW, 0)
        rows = put_rows({name: batch[name] for name in BATCH}, program.mesh)
        state, metrics = program.step(program.fresh(), rows)
        assert np.asarray(metrics.source_weight_S).sum() == batch["weights"].sum()
        after.append((float(metrics.gradient_norm), np.asarray(state.params["embedding"])))
    (norm, embedding), (expected_norm, expected) = after
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    np.testing.assert_allclose(embedding, expected, atol=1e-5)


def test_a_batch_without_any_weighted_target_changes_nothing_to_nan(program):
    program, batch = program
    rows = put_rows({name: batch[name] for name in BATCH} | {"weights": np.zeros_like(batch["weights"])}, program.mesh)
    state, metrics = program.step(program.fresh(), rows)
    assert metrics.finite
    assert float(metrics.gradient_norm) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    record = TrainMetrics(silent, ("synth", "web"), 4 * ROW, STEPS, 3, None).record(0, metrics)
    assert record == 0.0


@pytest.fixture(scope="module")
def program(finished):
    """The program of the finished run, its start, and one batch of the second phase."""
    root, _, _ = finished
    loader = Loader(sources(root), settings().phases, 4, 0, TOKENIZER)
    return training.Program(settings(), MODEL, make_mesh(1), STEPS, 2, ROW, 0), loader.batch(STEPS - 1)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_not_applied(program, poison):
    program, batch = program
    poisoned = {**batch, "weights": np.where(batch["weights"] > 0, np.float32(poison), 0)}
    state = program.fresh()
    before = jax.tree.map(np.array, state)
    rows = {name: poisoned[name] for name in BATCH}
    after, metrics = program.step(state, put_rows(rows, program.mesh))
    assert not metrics.finite
    assert after.step == 1
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (before.params, before.opt_state))


def poisoned(monkeypatch, steps):
    """Make the loss of these steps not finite."""
    batch = Loader.batch

    def with_poison(self, step):
        rows = batch(self, step)
        return {**rows, "weights": rows["weights"] * np.float32(np.nan)} if step in steps else rows

    monkeypatch.setattr(Loader, "batch", with_poison)


def test_skipped_updates_are_counted_and_the_run_goes_on(finished, monkeypatch, caplog):
    root, _, _ = finished
    poisoned(monkeypatch, {2, 5, 6})
    events = []
    facts = run(root, emit=lambda kind, **fields: events.append((kind, fields)), name="skipping")
    assert facts["skipped_updates"] == 3
    assert values(events, "skipped_updates")[6] == 2
    assert "step 5: the loss or its gradient is not finite" in caplog.text
    assert facts["train_loss"] < np.log(MODEL.vocabulary)
    assert all(np.isfinite(value) for kind, fields in events if kind == "metric" for value in [fields["value"]])


def test_a_run_that_diverges_stops_with_the_steps(finished, monkeypatch):
    """Steps 9 to 11 fail; from the checkpoint of step 8 it continues after 11; 12 to 14 fail, and it gives up."""
    root, _, _ = finished
    poisoned(monkeypatch, set(range(9, STEPS)))
    with pytest.raises(ConfigError, match=r"\(steps 9 to 11\); .*\(steps 12 to 14\)\. It went back 1 times"):
        run(root, settings(skip_limit=2, rollbacks=1), name="diverging")
    assert not (root / "diverging" / "out").exists()


def test_bad_batches_are_skipped_also_by_a_run_killed_afterwards(finished, monkeypatch):
    root, _, _ = finished
    poisoned(monkeypatch, {9, 10, 11})
    events = []
    facts = run(root, settings(skip_limit=2), emit=lambda kind, **fields: events.append((kind, fields)), name="past")
    assert [(entry["step"], entry["checkpoint"]) for entry in facts["went_back"]] == [(11, 8)]
    assert facts["skipped_updates"] == 0  # those updates belong to the part that was rolled back
    samples = [fields for kind, fields in events if kind == "sample" and fields["set"] == "trouble"]
    assert [sample["step"] for sample in samples] == [9, 10, 11]
    assert {sample["phase"] for sample in samples} == {"one"}
    assert len({sample["digest"] for sample in samples}) == 3

    def kill(kind, **fields):
        if kind == "progress" and fields["done"] == 14:
            raise Killed

    with pytest.raises(Killed):
        run(root, settings(skip_limit=2), emit=kill, name="past-killed")
    again = run(root, settings(skip_limit=2), name="past-killed")
    assert again["went_back"] == facts["went_back"]
    assert weights_of(root, "past-killed") == weights_of(root, "past")


def test_a_spike_rolls_the_run_back(finished, monkeypatch, caplog):
    """The targets of steps 9 to 11 are noise; one spike in a row is tolerated."""
    root, _, _ = finished
    monkeypatch.setattr("nautile.model.training.loop.MIN_LOSSES", 4)
    batch = Loader.batch

    def with_noise(self, step):
        rows = batch(self, step)
        if step not in (9, 10, 11):
            return rows
        return {**rows, "targets": np.random.default_rng(step).integers(0, 250, rows["targets"].shape)}

    monkeypatch.setattr(Loader, "batch", with_noise)
    quick = {"learning_rate": 0.03, "warmup_steps": 2}  # learns enough in 9 steps for noise to stand out
    facts = run(root, settings(spike_factor=4.0, spike_steps=1, optimizer=quick), name="spiking")
    assert [(entry["step"], entry["checkpoint"]) for entry in facts["went_back"]] == [(10, 8)]
    assert "above the threshold of" in caplog.text


def test_a_run_that_rolls_back_at_its_end_reports_the_validation_of_what_it_publishes(finished, monkeypatch):
    """The last three steps fail: the state of step 20 is published, whose checkpoint was last validated at step 16."""
    root, _, _ = finished
    poisoned(monkeypatch, {STEPS - 3, STEPS - 2, STEPS - 1})
    facts = run(root, settings(skip_limit=2), name="rolled-back")
    assert [(entry["step"], entry["checkpoint"]) for entry in facts["went_back"]] == [(STEPS - 1, 20)]
    once = run(root, settings(skip_limit=2, validate_every=1000), name="rolled-back-once")
    assert weights_of(root, "rolled-back") == weights_of(root, "rolled-back-once")
    assert facts["validation"] == once["validation"]


def test_killed_and_preempted_the_run_ends_with_the_same_bytes(finished):
    """An end just after a save began, SIGTERM between two saves, then to the end."""
    root, facts, events = finished

    def kill(kind, **fields):
        if kind == "progress" and fields["done"] == 9:
            raise Killed

    with pytest.raises(Killed):
        run(root, emit=kill, name="killed")

    def preempted(kind, **fields):
        if kind == "progress" and fields["done"] == 14:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Retryable, match="asked to stop; it is saved at step 15 of 24"):
        run(root, emit=preempted, name="killed")
    assert signal.getsignal(signal.SIGTERM) == handler
    steps = {path.name for path in (root / "killed" / "work" / "checkpoints" / "steps").iterdir()}
    assert "15" in steps
    assert len(steps) == 2
    seen = []
    resumed = run(root, emit=lambda kind, **fields: seen.append((kind, fields)), name="killed")
    assert weights_of(root, "killed") == weights_of(root)
    assert values(seen, "loss") == {step: loss for step, loss in values(events, "loss").items() if step > 15}
    for name in ("steps", "tokens", "targets", "train_loss", "train_bits_per_byte", "validation", "skipped_updates"):
        assert resumed[name] == facts[name], name


def test_a_run_that_is_asked_to_stop_in_its_last_step_reports_the_validation_of_its_weights(finished):
    root, facts, _ = finished

    def preempted(kind, **fields):
        if kind == "progress" and fields["done"] == STEPS - 1:  # recorded while the last step runs
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = run(root, emit=preempted, name="stopped-at-the-end")
    assert weights_of(root, "stopped-at-the-end") == weights_of(root)
    assert stopped["validation"] == facts["validation"]
    assert run(root, name="stopped-at-the-end")["validation"] == facts["validation"]


@pytest.fixture
def copy(finished):
    """A copy of the finished run's checkpoints, without the weights."""
    root, _, _ = finished
    folder = root / "copy"
    shutil.copytree(root / "run" / "work", folder / "work")
    yield root
    shutil.rmtree(folder)


def test_a_finished_run_killed_before_it_was_published_only_writes(copy, monkeypatch):
    monkeypatch.setattr(Loader, "batch", None)
    facts = run(copy, name="copy")
    assert weights_of(copy, "copy") == weights_of(copy)
    assert facts["tokens_per_second"] is None  # not measured here
    assert facts["train_loss"] is not None


def test_a_damaged_newest_checkpoint_costs_only_time(copy, caplog):
    steps = copy / "copy" / "work" / "checkpoints" / "steps"
    assert sorted(path.name for path in steps.iterdir()) == ["20", "24"]
    victim = max((steps / "24").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    flip_byte(victim, 100)
    run(copy, name="copy")
    assert "checkpoint of step 24 is damaged" in caplog.text
    assert weights_of(copy, "copy") == weights_of(copy)


def test_checkpoints_of_another_run_are_refused(copy):
    with pytest.raises(
        ConfigError, match=r"made by another run: pretrain\.optimizer\.clip is 1\.0 there and 2\.0 here"
    ):
        run(copy, settings(optimizer={"learning_rate": 0.01, "warmup_steps": 2, "clip": 2.0}), name="copy")
    with pytest.raises(ConfigError, match=r"another run: seeds\.data is 0 there and 1 here"):
        run(copy, name="copy", seed=1)
    (copy / "web" / "index.json").rename(copy / "kept.json")
    try:
        write_tokens(copy / "web", 7)
        with pytest.raises(ConfigError, match=r"another run: data\.web is"):
            run(copy, name="copy")
    finally:
        shutil.rmtree(copy / "web")
        write_tokens(copy / "web", 0)


PHASE = {"name": "one", "tokens": 1000}
REFUSED = {
    r"pretrain\.phases is empty": {"phases": []},
    r"phases 'one': its mixture is empty": {"phases": [{**PHASE, "mixture": {}}]},
    r"phases 'one': its mixture names \['books'\], and the inputs are \['synth', 'web'\]": {
        "phases": [{**PHASE, "mixture": {"web": 1.0, "books": 1.0}}]
    },
    r"batch_rows 4 is not a multiple of pretrain\.micro_rows 3": {"micro_rows": 3},
    r"pretrain\.fsdp 3 does not divide the 1 devices": {"fsdp": 3},
    r"phases .one.: web hold \d+ training rows, fewer than one batch of pretrain\.batch_rows 999": {"batch_rows": 999},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_cannot_work_are_refused_at_once(finished, message):
    root, _, _ = finished
    with pytest.raises(ConfigError, match=message):
        run(root, settings(**REFUSED[message]), name="refused")


@pytest.mark.parametrize(
    ("rows", "micro", "devices", "expected"),
    [(16, 4, 1, 4), (16, 4, 8, 8), (16, None, 4, 16), (16, 16, 4, 16), (4, 2, 8, None)],
)
def test_every_device_has_a_row_at_once(rows, micro, devices, expected):
    config = settings(batch_rows=rows, micro_rows=micro)
    if rows >= devices:
        assert config.rows_at_once(devices) == expected
    else:
        with pytest.raises(ConfigError, match=r"does not divide among 8 devices"):
            config.rows_at_once(devices)


def test_a_model_that_does_not_fit_the_tokens_is_refused(finished):
    root, _, _ = finished

    def attempt(**changes):
        model = MODEL.model_copy(update=changes)
        folder = root / "refused"
        training.train(training.Pretraining(settings(), model, TOKENIZER, sources(root)), folder, folder, silent)

    with pytest.raises(ConfigError, match=r"model\.vocabulary 200 is smaller than the tokenizer's 261"):
        attempt(vocabulary=200)
    with pytest.raises(ConfigError, match=r"model\.context 16 is shorter than the rows of 32"):
        attempt(context=16)


def test_the_identity_leaves_out_how_sums_are_split(finished):
    root, _, _ = finished
    parts = [
        training.identity(training.Pretraining(settings(**change), MODEL, TOKENIZER, sources(root)))
        for change in ({}, {"micro_rows": 2, "save_every": 7, "log_every": 1})
    ]
    assert parts[0] == parts[1]
    assert json.loads(json.dumps(parts[0])) == parts[0]


def test_flops_are_twice_the_parameters_that_multiply():
    """Per token: two for each number of the matrices, the taps and the table, in addition to attention and memory."""
    model = tiny_config()
    leaves = jax.tree_util.tree_leaves_with_path(shapes(model)["blocks"])
    numbers = sum(leaf.size for path, leaf in leaves if leaf.ndim > 2 and path[-1].key not in ("theta", "integration"))
    flops = forward_flops(model, 64)
    attention = model.blocks * 4 * model.width * 32.5  # scores and values over half of the row
    rest = sum(flops.values()) - flops["mixing"] - attention
    assert rest == 2 * (numbers + model.vocabulary * model.width)
    assert training_flops(model, 64) == 3 * sum(flops.values())
