"""`nautile plan`: memory, time and cost of a configuration, by arithmetic, the compiler and earlier calls."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from nautile.common.commands import config_words
from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import visible
from nautile.flows.cli.terminal import (
    ConfigArgument,
    Json,
    SetOption,
    console_for,
    print_markdown,
    the_store,
    write_json,
)


def plan(
    config: ConfigArgument = "nautile_370m",
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="Chips to plan for: v4:2x4x4, v5e:8x8, v6e:8x8, a100:8, h100:8, h200:8, rtx4090:1, spark:1, or local. "
            "Default: launch.topology of the configuration.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="Instead, by formulas and without a compiler: memory, hours and dollars of every stage on a chip or "
            "slice: rtx4090, a100, h100, h200, h100:8, v5e-8, v4-64.",
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Dollars a chip and hour. Default: launch.dollars_per_chip_hour, else a list price."),
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(
            help="Model FLOPs utilisation to assume for the time estimate. Default: as measured, or the compiler's "
            "estimate (model/capacity/utilisation.py)."
        ),
    ] = None,
    fsdp: Annotated[int | None, typer.Option(min=1, help="Override the configuration's FSDP degree.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the search for the largest batch that fits.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Instead, compile one block alone for each mixing form, chunk size and remat, and compare their costs "
            "and speed. T may list several topologies, comma-separated.",
        ),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MIXING/CHUNK/REMAT", help="With --compare: only this setting, e.g. fused/32/block. Repeatable."
        ),
    ] = None,
    row_length: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Also pack the documents of the sources in the store into rows of N tokens, and show how far these "
            "are filled and how many documents are cropped. Repeatable.",
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Also ask, without paying, whether the Hub has every pinned dataset, and whether every endpoint takes "
            "its key and serves its model. Exit code 2 if one refuses or does not answer.",
        ),
    ] = False,
    settings: SetOption = None,
    as_json: Json = False,
) -> None:
    """Estimate memory, time and cost of pretraining on chips, what it reads, and API costs.

    The memory is the compiler's, for chips that need not be here; without a compiler, it is estimated by arithmetic.

    By source: fill of the rows, share of cropped documents, share of targets trained on, epochs; of one that is not in
    the store yet only what is certain.

    If the run is not possible on the chips, or nothing can be compiled for them, that is said first and the exit code
    is 2; but 0 if only a compiler is missing for the chips that the configuration names, with estimates by arithmetic.
    """
    if setting and not compare:
        raise ConfigError("--setting needs --compare")

    from nautile.configs.load import load

    if device is not None:
        if any((compare, topology, online, row_length, fsdp, quick)):
            raise ConfigError("--device estimates by formula alone: leave out --topology, --compare and the others")
        raise typer.Exit(plan_for_device(load(config, settings), device, price, mfu, as_json))
    if compare:
        compare_plan(load(config, settings), topology, fsdp, setting or [], as_json)
        return
    from nautile.flows.cli.capacity import estimate_markdown
    from nautile.flows.dag import pipeline_steps
    from nautile.flows.forecast import forecast_lines, reading_markdown
    from nautile.flows.planning import plan_run

    run_config = load(config, settings)
    with console_for(stderr=True).status("planning") as spinner:
        found = plan_run(
            run_config, the_store(), topology, price=price, mfu=mfu, fsdp=fsdp, largest=not quick,
            row_lengths=row_length or (), online=online, show=spinner.update,
        )  # fmt: skip
    if found.error is not None:
        console_for(stderr=True).print(visible(str(found.error)), style="red", soft_wrap=True)
    answers = found.online
    if as_json:
        write_json(found.as_json(), ensure_ascii=False)
    else:
        parts = [] if found.folder is None else [(found.folder / "plan.md").read_text(encoding="utf-8").strip()]
        if found.estimate is not None:
            parts += [estimate_markdown(found.estimate, compiled=found.error is None)]
        parts += [reading_markdown(found.sources, found.rows)] if found.sources else []
        if parts:
            print_markdown("\n\n".join(parts))
        command = f"nautile plan {config_words(config, settings)} --online"
        lines = ["", *forecast_lines(found.calls)] if parts else forecast_lines(found.calls)
        lines += listed("still to be set", found.missing)
        lines += asking_lines(pipeline_steps(run_config), answers, command)
        lines += listed("prices that differ from the vendor's list", found.prices)
        console_for().print("\n".join(lines), soft_wrap=True)
    if found.error is not None and (topology or found.estimate is None or isinstance(found.error, Retryable)):
        raise typer.Exit(2)
    if answers is not None and (answers.refused or answers.silent):
        raise ConfigError(
            f"of the datasets and endpoints {len(answers.refused)} were refused and {len(answers.silent)} could not be "
            "asked: see the lines above"
        )


def listed(heading: str, lines: Sequence[str]) -> list[str]:
    """A heading with its lines, or with the word "nothing"."""
    return [f"{heading}:" if lines else f"{heading}: nothing", *(f"  {line}" for line in lines)]


def asking_lines(steps: Sequence[Any], answers: Any, command: str) -> list[str]:
    """What the Hub and the endpoints have answered; if they were not asked (None), what is therefore not known."""
    if answers is not None:
        lines = [*listed("refused", answers.refused), *listed("could not be asked", answers.silent)]
        lines += listed("could not be checked", answers.unclear) if answers.unclear else []
        return [*lines, *listed("confirmed", answers.confirmed)]
    from nautile.flows.readiness import hub_datasets, remote_endpoints

    datasets, endpoints = len(hub_datasets(steps)), len(remote_endpoints(steps))
    unknown = [f"the Hub for pinned datasets ({datasets})"] if datasets else []
    unknown += [f"endpoints about their keys and models ({endpoints})"] if endpoints else []
    return [f"not asked: {', '.join(unknown)}; `{command}` asks"] if unknown else []


def plan_for_device(run_config: Any, device: str, price: float | None, mfu: float | None, as_json: bool) -> int:
    """`nautile plan --device`; returns the exit code, 2 if not even one row a chip fits."""
    from dataclasses import asdict

    from nautile.flows.device_plan import device_markdown, plan_device

    found = plan_device(run_config, the_store(), device, price, mfu)
    if as_json:
        write_json({**asdict(found), "hours": found.hours})
    else:
        print_markdown(device_markdown(found))
    return 0 if found.pretraining.fits else 2


def compare_plan(run_config: Any, topologies: str | None, fsdp: int | None, settings: list[str], as_json: bool) -> None:
    """`nautile plan --compare`: compare mixing forms, chunk sizes and remat for one block."""
    from nautile.flows.cli.capacity import compare_settings, comparison_markdown

    store = the_store()
    topologies = topologies or run_config.launch.topology
    with console_for(stderr=True).status(f"compiling for {topologies}") as spinner:
        comparisons = compare_settings(store, run_config, topologies, fsdp, settings, spinner.update)
    if as_json:
        write_json(comparisons)
    else:
        print_markdown("\n\n".join(comparison_markdown(comparison) for comparison in comparisons))
