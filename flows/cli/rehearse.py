"""`nautile rehearse`: every stage of a configuration small, before the real run; a table of what was reached."""

import sys
from typing import Annotated, Any

import typer

from nautile.common.commands import config_words
from nautile.common.errors import ConfigError
from nautile.common.text import markdown_table, visible
from nautile.flows.cli.terminal import (
    ConfigArgument,
    Json,
    SetOption,
    console_for,
    print_markdown,
    the_store,
    write_json,
)


def rehearse(
    config: ConfigArgument,
    spend: Annotated[
        float | None,
        typer.Option(
            "--spend",
            metavar="DOLLARS",
            min=0.0,
            help="Pay at most this, without asking. 0: only what is free.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Pay at most $1.00 without asking.")] = False,
    full_model: Annotated[
        bool, typer.Option("--full-model", help="Train the whole model, two steps of each phase, not a small one.")
    ] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Try every stage of a configuration in minutes, with a small run that is derived from it: before the real one.

    It asks the Hub and the endpoints, reads the first rows of everything, and runs each stage for a few steps. Nothing
    is paid once a fault was found, and nothing without --spend, --yes or your answer. It ends with what was reached,
    what the whole run would need, and a line for each fault. Exit code 0 only if everything was reached.
    """
    from nautile.configs.load import load
    from nautile.flows.dag import steps_of
    from nautile.flows.rehearsal import DEFAULT_LIMIT, pays
    from nautile.flows.rehearsal import as_json as json_of
    from nautile.flows.rehearsal import rehearse as rehearse_config

    run_config, words, err = load(config, settings), config_words(config, settings), console_for(stderr=True)
    may_ask = sys.stdin.isatty() and sys.stderr.isatty()
    if spend is None and not yes and not may_ask and any(map(pays, steps_of(run_config))):
        raise ConfigError(
            "the rehearsal pays endpoints: name a limit with --spend 1.00, or --spend 0 to try only what is free"
        )

    shown = set[str]()

    def show(line: str) -> None:
        if line not in shown:  # several fields may name a data set
            err.print(visible(line), soft_wrap=True)
        shown.add(line)

    def agree(question: str) -> str:
        if spend is not None or yes:
            return ""
        return "" if typer.confirm(f"{question}. Go on?", err=True) else "you did not agree to pay"

    limit = DEFAULT_LIMIT if spend is None else spend
    result = rehearse_config(run_config, words, the_store(), limit, agree, show, full_model=full_model)
    if as_json:
        write_json(json_of(result), ensure_ascii=False)
    else:
        print_markdown(rehearsal_markdown(result, words))
    if not result.complete:
        raise typer.Exit(1 if any(stage.crashed for stage in result.stages) else 2)


def rehearsal_markdown(result: Any, words: str) -> str:
    """The tables of a rehearsal as Markdown: what was reached, the stages, the whole run, faults and notes."""
    reached = [(row.label, row.what, "no" if row.fault else "yes", "; ".join(_facts_of(row))) for row in result.reached]
    stages = [
        (
            row.label,
            "small" if row.made_small else "as configured",
            row.outcome,
            "" if row.seconds is None else f"{row.seconds:.0f} s",
            "" if row.dollars is None else f"${row.dollars:.4f}",
            row.remedy or "",
        )
        for row in result.stages
    ]
    whole = [
        (
            f"{row.label} ({row.purpose})",
            row.endpoint,
            f"{row.requests:,}",
            "" if row.requests_per_minute is None else f"{row.requests_per_minute:,.0f}",
            "" if row.hours is None else f"{row.hours:,.1f}",
            f"${row.dollars[1]:,.2f} (${row.dollars[0]:,.2f} to ${row.dollars[2]:,.2f})",
            f"{row.measured} replies"
            if row.measured
            else f"those of {row.like}"
            if row.like
            else "the longest allowed",
        )
        for row in result.whole_run
    ]
    parts = [f"# Rehearsal of {result.config}: {'everything was reached' if result.complete else 'not ready'}"]
    if reached:
        parts += [markdown_table(("what", "from", "reached", "known of it"), reached)]
    parts += [markdown_table(("stage", "how", "outcome", "time", "paid", ""), stages)]
    if whole:
        columns = ("the whole run", "asks", "requests", "a minute", "hours", "dollars", "by")
        parts += [markdown_table(columns, whole)]
    if result.pretrain_days is not None:
        parts += [f"Pretraining: {result.pretrain_days:.1f} days by arithmetic (`nautile plan {words}`)."]
    if result.faults:
        parts += ["To be mended:\n\n" + "\n".join(f"- {visible(line)}" for line in result.faults)]
    if result.notes:
        parts += ["Worth knowing:\n\n" + "\n".join(f"- {visible(line)}" for line in result.notes)]
    skipped = f" Nothing more was paid: {result.skipped}." if result.skipped else ""
    parts += [f"${result.dollars:.4f} of ${result.limit_dollars:.2f} in {result.seconds:.0f} s.{skipped}"]
    return "\n\n".join(parts)


def _facts_of(row: Any) -> list[str]:
    """What is known of a dataset or an endpoint, in a few words each."""
    facts = ["gated"] if row.gated else []
    facts += [f"{row.files:,} files" if row.files != 1 else "1 file"] if row.files is not None else []
    facts += [f"{'about ' if row.files != 1 else ''}{row.rows:,} rows"] if row.rows is not None else []
    if row.languages:
        facts += [", ".join(f"{share:.0%} {code}" for code, share in list(row.languages.items())[:4])]
    facts += [f"serves {row.serves}"] if row.serves else []
    facts += [f"{row.requests_per_minute:,.0f} requests a minute"] if row.requests_per_minute is not None else []
    facts += ["its batch interface answers"] if row.batch else []
    if row.dollars_per_million is not None:
        price = row.dollars_per_million
        facts += [f"${price[0]:g} and ${price[1]:g} a million tokens" if any(price) else "free"]
    return facts
