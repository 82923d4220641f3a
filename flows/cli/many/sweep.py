"""`nautile sweep`: run the arms of a sweep file, and print tables that compare them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from nautile.common.commands import shell_command
from nautile.flows.cli.terminal import Json, console_for, show_as, the_store


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A TOML file with `config`, and [grid] or [[arms]] (docs/operations.md)."),
    ],
    parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Maximum parallel runs. Default: the total number of [resources] slots."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the runs, and the steps that each would reuse and compute.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Only print the tables of the finished runs.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Allow more than 20 runs.")] = False,
    as_json: Json = False,
) -> None:
    """Run a configuration with several settings, and compare the arms: scores, paired tests, time and cost.

    Each arm is a run of `nautile run` and reuses all artifacts that its settings allow. The same command resumes.
    """
    from nautile.common.errors import ConfigError
    from nautile.flows.sweep.arms import read_sweep
    from nautile.flows.sweep.report import sweep_report
    from nautile.store.catalog import Catalog

    if dry_run and report:
        raise ConfigError("--dry-run and --report cannot be combined: pass one of them")
    store = the_store()
    # The limit on the number of runs protects from a grid that is larger than meant. What only prints needs no
    # protection.
    sweep_file = read_sweep(file, store, many=yes or dry_run or report)
    if dry_run:
        show_as(planned(sweep_file, store), as_json, plan_view)
        return
    console = console_for(stderr=as_json)
    code = 0
    if not report:
        from nautile.flows.sweep.execute import run_sweep

        # The forecast of what will be paid is printed before the first run starts, while Ctrl-C is still free of
        # charge.
        for line in planned(sweep_file, store)["calls"]:
            console.print(line, soft_wrap=True)
        # Saved before the runs, so that the dashboard can show the sweep while it runs, and after it was killed.
        sweep_file.save(store)
        code = run_sweep(sweep_file, store, parallel, lambda line: console.print(line, soft_wrap=True))
    store.refresh(events=True)
    if not store.root.exists():
        command = shell_command("nautile", "sweep", file)
        raise ConfigError(f"no store at {store.root}: `{command}` creates it, NAUTILE_STORE names another")
    catalog = Catalog(store)
    catalog.catch_up()
    # Printed also after failures: the arms that are finished can be compared, and the exit code says that some are not.
    result = sweep_report(store, sweep_file.record(), lambda sql, *parameters: catalog.query(sql, parameters))
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        console.print()
        console.print(report_view(result), crop=False)
    raise typer.Exit(code)


def planned(sweep: Any, store: Any) -> dict[str, Any]:
    """The steps that each run would reuse, share with a run before it, and compute; and the forecast of paid calls."""
    from nautile.flows.forecast import forecast_calls, forecast_lines
    from nautile.flows.selection import is_in_store

    known_keys, runs, to_compute = set[str](), [], []
    for run in sweep.runs:
        row: dict[str, Any] = {"arm": run.arm, "seed": run.seed, "settings": list(run.settings)}
        row |= {"reused": [], "shared": [], "computed": []}
        for step in run.prepared.steps:
            origin = "reused" if is_in_store(store, step) else "shared" if step.key in known_keys else "computed"
            row[origin].append(step.label)
            if origin == "computed":
                to_compute.append(step)
            # In the order of the list. Runs that start side by side wait at the lock of a shared key, so the counts
            # stay true.
            known_keys.add(step.key)
        runs.append(row)
    return {"runs": runs, "calls": forecast_lines(forecast_calls(to_compute, store))}


def plan_view(plan: dict[str, Any]) -> Any:
    """The output of `--dry-run`: a paragraph for each run, then the forecast of paid calls."""
    from rich.text import Text

    lines = []
    for row in plan["runs"]:
        lines.append(f"{run_title(row)}: {' '.join(row['settings']) or 'as the configuration'}")
        for name, what in (
            ("reused", "in the store"),
            ("shared", "from an arm above"),
            ("computed", "to be computed"),
        ):
            lines.append(f"  {what:<18} {len(row[name]):>2}  {', '.join(row[name])}".rstrip())
    return Text("\n".join([*lines, *plan["calls"]]))


def report_view(report: dict[str, Any]) -> Any:
    """The report of a sweep: a table for each benchmark, then a table of the runs."""
    from rich.console import Group
    from rich.text import Text

    from nautile.common.text import visible
    from nautile.flows.cli.tables import FittingTable

    first = report["arms"][0]["arm"]
    parts: list[Any] = []
    for metric in report["metrics"]:
        parts.append(Text(f"{metric['title']}, {report['verdict']}, after {report['after']}", "bold"))
        table = FittingTable(*metric_heads(metric, first))
        for row in metric["arms"]:
            table.add_row(*metric_cells(row, first))
        parts += [table, *(Text(line, "dim") for line in recipe_lines(metric)), Text()]
    if report["metrics"]:
        parts += [Text(note(report), "dim"), Text()]
    else:
        parts += [Text(f"no evaluation after {report['after']} is finished yet"), Text()]
    table = FittingTable("run", "state", "steps", "time (own)", "paid (own)", "id")
    for row in report["arms"]:
        table.add_row(*run_cells(row))
    parts.append(table)
    failed = [row for row in report["arms"] if row["error"]]
    parts += [Text(f"{run_title(row)} failed in {visible(row['error'])}", "red") for row in failed]
    return Group(*parts)


def run_title(row: dict[str, Any]) -> str:
    """The arm of a row, and its seed if it has one."""
    return row["arm"] if row["seed"] is None else f"{row['arm']} seed {row['seed']}"


def note(report: dict[str, Any]) -> str:
    """The explanation below the tables of a report: what the intervals and tests are over, and the correction."""
    from nautile.evals.scoring.intervals import OVER_PROBLEMS

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


def recipe_lines(metric: dict[str, Any]) -> list[str]:
    """A line for each arm with one seed whose recipe has others in the store: how far they spread."""
    from nautile.tasks.reporting.other_seeds import spread_in_words

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
    from nautile.common.text import dollars, duration

    amounts = []
    for name, form in (("seconds", duration), ("dollars", dollars)):
        own = f" ({form(row[f'own_{name}'])})" if row[f"own_{name}"] is not None else ""
        amounts.append("" if row[name] is None else form(row[name]) + own)
    return [run_title(row), row["state"], f"{row['made']} of {row['steps']}", *amounts, (row["run"] or "")[:8]]
