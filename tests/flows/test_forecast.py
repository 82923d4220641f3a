"""What paid endpoints will cost, before they are asked: by configured limits first, then by measured lengths."""

import io
import re

import pytest
from rich.console import Console

from nautile.configs.load import load
from nautile.flows.dag import build_dag, pipeline_steps
from nautile.flows.forecast import forecast_calls, forecast_lines
from nautile.flows.run import print_forecast
from nautile.flows.selection import PreparedRun, Selection
from nautile.store.events import EventWriter

CONFIG = load("nautile_370m")
FIRST = round(CONFIG.distill.prompts * CONFIG.distill.teachers[0].up_to)  # requests to the first teacher


@pytest.fixture(scope="module")
def steps():
    return pipeline_steps(CONFIG)


def rows_of(steps, store):
    return {(row.label, row.endpoint): row for row in forecast_calls(steps, store)}


def test_without_a_measured_reply_it_is_the_most_that_the_configuration_allows(steps, store):
    rows = rows_of(steps, store)
    teachers = [row for (label, _), row in rows.items() if label == "distill"]
    assert sum(row.requests for row in teachers) == CONFIG.distill.prompts
    assert [row.endpoint for row in teachers] == [teacher.endpoint for teacher in CONFIG.distill.teachers]
    first = teachers[0]
    assert (first.requests, first.measured, first.budget_dollars) == (FIRST, 0, 5000.0)
    assert first.tokens_out == FIRST * CONFIG.distill.max_tokens
    low, expected, high = first.dollars
    assert low == expected == high == pytest.approx((first.tokens_in * 0.05 + first.tokens_out * 0.20) / 1e6)
    align = CONFIG.align
    judge = rows["align", align.judge.endpoint]
    completions = align.policy.steps * align.rollout.prompts * align.rollout.group
    assert judge.requests == completions + align.judge.calibration_items + align.judge.hostile_items
    assert {f"evaluate:{model.endpoint}" for model in CONFIG.evaluate.models} <= {label for label, _ in rows}
    lines = forecast_lines(forecast_calls(steps, store))
    assert f"{FIRST:,} requests" in lines[1]
    unmeasured = r"\$[\d,.]+( to \$[\d,.]+)? if every reply is as long as it may be; none is measured yet"
    assert re.search(rf"out: {unmeasured}; the step's budget is \$5,000.00$", lines[1])
    judged = next(line for line in lines if line.startswith("  align"))
    assert re.search(rf"out: {unmeasured}$", judged), "refilled groups ask again"
    assert " to $" in judged
    assert re.fullmatch(rf"  in all {unmeasured}", lines[-1])


def test_measured_lengths_give_the_cost_and_its_spread(steps, store):
    emit = EventWriter(store.root / "events" / "calls.jsonl", "e", stage="distill")
    call = {"endpoint": "another name", "model": "openai/gpt-oss-20b", "purpose": "teacher", "status": "ok"}
    for tokens_out in range(0, 1001, 100):
        emit("call", **call, cached=False, tokens_in=1000, tokens_out=tokens_out, dollars=0.1)
    emit("call", **call, cached=True, tokens_in=9000, tokens_out=9000, dollars=0.0)
    emit("call", **{**call, "status": "500"}, cached=False, dollars=0.0)
    emit.close()
    row = rows_of(steps, store)["distill", "gpt_oss_20b"]
    assert row.measured == 11
    assert (row.tokens_in, row.tokens_out) == (FIRST * 1000, FIRST * 500)
    assert row.dollars == pytest.approx([FIRST * (1000 * 0.05 + out * 0.20) / 1e6 for out in (100, 500, 900)])
    text = "\n".join(forecast_lines(forecast_calls(steps, store)))
    assert "$103.80 ($48.44 to $159.16) by 11 measured replies" in text
    assert text.endswith("by 11 measured replies, others as long as they may be"), "not all of the sum is measured"


def test_a_run_prints_it_before_the_first_call(store):
    for config, printed in ((CONFIG, ["expected calls", "distill, gpt_oss_20b (teacher)"]), (load("local"), [])):
        out = Console(file=io.StringIO(), width=300)
        print_forecast(out, PreparedRun("x.toml", Selection(), build_dag(config), set()), store)
        text = out.file.getvalue()
        assert all(words in text for words in printed)
        assert bool(text) == bool(printed)
