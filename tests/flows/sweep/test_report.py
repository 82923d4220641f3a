"""What a sweep reports: scores of each arm with intervals, paired tests over seeds, states, time and cost."""

import io
import json
import shutil

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from nautile.evals.scoring.intervals import paired, wilson
from nautile.evals.scoring.over_seeds import lead, summary
from nautile.flows.cli.document import OUTPUTS
from nautile.flows.cli.sweep import report_view
from nautile.flows.sweep.arms import planned, read_sweep
from nautile.flows.sweep.report import saved_sweeps, sweep_report
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_attempt_row
from tests.support.samples.recorded_runs import recorded_run
from tests.support.samples.stage_store import filled
from tests.support.stages.toy_stages import TOY


def rows(right, questions=range(40), benchmark="held_out"):
    """Lines of rows.jsonl, right on question n if `right(n)`."""
    lines = [
        {"benchmark": benchmark, "index": n, "id": str(n), "prompt_digest": str(n), "left_out": None}
        | {"strict": right(n), "lenient": True}
        for n in questions
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def evaluated(store, run, content, **facts):
    """Publish the evaluation by which a run is compared, by default that after self-distillation."""
    step = next(step for step in run.prepared.steps if step.label == (run.after or "evaluate:self_distill"))
    folder = filled(store.staging(step.key) / "output", {"rows.jsonl": content})
    given = {"stage": "evaluate", "version": 1, "config": {}, "inputs": {}, "facts": facts}
    return store.publish("evaluation", step.key, folder, label=step.label, **given)


@pytest.fixture
def sweep_of(store, tmp_path, toy_stages):
    def call(text):
        (tmp_path / "try.toml").write_text(f'config = "{TOY}"\n{text}', encoding="utf-8")
        return read_sweep(tmp_path / "try.toml", store)

    return call


@pytest.fixture
def report_of(store):
    def call(sweep, where=store):
        catalog = Catalog(where)
        catalog.ingest()
        with catalog.reading() as read:
            report = sweep_report(where, sweep.record(), read)
        TypeAdapter(OUTPUTS["sweep"]).validate_json(json.dumps(report), strict=True)
        return report

    return call


def text_of(report, width=160):
    console = Console(width=width, file=io.StringIO())
    console.print(report_view(report), crop=False)
    return console.file.getvalue()


GRID = '[grid]\n"reason.policy.steps" = [3, 30, 300]\n'


def test_arms_are_tested_against_the_first_on_the_same_questions(store, sweep_of, report_of):
    sweep = sweep_of(GRID)
    evaluated(store, sweep.runs[0], rows(lambda n: n < 20))
    evaluated(store, sweep.runs[1], rows(lambda n: 2 <= n < 36, range(42)))
    report = report_of(sweep)
    (metric,) = report["metrics"]
    first, second, third = metric["arms"]
    assert (first["accuracy"], first["lead"], first["n"]) == (0.5, None, 40)
    assert (first["low"], first["high"]) == wilson(20, 40)
    expected = paired([n < 20 for n in range(40)], [2 <= n < 36 for n in range(40)])
    assert (second["lead"], second["p"], second["n"], second["common"]) == (expected.lead, expected.p, 42, 40)
    assert second["significant"] is True
    assert third["accuracy"] is third["p"] is third["significant"] is None  # missing is not zero
    text = text_of(report)
    assert "Held-out problems, strict, after self_distill" in text
    assert "not measured" in text
    assert f"{expected.p:.3g} *" in text
    assert max(map(len, text_of(report, 80).splitlines())) <= 80


def test_a_benchmark_that_an_arm_was_not_screened_for_is_marked(store, sweep_of, report_of):
    sweep = sweep_of(GRID)
    evaluated(store, sweep.runs[0], rows(lambda n: n < 20))
    evaluated(store, sweep.runs[1], rows(lambda n: n < 20), not_screened={"held_out": "not at all"})
    report = report_of(sweep)
    assert report["metrics"][0]["title"] == "Held-out problems (not screened for)"
    assert "Held-out problems (not screened for), strict" in text_of(report)


def test_the_command_prints_the_report_as_json_alone(store, sweep_of, command_line, monkeypatch, tmp_path):
    evaluated(store, sweep_of(GRID).runs[0], rows(lambda n: n < 20))
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    code, out, _ = command_line("sweep", str(tmp_path / "try.toml"), "--report", "--json")
    assert code == 0
    assert json.loads(out)["metrics"][0]["arms"][0]["accuracy"] == 0.5


def test_an_arm_may_be_compared_by_another_evaluation(store, sweep_of, report_of):
    """As supervised training continued, whose last evaluation is that after the pretraining."""
    sweep = sweep_of(
        '[[arms]]\nname = "a"\n[[arms]]\nname = "b"\nset = ["pretrain.batch_rows=2"]\nafter = "pretrain"\n'
    )
    evaluated(store, sweep.runs[0], rows(lambda n: n < 20))
    evaluated(store, sweep.runs[1], rows(lambda n: n < 30))
    report = report_of(sweep)
    a, b = report["metrics"][0]["arms"]
    assert (a["accuracy"], a["after"], b["accuracy"], b["after"]) == (0.5, None, 0.75, "pretrain")
    assert b["lead"] == 0.25
    assert "b (after pretrain)" in text_of(report)


SEEDED = '[[arms]]\nname = "a"\n[[arms]]\nname = "b"\nset = ["reason.policy.steps=9"]\n'


def test_seeds_of_an_arm_are_paired_and_tested_over_seeds(store, sweep_of, report_of):
    sweep = sweep_of("seeds = [1, 2, 3]\n" + SEEDED)
    right = {"a": (10, 20, 12), "b": (16, 20, 24)}
    runs = {(run.arm, run.seed): run for run in sweep.runs}
    for arm, seed in (("a", 1), ("a", 2), ("b", 1)):
        evaluated(store, runs[arm, seed], rows(lambda n, count=right[arm][seed - 1]: n < count))
    report = report_of(sweep)
    a, b = report["metrics"][0]["arms"]
    assert (a["accuracy"], a["n"], a["seeds"], a["over"]) == (15 / 40, 40, 2, "seeds")
    assert (b["seeds"], b["over"], b["lead"]) == (1, "problems", 6 / 40)  # over the seed that both have
    assert (b["lead_over"], b["common_seeds"], b["detectable"]) == ("problems", 1, None)
    assert b["p"] == paired([1.0] * 10 + [0.0] * 30, [1.0] * 16 + [0.0] * 24).p
    assert "With one seed, over problems; says nothing about another seed" in " ".join(text_of(report).split())

    for arm, seed in (("a", 3), ("b", 2), ("b", 3)):
        evaluated(store, runs[arm, seed], rows(lambda n, count=right[arm][seed - 1]: n < count))
    report = report_of(sweep)
    a, b = report["metrics"][0]["arms"]
    accuracies = {arm: {seed: count / 40 for seed, count in enumerate(counts, 1)} for arm, counts in right.items()}
    expected = summary(accuracies["b"])
    assert (b["accuracy"], b["deviation"]) == pytest.approx((expected.mean, expected.deviation))
    assert (b["low"], b["high"]) == pytest.approx((expected.low, expected.high))
    test = lead(accuracies["a"], accuracies["b"])  # here the seeds spread by more than the problems' noise
    assert (b["lead"], b["p"], b["lead_deviation"]) == pytest.approx((test.lead, test.p, test.deviation))
    assert b["p_corrected"] == b["p"]  # one test in the report
    assert (b["lead_low"], b["lead_high"], b["detectable"]) == pytest.approx((test.low, test.high, test.detectable))
    assert (b["lead_over"], b["common_seeds"]) == ("seeds", 3)
    text = text_of(report)
    assert "over seeds: the mean and its t interval" in " ".join(text.split())
    assert f"{100 * test.lead:+.1f} [" in text
    assert "McNemar" not in text
    assert max(map(len, text_of(report, 80).splitlines())) <= 80


def test_a_mean_of_benchmarks_is_tested_over_seeds_as_well(store, sweep_of, report_of):
    sweep = sweep_of("seeds = [1, 2, 3]\n" + SEEDED)
    for run in sweep.runs:
        ahead = 8 if run.arm == "b" else 0
        evaluated(
            store,
            run,
            rows(lambda n, count=20 + run.seed + ahead: n < count, range(200), "arc_easy")
            + rows(lambda n, count=5 + 2 * run.seed: n < count, range(100), "arc_challenge"),
        )
    tables = {table["benchmark"]: table["arms"][1] for table in report_of(sweep)["metrics"]}
    assert set(tables) == {"arc_challenge", "arc_easy", "arc"}
    assert tables["arc"]["lead"] == pytest.approx(8 / 200 / 2)
    assert tables["arc"]["lead_deviation"] == pytest.approx(0.0)
    assert 0 < tables["arc"]["p"] < 1  # seeds that agree to the last question are not certainty
    assert tables["arc_challenge"]["p"] == 1.0
    assert tables["arc"]["p_corrected"] >= tables["arc"]["p"]


def test_an_arm_with_one_seed_has_the_spread_of_its_recipes_other_seeds_beside_it(store, sweep_of, report_of):
    """The other seeds are of runs outside the sweep, which the catalog knows by their plans."""
    sweep = sweep_of(SEEDED)
    a, b = sweep.runs
    evaluated(store, a, rows(lambda n: n < 10))
    evaluated(store, b, rows(lambda n: n < 20))
    recorded_run(store, a.run_name, a.config.model_dump(mode="json"), "evaluate:self_distill", 0.25)
    for seed, accuracy in ((7, 0.5), (8, 0.6)):
        settings = {**a.config.model_dump(mode="json"), "seed": seed, "name": f"run-{seed}"}
        settings["retention"] = {"keep": seed}  # in no key, so the same recipe
        recorded_run(store, f"run-{seed}", settings, "evaluate:self_distill", accuracy)
    other_recipe = {**a.config.model_dump(mode="json"), "seed": 9}
    other_recipe["reason"]["policy"]["steps"] = 77
    recorded_run(store, "another", other_recipe, "evaluate:self_distill", 0.9)
    report = report_of(sweep)
    first, second = report["metrics"][0]["arms"]
    assert first["recipe_seeds"]["seeds"] == [str(a.config.seed), "7", "8"]
    assert first["recipe_seeds"]["mean"] == pytest.approx(0.45)
    assert second["recipe_seeds"] is None
    text = " ".join(text_of(report).split())
    assert "a: 3 seeds of this recipe in the store, mean 45.0 % [" in text
    assert "standard deviation 18.0 points" in text


def test_states_time_and_cost_of_the_runs(made, tmp_path, toy_stages, report_of):
    store = Store(shutil.copytree(made[0].root, tmp_path / "copy"))
    text = 'after = "reason"\n[[arms]]\nname = "as it is"\n[[arms]]\nname = "fewer"\nset = ["reason.policy.steps=1"]\n'
    (tmp_path / "try.toml").write_text(f'config = "{TOY}"\n{text}', encoding="utf-8")
    sweep = read_sweep(tmp_path / "try.toml", store)
    plan = planned(sweep, store)
    TypeAdapter(OUTPUTS["sweep --dry-run"]).validate_python(plan, strict=True)
    assert plan["runs"][0]["computed"] == []
    assert len(plan["runs"][1]["reused"]) == 9
    reason = next(step for step in sweep.runs[1].prepared.steps if step.label == "reason")
    row = {"id": "r", "run": "run-2", "config": "try.fewer", "stage": "reason", "label": "reason", "key": reason.key}
    row |= {"execution": "e", "attempt": 1, "state": "failed", "reused": False, "error": "no memory\nmore"}
    write_attempt_row(store, row | {"started": now(), "ended": now(), "seconds": 1.0})
    report = report_of(sweep, store)
    done, failed = report["arms"]
    assert (done["state"], done["made"], done["steps"], done["seconds"]) == ("done", 14, 14, 21.0)
    assert done["dollars"] == done["own_dollars"] == pytest.approx(0.03)
    assert (failed["state"], failed["made"], failed["run"]) == ("failed", 9, "run-2")
    assert (failed["error"], failed["own_seconds"], failed["own_dollars"]) == ("reason: no memory", None, None)
    assert "fewer failed in reason: no memory" in text_of(report)
    sweep.save(store)
    saved = saved_sweeps(store)["try"]
    begun = [run.pop("begun") for run in saved["runs"]]
    assert saved == sweep.record()
    sweep.save(store)
    assert [run["begun"] for run in saved_sweeps(store)["try"]["runs"]] == begun  # of what it was resumed with
