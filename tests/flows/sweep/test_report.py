"""What a sweep reports: scores of each arm with intervals, paired tests over seeds, states, time and cost."""

import io
import json
import shutil

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from evals.scoring.intervals import paired, wilson
from flows.cli.document.outputs import OUTPUTS
from flows.cli.many.sweep import planned, report_view
from flows.sweep.arms import read_sweep
from flows.sweep.report import paired_lead, saved_sweeps, sweep_report
from store.artifacts import Store
from store.catalog import Catalog
from store.manifest import now
from tasks.engine.attempt_log import write_attempt_row
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


def evaluated(store, run, content):
    """Publish the evaluation of a run after self-distillation."""
    step = next(step for step in run.prepared.steps if step.label == "evaluate:self_distill")
    folder = filled(store.staging(step.key) / "output", {"rows.jsonl": content})
    given = {"stage": "evaluate", "version": 1, "config": {}, "inputs": {}, "facts": {}}
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
        report = sweep_report(where, sweep.record(), lambda sql, *given: catalog.query(sql, given))
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


def test_seeds_of_an_arm_are_one_vote_a_question_and_paired_by_seed(store, sweep_of, report_of):
    sweep = sweep_of('seeds = [1, 2]\n[[arms]]\nname = "a"\n[[arms]]\nname = "b"\nset = ["reason.policy.steps=9"]\n')
    a1, a2, b1, b2 = sweep.runs
    evaluated(store, a1, rows(lambda n: n < 10))
    evaluated(store, a2, rows(lambda n: n < 20))
    evaluated(store, b1, rows(lambda n: n < 16))
    (metric,) = report_of(sweep)["metrics"]
    a, b = metric["arms"]
    assert (a["accuracy"], a["n"], a["seeds"]) == (15 / 40, 40, 2)
    assert (b["lead"], b["seeds"]) == (6 / 40, 1)  # over the seed that both have
    evaluated(store, b2, rows(lambda n: n < 22))
    _, b = report_of(sweep)["metrics"][0]["arms"]
    assert b["lead"] == pytest.approx(4 / 40)
    assert b["lead_low"] < 4 / 40 < b["lead_high"]
    assert b["p"] == paired([0.0] * 8, [0.5] * 8).p  # on eight questions it has the higher vote, on none the lower


def test_an_interval_over_seeds_is_that_of_the_mean_difference():
    votes = [(0.0, 0.5)] * 300 + [(0.5, 0.0)] * 100 + [(1.0, 1.0)] * 600
    before, after = zip(*votes, strict=True)
    lead = paired_lead([(before, after)], [1.0], several=True)
    assert lead["lead"] == pytest.approx(0.1)
    assert (lead["lead_low"], lead["lead_high"]) == pytest.approx((0.0813, 0.1187), abs=2e-3)
    same = paired_lead([([1.0] * 20, [1.0] * 20)], [1.0], several=True)
    assert same["lead_low"] < 0 < same["lead_high"]  # no difference in twenty questions is not certainty
    assert same["p"] == 1.0
    both = paired_lead([(before, after), ([0.0] * 50, [1.0] * 50)], [0.5, 0.5], several=True)
    assert both["lead"] == pytest.approx(0.55)
    assert both["p"] < 1e-6


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
    assert saved_sweeps(store) == {"try": sweep.record()}
