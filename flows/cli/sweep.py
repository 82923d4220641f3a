"""`nautile sweep`: run the arms of a sweep file, and print tables that compare them."""

from pathlib import Path
from typing import Annotated, Any

import typer

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
    from nautile.flows.sweep.arms import planned, read_sweep
    from nautile.flows.sweep.report import report_of

    if dry_run and report:
        raise ConfigError("--dry-run and --report cannot be combined: pass one of them")
    store = the_store()
    # The limit protects from a grid that is larger than meant; what only prints needs none.
    sweep_file = read_sweep(file, store, many=yes or dry_run or report)
    if dry_run:
        show_as(planned(sweep_file, store), as_json, plan_view)
        return
    console = console_for(stderr=as_json)
    code = 0
    if not report:
        from nautile.flows.sweep.execute import run_sweep

        # Before the first run starts, while Ctrl-C is still free of charge.
        for line in planned(sweep_file, store)["calls"]:
            console.print(line, soft_wrap=True)
        # Saved before the runs, so that the dashboard can show the sweep while it runs, and after it was killed.
        sweep_file.save(store)
        code = run_sweep(sweep_file, store, parallel, lambda line: console.print(line, soft_wrap=True))
    # Printed also after failures: the arms that are finished can be compared, and the exit code says that some are not.
    result = report_of(store, sweep_file.record())
    if not as_json:
        console.print()
    show_as(result, as_json, report_view)
    raise typer.Exit(code)


def plan_view(plan: dict[str, Any]) -> Any:
    """The output of `--dry-run`: a paragraph for each run, then the forecast of paid calls."""
    from rich.text import Text

    from nautile.flows.sweep.report import run_title

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
    from nautile.flows.render import FittingTable
    from nautile.flows.sweep.report import metric_cells, metric_heads, note, run_cells, run_title, spread_lines

    first = report["arms"][0]["arm"]
    parts: list[Any] = []
    for metric in report["metrics"]:
        parts.append(Text(f"{metric['title']}, {report['verdict']}, after {report['after']}", "bold"))
        table = FittingTable(*metric_heads(metric, first))
        for row in metric["arms"]:
            table.add_row(*metric_cells(row, first))
        parts += [table, *(Text(line, "dim") for line in spread_lines(metric)), Text()]
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
