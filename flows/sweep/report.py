"""The report of a sweep: each arm's scores with intervals, its paired test against the first arm, its time and cost.

It is made from the record of a sweep (`Sweep.record`), from artifacts by their keys, and from the catalog; while the
sweep runs, it covers the finished arms. The verdict of an arm on a question is its mean over seeds: a problem with
several seeds counts as one problem. Values that were not measured are None. Two arms are compared on common seeds.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import NormalDist, fmean, variance
from typing import Any

from common.errors import ConfigError
from common.files import read_json
from evals.running.rows import SampleRow, read_rows
from evals.scoring.comparison import mean_weights
from evals.scoring.intervals import LEVEL, bootstrap_mean, holm, paired, paired_bootstrap, wilson
from evals.scoring.scores import by_question, title_of, vote
from flows.sweep.arms import FOLDER
from store.artifacts import Store
from store.catalog import CatalogRow

Query = Callable[..., list[CatalogRow]]  # SQL and its parameters -> rows
Record = dict[str, Any]
Votes = dict[tuple[str, str], float]  # id and digest of a question -> vote
WAYS = {"generate": "rows.jsonl", "likelihood": "likelihood.jsonl"}
Z = 1.96  # of a normal 95 % interval

_LAST = """
SELECT key, state, error FROM runs WHERE list_contains(?, key) AND NOT reused
QUALIFY row_number() OVER (PARTITION BY key ORDER BY started DESC, time DESC) = 1
"""
SECONDS = """
SELECT execution, sum(seconds) AS seconds FROM runs WHERE list_contains(?, execution) AND NOT reused GROUP BY execution
"""
DOLLARS = """
SELECT execution, sum(dollars) AS dollars FROM calls WHERE list_contains(?, execution) GROUP BY execution
"""
_RUN = """
SELECT run FROM runs WHERE config = ? AND run IS NOT NULL ORDER BY started DESC LIMIT 1
"""


def saved_sweeps(store: Store) -> dict[str, Record]:
    """The records of the sweeps of this store by name, newest first."""
    paths = sorted((store.root / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return {path.stem: record for path in paths if isinstance(record := read_json(path), dict)}


def sweep_report(store: Store, record: Record, query: Query) -> dict[str, Any]:
    """The report as plain data: `arms` (a row per run) and `metrics` (per benchmark a row per arm)."""
    runs = _run_rows(store, record, query)
    return {
        **{name: record[name] for name in ("name", "file", "config", "verdict", "way")},
        "after": record["after"].partition(":")[2],
        "arms": runs,
        "metrics": _metrics(store, record),
    }


def _run_rows(store: Store, record: Record, query: Query) -> list[dict[str, Any]]:
    """State, time and cost of each run. `own_*`: of the steps that no run before it in the list has."""
    # Everything is looked up by key, never by run: an arm that another run has made is as finished as one of its own.
    keys = sorted({step["key"] for run in record["runs"] for step in run["steps"]})
    last = {row["key"]: row for row in query(_LAST, keys)}
    executions = {key: execution for key in keys if (execution := _execution(store, record, key))}
    execution_ids = sorted(set(executions.values()))
    seconds = {row["execution"]: row["seconds"] for row in query(SECONDS, execution_ids)}
    dollars = {row["execution"]: row["dollars"] for row in query(DOLLARS, execution_ids)}
    rows, known_keys = [], set[str]()
    for run in record["runs"]:
        # The first run of the list that has a step carries its cost, so that the own costs add up to the cost of the
        # sweep.
        own_keys = {step["key"] for step in run["steps"]} - known_keys
        known_keys |= own_keys
        state, error = _state(store, run, executions, last)
        row = {
            **{name: run[name] for name in ("arm", "seed", "settings")},
            "state": state,
            "error": error,
            "run": next((row["run"] for row in query(_RUN, run["name"])), None),
            "steps": len(run["steps"]),
            "made": sum(step["key"] in executions for step in run["steps"]),
        }
        for name, amount_of in (("seconds", seconds), ("dollars", dollars)):
            for prefix, step_keys in (("", {step["key"] for step in run["steps"]}), ("own_", own_keys)):
                amounts = [amount_of.get(executions[key]) for key in step_keys if key in executions]
                # Without any known amount the sum is None and not 0: nobody has measured it.
                known = [amount for amount in amounts if amount is not None]
                row[prefix + name] = sum(known) if known else None
        rows.append(row)
    return rows


def _execution(store: Store, record: Record, key: str) -> str | None:
    """The execution that made all outputs of a step; None if they are not all in the store."""
    outputs = next(step["outputs"] for run in record["runs"] for step in run["steps"] if step["key"] == key)
    try:
        artifacts = [store.find(kind, key) for kind in outputs]
    except ConfigError:
        return None  # damaged: it will be made again
    return artifacts[0].execution if artifacts[0] and all(artifacts) else None


def _state(
    store: Store, run: Mapping[str, Any], executions: Mapping[str, str], last: Mapping[str, CatalogRow]
) -> tuple[str, str | None]:
    """The state of a run (done, running, failed, interrupted or not made), and the first line of its error."""
    unfinished = [step for step in run["steps"] if step["key"] not in executions]
    if not unfinished:
        return "done", None
    if any(store.lock(step["key"]).held_elsewhere() for step in unfinished):
        return "running", None
    # The first failed step in the order of the DAG: those after it failed because of it, or did not start.
    for step in unfinished:
        row = last.get(step["key"])
        if row and row["state"] == "failed":
            return "failed", f"{step['label']}: {(row['error'] or 'no reason was recorded').splitlines()[0]}"
    begun = any((store.root / "staging" / step["key"]).is_dir() for step in unfinished)
    return ("interrupted" if begun else "not made"), None


def _metrics(store: Store, record: Record) -> list[dict[str, Any]]:
    """A table for each benchmark and for the means: those of the record, or all in order of name."""
    votes = _votes_by_arm(store, record)
    arms = list(votes)
    evaluations: dict[str, list[str]] = {arm: [] for arm in arms}  # keys, in the order of the seeds
    for run in record["runs"]:
        evaluations[run["arm"]] += [step["key"] for step in run["steps"] if step["label"] == record["after"]]
    # Equal keys of all evaluations: the settings of the arm do not reach what is evaluated, so a test would compare an
    # evaluation with itself.
    same = {arm: arm != arms[0] and evaluations[arm] == evaluations[arms[0]] for arm in arms}
    measured = {name for seeds in votes.values() for benchmarks in seeds.values() for name in benchmarks}
    means = mean_weights(measured)
    names = record["benchmarks"] or [*sorted(measured), *means]
    tables = []
    for name in names:
        weights = means.get(name, {name: 1.0})
        rows = [
            {
                "same": same[arm],
                **_metric_row(arm, votes[arm], votes[arms[0]], weights, arm != arms[0] and not same[arm]),
            }
            for arm in arms
        ]
        tables.append({"benchmark": name, "title": title_of(name), "arms": rows})
    tests = {
        (table["benchmark"], row["arm"]): row["p"] for table in tables for row in table["arms"] if row["p"] is not None
    }
    corrected = holm(tests)  # over all tests of the report
    for table in tables:
        for row in table["arms"]:
            row["significant"] = None if row["p"] is None else corrected[table["benchmark"], row["arm"]] < LEVEL
    return tables


def _votes_by_arm(store: Store, record: Record) -> dict[str, dict[int | None, dict[str, Votes]]]:
    """Arm -> seed -> benchmark -> the votes by question; runs without an evaluation are missing."""
    votes: dict[str, dict[int | None, dict[str, Votes]]] = {run["arm"]: {} for run in record["runs"]}
    for run in record["runs"]:
        key = next(step["key"] for step in run["steps"] if step["label"] == record["after"])
        try:
            artifact = store.find("evaluation", key)
        except ConfigError:
            continue  # damaged: the run is not finished
        path = artifact.path / WAYS[record["way"]] if artifact else None
        if path and path.is_file():
            votes[run["arm"]][run["seed"]] = question_votes(read_rows(path), record["verdict"])
    return votes


def question_votes(rows: Sequence[SampleRow], verdict: str) -> dict[str, Votes]:
    """Benchmark -> the votes by question, without questions that were left out."""
    votes: dict[str, Votes] = defaultdict(dict)
    for question in by_question(row for row in rows if row["left_out"] is None):
        first = question[0]
        votes[first["benchmark"]][first["id"], first["prompt_digest"]] = vote(question, verdict)
    return votes


def _pooled(seeds: Mapping[int | None, Mapping[str, Votes]], which: Iterable[int | None], benchmark: str) -> Votes:
    """The votes on a benchmark's questions, averaged over the seeds `which`."""
    votes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in which:
        for question, value in seeds[seed].get(benchmark, {}).items():
            votes[question].append(value)
    return {question: fmean(values) for question, values in votes.items()}


def _metric_row(
    arm: str,
    own: Mapping[int | None, Mapping[str, Votes]],
    first: Mapping[int | None, Mapping[str, Votes]],
    weights: Mapping[str, float],
    tested: bool,
) -> dict[str, Any]:
    """The accuracy of an arm on a benchmark or on a mean of several, and if `tested`, its lead over the first arm."""
    row: dict[str, Any] = {"arm": arm, "seeds": 0, "n": 0}
    row |= dict.fromkeys(("accuracy", "low", "high", "common", "lead", "lead_low", "lead_high", "p"))
    groups = [list(_pooled(own, own, name).values()) for name in weights]
    # A mean of benchmarks needs all of them: without one it would be a mean of something else.
    if not all(groups):
        return row
    shares = list(weights.values())
    accuracy = sum(weight * fmean(group) for weight, group in zip(shares, groups, strict=True))
    if len(groups) == 1:
        low, high = wilson(sum(groups[0]), len(groups[0]))
    else:
        low, high = bootstrap_mean(groups, weights=shares)
    row |= {"seeds": len(own), "n": sum(map(len, groups)), "accuracy": accuracy, "low": low, "high": high}
    # Only seeds that both arms have: each arm is compared with the other at the same seed, while the sweep may still
    # run.
    seeds = [seed for seed in own if seed in first]
    if not tested or not seeds:
        return row
    pairs = []
    for name in weights:
        before, after = _pooled(first, seeds, name), _pooled(own, seeds, name)
        common = [question for question in before if question in after]
        pairs.append(([before[question] for question in common], [after[question] for question in common]))
    if all(before for before, _ in pairs):
        row |= paired_lead(pairs, shares, several=len(seeds) > 1)
    return row


def paired_lead(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], weights: Sequence[float], several: bool
) -> dict[str, Any]:
    """The weighted lead of the second votes of each pair over the first, with its 95 % interval and p value.

    With one seed: McNemar's exact test and its interval, as in `nautile compare`. With `several` seeds votes are
    between 0 and 1: p is the exact sign test over questions, and the interval is that of the mean difference over
    questions (normal approximation). For a mean of benchmarks, p is from the same normal distribution.
    """
    common = sum(len(a) for a, _ in pairs)
    if not several:
        if len(pairs) == 1:
            test = asdict(paired(*pairs[0]))
            lead, low, high, p = (test[name] for name in ("lead", "low", "high", "p"))
        else:
            lead, low, high, p = paired_bootstrap(pairs, weights)
        return {"common": common, "lead": lead, "lead_low": low, "lead_high": high, "p": p}
    differences = [[y - x for x, y in zip(a, b, strict=True)] for a, b in pairs]
    lead = sum(weight * fmean(values) for weight, values in zip(weights, differences, strict=True))
    # As in the interval of one seed, one more disagreement than was observed: no spread in 20 questions must not give
    # an interval of width zero.
    spreads = (
        weight**2 * ((variance(values) * len(values) if len(values) > 1 else 0.0) + 1) / len(values) ** 2
        for weight, values in zip(weights, differences, strict=True)
    )
    error = math.sqrt(sum(spreads))
    p = paired(*pairs[0]).p if len(pairs) == 1 else 2 * NormalDist().cdf(-abs(lead) / error)
    low, high = max(-1.0, lead - Z * error), min(1.0, lead + Z * error)
    return {"common": common, "lead": lead, "lead_low": low, "lead_high": high, "p": p}
