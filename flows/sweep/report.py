"""The report of a sweep: each arm's scores with intervals, its paired test against the first arm, its time and cost.

It is made from the record of a sweep (`Sweep.record`), from artifacts by their keys, and from the catalog; while the
sweep runs, it covers the finished arms. With several seeds everything is over seeds, and two arms are compared on the
seeds that both have (`evals.scoring.over_seeds`); with one seed intervals and tests are over problems, and say so.
Values that were not measured are None. The terminal and the dashboard show its sentences and cells.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import dollars, duration
from nautile.evals.benchmarks.registry import title_of
from nautile.evals.running.rows import WAYS, SampleRow, read_rows
from nautile.evals.scoring.comparison import mean_weights
from nautile.evals.scoring.intervals import LEVEL, OVER_PROBLEMS, holm, wilson_mean
from nautile.evals.scoring.over_seeds import SeedLead, lead_of_votes, summary_of_shares
from nautile.evals.scoring.scores import by_question, marked_title, vote
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog, CatalogRow
from nautile.store.views import LAST_ATTEMPTS, SPENT
from nautile.tasks.reporting.other_seeds import Accuracies, accuracies_by_seed, spread, spread_in_words

Query = Callable[..., list[CatalogRow]]  # SQL and its parameters -> rows
Record = dict[str, Any]
Votes = dict[tuple[str, str], float]  # id and digest of a question -> vote

_RUN = "SELECT run FROM runs WHERE config = ? ORDER BY newest DESC LIMIT 1"


def saved_sweeps(store: Store) -> dict[str, Record]:
    """The records of the sweeps of this store by name, newest first."""
    paths = sorted(store.sweeps.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return {path.stem: record for path in paths if isinstance(record := read_json(path), dict)}


def sweep_report(store: Store, record: Record, query: Query) -> dict[str, Any]:
    """The report as plain data: `arms` (a row per run) and `metrics` (per benchmark a row per arm)."""
    runs = _run_rows(store, record, query)
    return {
        **{name: record[name] for name in ("name", "file", "config", "verdict", "way")},
        "after": record["after"].partition(":")[2],
        "arms": runs,
        "metrics": _metrics(store, record, query),
    }


def report_of(store: Store, record: Record) -> dict[str, Any]:
    """`sweep_report` of what the store has recorded until now. Raises `ConfigError` if there is no store."""
    store.refresh(events=True)
    if not store.root.exists():
        command = shell_command("nautile", "sweep", record["file"])
        raise ConfigError(f"no store at {store.root}: `{command}` creates it, NAUTILE_STORE names another")
    catalog = Catalog(store)
    catalog.catch_up()
    return sweep_report(store, record, lambda sql, *parameters: catalog.query(sql, parameters))


def _run_rows(store: Store, record: Record, query: Query) -> list[dict[str, Any]]:
    """State, time and cost of each run. `own_*`: of the steps that no run before it in the list has."""
    # Everything is looked up by key, never by run: an arm that another run has made is as finished as one of its own.
    keys = sorted({step["key"] for run in record["runs"] for step in run["steps"]})
    last = {row["key"]: row for row in query(LAST_ATTEMPTS, keys)}
    executions = {key: execution for key in keys if (execution := _execution(store, record, key))}
    execution_ids = sorted(set(executions.values()))
    spent = {row["execution"]: row for row in query(SPENT, execution_ids)}
    rows, known_keys = [], set[str]()
    for run in record["runs"]:
        # The first run that has a step carries its cost, so that the own costs add up to that of the sweep.
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
        for name in ("seconds", "dollars"):
            for prefix, step_keys in (("", {step["key"] for step in run["steps"]}), ("own_", own_keys)):
                amounts = [spent.get(executions[key], {}).get(name) for key in step_keys if key in executions]
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
    return artifacts[0].recorded_execution if artifacts[0] and all(artifacts) else None


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
    begun = any(store.staging_files(step["key"]).folder.is_dir() for step in unfinished)
    return ("interrupted" if begun else "not made"), None


def _metrics(store: Store, record: Record, query: Query) -> list[dict[str, Any]]:
    """A table for each benchmark and for the means: those of the record, or all in order of name."""
    votes = _votes_by_arm(store, record)
    arms = list(votes)
    evaluations: dict[str, list[str]] = {arm: [] for arm in arms}  # keys, in the order of the seeds
    for run in record["runs"]:
        evaluations[run["arm"]] += [step["key"] for step in run["steps"] if step["label"] == run["after"]]
    # With equal keys the settings do not reach what is evaluated: a test would compare an evaluation with itself.
    same = {arm: arm != arms[0] and evaluations[arm] == evaluations[arms[0]] for arm in arms}
    measured = {name for seeds in votes.values() for benchmarks in seeds.values() for name in benchmarks}
    means = mean_weights(measured)
    names = record["benchmarks"] or [*sorted(measured), *means]
    recipes = _recipes(record, votes, query)
    unscreened = _not_screened(store, record)
    afters = {run["arm"]: run["after"] for run in record["runs"]}
    tables = []
    pairs: dict[tuple[str, str], VotePair] = {}
    for name in names:
        weights = means.get(name, {name: 1.0})
        rows = []
        for arm in arms:
            after = afters[arm].partition(":")[2] if afters[arm] != record["after"] else None
            row = {"arm": arm, "after": after, "same": same[arm], **_score(votes[arm], weights), **dict.fromkeys(_LEAD)}
            row["recipe_seeds"] = spread(recipes[arm], afters[arm], name) if row["seeds"] == 1 else None
            if arm != arms[0] and not same[arm] and (pair := _pair(votes[arms[0]], votes[arm], weights)):
                pairs[name, arm] = pair
            rows.append(row)
        title = marked_title({"title": title_of(name), "not_screened": unscreened & weights.keys()})
        tables.append({"benchmark": name, "title": title, "arms": rows})
    tests = {
        place: lead_of_votes(pair.first, pair.other, pair.weights, len(pairs), pair.seeds)
        for place, pair in pairs.items()
    }
    corrected = holm({place: test.p for place, test in tests.items() if test.p is not None})
    for table in tables:
        for row in table["arms"]:
            if test := tests.get(place := (table["benchmark"], row["arm"])):
                row |= _lead_fields(pairs[place], test, corrected[place])
    return tables


_LEAD = (
    *("common", "common_seeds", "lead", "lead_low", "lead_high", "lead_over", "lead_deviation"),
    *("p", "p_corrected", "significant", "detectable"),
)


def _lead_fields(pair: "VotePair", test: SeedLead, corrected: float) -> dict[str, Any]:
    return {
        "common": pair.questions,
        "common_seeds": len(test.seeds),
        "lead": test.lead,
        "lead_low": None if test.low is None else max(-1.0, test.low),
        "lead_high": None if test.high is None else min(1.0, test.high),
        "lead_over": test.over,
        "lead_deviation": test.deviation,
        "p": test.p,
        "p_corrected": corrected,
        "significant": corrected < LEVEL,
        "detectable": test.detectable,
    }


def _recipes(record: Record, votes: Mapping[str, Mapping[int | None, Any]], query: Query) -> dict[str, Accuracies]:
    """The accuracies of other seeds in the catalog, of each arm of which one seed is measured."""
    runs = {run["arm"]: run["name"] for run in record["runs"] if run["seed"] in votes[run["arm"]]}
    ids = {
        arm: next((row["run"] for row in query(_RUN, name)), None) for arm, name in runs.items() if len(votes[arm]) == 1
    }
    how = record["verdict"], record["way"]
    return {arm: accuracies_by_seed(query, ids.get(arm), *how) for arm in votes}


def _not_screened(store: Store, record: Record) -> set[str]:
    """The benchmarks with a question that the training text of some evaluated checkpoint was not screened for."""
    names: set[str] = set()
    for _, artifact in _evaluations(store, record):
        names |= artifact.manifest["facts"].get("not_screened", {}).keys()
    return names


def _evaluations(store: Store, record: Record) -> Iterator[tuple[Mapping[str, Any], Artifact]]:
    """The runs that are evaluated, each with its evaluation."""
    for run in record["runs"]:
        key = next(step["key"] for step in run["steps"] if step["label"] == run["after"])
        with suppress(ConfigError):  # damaged: the run is not finished
            if artifact := store.find("evaluation", key):
                yield run, artifact


def _votes_by_arm(store: Store, record: Record) -> dict[str, dict[int | None, dict[str, Votes]]]:
    """Arm -> seed -> benchmark -> the votes by question; runs without an evaluation are missing."""
    votes: dict[str, dict[int | None, dict[str, Votes]]] = {run["arm"]: {} for run in record["runs"]}
    for run, artifact in _evaluations(store, record):
        path = artifact.path / WAYS[record["way"]]
        if path.is_file():
            votes[run["arm"]][run["seed"]] = question_votes(read_rows(path), record["verdict"])
    return votes


def question_votes(rows: Sequence[SampleRow], verdict: str) -> dict[str, Votes]:
    """Benchmark -> the votes by question, without those left out or with too few answers for a verdict "pass@K"."""
    votes: dict[str, Votes] = defaultdict(dict)
    for question in by_question(row for row in rows if row["left_out"] is None):
        first, own = question[0], vote(question, verdict)
        if own is not None:
            votes[first["benchmark"]][first["id"], first["prompt_digest"]] = own
    return votes


@dataclass(frozen=True)
class VotePair:
    """The votes of two arms on common seeds: for each benchmark [seed, question], NaN where one did not answer."""

    first: list[np.ndarray]
    other: list[np.ndarray]
    weights: list[float]
    seeds: list[int | None]

    @property
    def questions(self) -> int:
        """The number of questions that both arms answered with a common seed."""
        both = zip(self.first, self.other, strict=True)
        return sum(int(np.isfinite(before_SN - after_SN).any(axis=0).sum()) for before_SN, after_SN in both)


def _pair(
    first: Mapping[int | None, Mapping[str, Votes]],
    other: Mapping[int | None, Mapping[str, Votes]],
    weights: Mapping[str, float],
) -> VotePair | None:
    """The votes of two arms, over the seeds in which both answered a common question of every benchmark of `weights`.

    Only seeds that both arms have: each is compared with the other at the same seed, while the sweep may still run.
    None without such a seed.
    """
    seeds = [
        seed
        for seed in first
        if seed in other
        and all(first[seed].get(name, {}).keys() & other[seed].get(name, {}).keys() for name in weights)
    ]
    if not seeds:
        return None
    sides: list[list[np.ndarray]] = [[], []]
    for name in weights:
        questions = dict.fromkeys(question for seed in seeds for question in first[seed][name])
        for side, votes in zip(sides, (first, other), strict=True):
            side.append(np.array([[votes[seed][name].get(q, math.nan) for q in questions] for seed in seeds]))
    return VotePair(sides[0], sides[1], list(weights.values()), seeds)


def _score(own: Mapping[int | None, Mapping[str, Votes]], weights: Mapping[str, float]) -> dict[str, Any]:
    """The accuracy of an arm on a benchmark or on a mean of several: over its seeds, or over problems with one seed.

    A seed counts if it has all benchmarks of the mean: without one it would be a mean of something else.
    """
    seeds = [seed for seed, benchmarks in own.items() if all(benchmarks.get(name) for name in weights)]
    row: dict[str, Any] = {"seeds": len(seeds), "n": 0}
    row |= dict.fromkeys(("accuracy", "low", "high", "over", "deviation"))
    if not seeds:
        return row
    row["n"] = sum(len({question for seed in seeds for question in own[seed][name]}) for name in weights)
    shares = list(weights.values())
    by_seed = {
        seed: sum(weight * fmean(own[seed][name].values()) for name, weight in weights.items()) for seed in seeds
    }
    over_seeds = summary_of_shares(by_seed)
    row |= {"accuracy": over_seeds.mean, "over": "seeds", "deviation": over_seeds.deviation}
    if len(seeds) == 1:
        groups = [list(own[seeds[0]][name].values()) for name in weights]
        low, high = wilson_mean(groups, shares)
        row |= {"low": low, "high": high, "over": "problems"}
    else:
        row |= {"low": over_seeds.low, "high": over_seeds.high}
    return row


def run_title(row: dict[str, Any]) -> str:
    """The arm of a row, and its seed if it has one."""
    return row["arm"] if row["seed"] is None else f"{row['arm']} seed {row['seed']}"


def note(report: dict[str, Any]) -> str:
    """The explanation below the tables of a report: what the intervals and tests are over, and the correction."""
    rows = [row for metric in report["metrics"] for row in metric["arms"]]
    tests = sum(row["p"] is not None for row in rows)
    parts = []
    if any(row["seeds"] > 1 for row in rows):
        parts.append(
            "With several seeds, over seeds: the mean and its t interval; the lead is paired by seed, tested by "
            "Student's t, and never surer than the problems allow. Finds: the smallest true lead that so many seeds "
            "find in four of five cases, after the correction, if they spread as these do."
        )
    if any(row["seeds"] == 1 for row in rows):
        parts.append(
            f"With one seed, {OVER_PROBLEMS}: Wilson's interval and McNemar's exact test, two-sided, paired by "
            "question (for a mean of benchmarks, their intervals combined, and a paired bootstrap)."
        )
    several = "test" if tests == 1 else "tests"
    tested = f"; p is corrected by Holm for the {tests} {several} of this report, * below 0.05" if tests else ""
    return " ".join(parts) + f" Intervals are of 95 %, not corrected{tested}."


def spread_lines(metric: dict[str, Any]) -> list[str]:
    """A line for each arm with one seed whose recipe has others in the store: how far they spread."""
    rows = [row for row in metric["arms"] if row["recipe_seeds"]]
    return [spread_in_words(row["arm"], row["recipe_seeds"]) for row in rows]


def metric_heads(metric: dict[str, Any], first: str) -> list[str]:
    """The columns of `metric_cells`."""
    over = " or ".join(sorted({row["over"] for row in metric["arms"] if row["over"]})) or "problems"
    return ["arm", "seeds", "n", f"% [95 % over {over}]", f"against {first}, points [95 %]", "p, Holm", "finds"]


def metric_cells(row: dict[str, Any], first: str) -> list[str]:
    """The cells of an arm under one benchmark."""
    arm = row["arm"] if row["after"] is None else f"{row['arm']} (after {row['after']})"
    if row["accuracy"] is None:
        return [arm, "", "", "not measured", "", "", ""]
    score = f"{100 * row['accuracy']:.1f}{_interval(row['low'], row['high'], '.1f')}"
    lead, p, finds = "", "", ""
    if row["lead"] is not None:
        lead = f"{100 * row['lead']:+.1f}{_interval(row['lead_low'], row['lead_high'], '+.1f')}"
        if row["seeds"] > 1:
            lead += f", {row['common_seeds']} seeds" if row["lead_over"] == "seeds" else ", one seed"
        p = f"{row['p_corrected']:.3g}" + (" *" if row["significant"] else "")
        finds = "" if row["detectable"] is None else f"{100 * row['detectable']:.1f}"
    elif row["same"]:
        lead = "the same evaluation"
    elif row["arm"] != first:
        lead = "no question in common"
    return [arm, str(row["seeds"]), f"{row['n']:,}", score, lead, p, finds]


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" [{100 * low:{form}}, {100 * high:{form}}]"


def run_cells(row: dict[str, Any]) -> list[str]:
    """The cells of one run. "Own" time and cost are of the steps that no run above has; unknown values are empty."""
    amounts = []
    for name, form in (("seconds", duration), ("dollars", dollars)):
        own = f" ({form(row[f'own_{name}'])})" if row[f"own_{name}"] is not None else ""
        amounts.append("" if row[name] is None else form(row[name]) + own)
    return [run_title(row), row["state"], f"{row['made']} of {row['steps']}", *amounts, (row["run"] or "")[:8]]
