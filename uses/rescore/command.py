"""`nautile rescore`: another reward, or a judge with another rubric, for stored rollouts, as a single step."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.flows.cli.terminal import (
    Json,
    SetOption,
    check_parquet,
    console_for,
    print_markdown,
    show_as,
    the_store,
)

if TYPE_CHECKING:
    from nautile.store.artifacts import Artifact, Store


def rescore(
    rollouts: Annotated[
        str, typer.Argument(metavar="ROLLOUTS", help="The id of an artifact of rollouts, or a stage (its newest).")
    ],
    reward: Annotated[str | None, typer.Option("--reward", metavar="NAME", help="The reward to score by.")] = None,
    judge: Annotated[
        str | None,
        typer.Option("--judge", metavar="CONFIG", help="Or a configuration, whose [align.judge] is asked and paid."),
    ] = None,
    settings: SetOption = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0.0, metavar="DOLLARS", help="Most that the judge may cost. 0: no limit.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write the rows to this Parquet file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Score again; stored replies are reused.")] = False,
    as_json: Json = False,
) -> None:
    """Score stored rollouts again, by another reward or judge, without sampling; show what it would change."""
    from nautile.uses.rescore.stage import CARD, ROWS

    check_parquet(out)
    command = shell_command("nautile", *sys.argv[1:])
    artifact = rescored(the_store(), rollouts, reward, judge, settings or (), budget, command, force, as_json)
    if out is not None:
        shutil.copyfile(artifact.path / ROWS, out)
    if as_json:
        show_as({"id": artifact.id, "path": str(artifact.path), **artifact.manifest["facts"]}, True, str)
        return
    print_markdown((artifact.path / CARD).read_text(encoding="utf-8"))
    console_for().print(f"{artifact.id}: a row for each rollout in {artifact.path / ROWS}", soft_wrap=True)


def rescored(
    store: "Store",
    rollouts: str,
    reward: str | None,
    judge: str | None,
    settings: Sequence[str],
    budget: float,
    command: str,
    force: bool,
    as_json: bool,
) -> "Artifact":
    """Run the step, or reuse it; returns the artifact `rescored`. Raises `ConfigError` for what cannot be scored."""
    from nautile.configs.endpoint import with_fallbacks
    from nautile.configs.load import load
    from nautile.configs.rewards import DEFAULT_REWARD, REWARDS, known_reward
    from nautile.rl.rewards import reward_named
    from nautile.uses.rescore.config import RescoreConfig
    from nautile.uses.rescore.stage import rescore as stage
    from nautile.uses.step import run_step

    if (reward is None) == (judge is None):
        raise ConfigError("rescore: name either a reward (--reward NAME) or a configuration with a judge (--judge)")
    artifact = rollouts_named(store, rollouts)
    section: dict[str, Any] = {}
    asked = None
    if reward is not None:
        try:
            reward_named(known_reward(reward))  # imported: one that is broken shows here
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"--reward: {error}") from None
        if settings:
            raise ConfigError("--set: only with --judge, whose configuration it changes")
        if reward != DEFAULT_REWARD:
            section["versions"] = {reward: REWARDS.version(reward)}
    else:
        assert judge is not None
        config = load(judge, list(settings))
        if config.align is None:
            raise ConfigError(f"--judge {judge}: this configuration has no [align.judge]")
        # Not in the key: what only the calibration of the stage `align` reads.
        asked = config.align.judge.model_copy(update={"compare": (), "calibration_items": 0, "hostile_items": 0})
        names = with_fallbacks([asked.endpoint], config.endpoints)
        section["endpoints"] = {name: config.endpoints[name].model_dump(mode="json") for name in names}
    stored = artifact.manifest["config"][artifact.manifest["stage"]]
    part = RescoreConfig(
        reward=reward, judge=asked, group=stored["rollout"]["group"], max_tokens=stored["rollout"]["max_tokens"],
        advantage=stored["policy"].get("advantage", "dr"), budget_dollars=budget,
    )  # fmt: skip
    section["rescore"] = part.model_dump(mode="json")
    inputs = {"rollouts": artifact.id, "checkpoint": _with_its_tokenizer(store, artifact).id}
    return run_step(stage, section, inputs, store, command=command, force=force, as_json=as_json)["rescored"]


def rollouts_named(store: "Store", name: str) -> "Artifact":
    """The rollouts with this id, or the newest of the stage. Raises `ConfigError` that lists those that there are."""
    from nautile.store.named import named_or_newest

    store.refresh()
    stored = {artifact.manifest["stage"]: artifact for artifact in store.list("rollouts")}  # the newest of each
    if name in stored:
        return stored[name]
    try:
        return named_or_newest(store, "rollouts", name)
    except ConfigError as error:
        have = ", ".join(f"{stage} ({artifact.id})" for stage, artifact in stored.items())
        there = f"there are those of {have}" if stored else "there are none in this store"
        note = "; self_distill keeps the traces that it trained on, and no rollouts" if name == "self_distill" else ""
        raise ConfigError(f"no stored rollouts of {name!r}: {there}{note} ({error})") from None


def _with_its_tokenizer(store: "Store", rollouts: "Artifact") -> "Artifact":
    """The checkpoint that the rollouts' stage has published, or the one that it began with."""
    named = (f"checkpoint/{rollouts.key}", rollouts.manifest["inputs"].get("checkpoint", ""))
    for full_id in filter(None, named):
        try:
            return store.get(full_id)
        except ConfigError:
            continue
    raise ConfigError(
        f"{rollouts.id}: neither the checkpoint of its stage nor the one before is in {store.location} any more, and "
        "the tokenizer of the rollouts is only there"
    )
