"""The steps that a run executes (`--from`, `--until`, `--only`), their inputs from the store, the resume command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nautile.common.commands import program, shell_command
from nautile.common.errors import ConfigError
from nautile.common.text import did_you_mean
from nautile.configs.base import Section
from nautile.configs.changes import Change
from nautile.configs.keys import changed_settings
from nautile.configs.operation import LaunchConfig
from nautile.configs.plugins import plug_ins, version_of
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Need, Step, dag_in
from nautile.store.artifacts import Store, short_id
from nautile.tasks.engine.ray_cluster import check_hosts


class Selection(Section):
    """Which steps of the DAG to run, by stage (`evaluate`) or by label (`evaluate:align`). Empty: all of them.

    `force` runs them again with the stored replies of endpoints; `ask_again` requests new replies, which cost again.
    """

    first: str | None = None
    last: str | None = None
    only: str | None = None
    force: bool = False
    ask_again: bool = False

    def parameters(self) -> dict[str, Any]:
        """The parameters of the flow `pipeline` that select the same."""
        texts = {"only": self.only or "", "from_": self.first or "", "until": self.last or ""}
        return texts | {"force": self.force, "ask_again": self.ask_again}

    def options(self, stopped_at: str | None = None) -> str:
        """The options of `nautile run`, quoted for a shell, that resume this selection after it stopped at a step.

        A forced run resumes from `stopped_at`: the steps before it have just been written and need no second execution.
        """
        first = stopped_at if self.force and not self.only and stopped_at else self.first
        stages = (("--from", first), ("--until", self.last), ("--only", self.only))
        flags = (("--force", self.force), ("--ask-again", self.ask_again))
        words = [word for option, stage in stages if stage for word in (option, stage)]
        words += [flag for flag, is_set in flags if is_set]
        return f" {shell_command(*words)}" if words else ""

    def command(self, argument: str, stopped_at: str | None = None) -> str:
        """The shell command that runs this selection from the current folder. `argument`: as of `PreparedRun`."""
        return f"{shell_command(program(), 'run')} {argument}{self.options(stopped_at)}"


@dataclass(frozen=True)
class PreparedRun:
    """A run whose selection and inputs have been checked.

    `argument`: the configuration and its `--set` options, quoted for a shell, for the commands that are printed.
    `steps`: what to run, in order. `inputs`: outputs of other steps, which are read from the store.
    `changes`: differences from the configuration that this run's configuration extends.
    """

    argument: str
    selection: Selection
    steps: list[Step]
    inputs: set[Need]
    changes: Sequence[Change] = ()

    def resume_command(self, stopped_at: str | None = None) -> str:
        """The shell command that resumes the run from the current folder."""
        return self.selection.command(self.argument, stopped_at)


def prepare_run(
    config: RunConfig, selection: Selection, store: Store, argument: str = "", base: RunConfig | None = None
) -> PreparedRun:
    """Build the DAG and check the selection and its inputs, before anything runs.

    `base`: the configuration that `config` extends (`configs.load.load_base`); the run records the differences.

    Raises `ConfigError` for a name that matches no step, an input that is not in the store, an invalid row in a
    file of RL problems, or an unknown objective.
    """
    argument = argument or shell_command(config.name)
    store.refresh()
    dag = dag_in(store, config)
    limits = config.resources.limits()
    # A resource without a limit would never have a free slot, and the run would wait for ever.
    if unlimited := [step for step in dag if step.resource not in limits]:
        raise ConfigError(
            f"{unlimited[0].label} uses the resource {unlimited[0].resource!r}, which has no limit: [resources] has "
            f"{', '.join(limits)}"
        )
    for plug_in in plug_ins():  # also one that only a later step would use
        version_of(plug_in)
    chosen = choose(dag, selection)
    steps = [step for step in dag if step.label in chosen]
    # Files of problems, for example, are read now: a typing error in one should not show after days of pretraining.
    for step in steps:
        if isinstance(section := getattr(config, step.stage.name, None), Section):
            step.stage.check(section)
    changes = changed_settings(base, config) if base else []
    return PreparedRun(argument, selection, steps, outside_inputs(store, dag, chosen, argument), changes)


def check_ray_hosts(store: Store, launch: LaunchConfig, run: PreparedRun) -> None:
    """Raise `ConfigError` if the Ray cluster has too few hosts for a multi-process stage of the run."""
    multihost = [s for s in run.steps if launch.on_ray and s.stage.multihost and s.stage.name in launch.stages]
    for step in multihost:
        if run.selection.force or not is_in_store(store, step):
            check_hosts(launch, step.stage.name)


def is_in_store(store: Store, step: Step) -> bool:
    """Whether a run without `force` would only reuse the step."""
    try:
        return all(store.find(kind, step.key) for kind in step.outputs)
    except ConfigError:
        return False  # damaged: the step will run again


def outdated_lines(store: Store, run: PreparedRun) -> list[str]:
    """A line for each step that the run reuses although a step that it reads was made again since, by `--force`.

    Its artifacts are valid, but describe weights or texts that are no longer live, as do all that were made from them.
    """
    lines = []
    for step in run.steps if not run.selection.force else ():
        if producers := _newer_inputs(store, step):
            again = f"`nautile run {run.argument} --from {step.label} --force` makes them again"
            lines.append(
                f"{step.label} is reused, but {', '.join(producers)} was made again since: it and what was made from "
                f"it describe an earlier version. {again}"
            )
    return lines


def _newer_inputs(store: Store, step: Step) -> list[str]:
    """The steps whose live outputs are not those that the stored outputs of `step` were made from."""
    try:
        made = [store.find(kind, step.key) for kind in step.outputs]
        if not made or not made[0] or not all(made):
            return []  # it will run
        executions = made[0].manifest["input_executions"]
        producers = []
        for name, need in step.needs.items():
            kind, _, key = step.inputs[name].partition("/")
            live = store.find(kind, key)
            if live is None or executions.get(name, live.execution) == live.execution:
                continue
            before = next((old for old in store.versions(kind, key) if old.execution == executions[name]), None)
            if before is None or before.manifest["files"] != live.manifest["files"]:  # else it is the same again
                producers.append(need.producer)
        return list(dict.fromkeys(producers))
    except ConfigError:
        return []  # damaged: it will run again


def choose(dag: Sequence[Step], selection: Selection) -> set[str]:
    """Labels of the steps in `selection`. Raises `ConfigError` for a name that matches no step."""
    if selection.only and (selection.first or selection.last):
        raise ConfigError("--only cannot be combined with --from or --until")
    if selection.ask_again and not selection.force:
        raise ConfigError("--ask-again needs --force: a step that is reused sends no requests")
    labels = [step.label for step in dag]
    if selection.only:
        return set(_matching(dag, selection.only, "--only"))
    start = labels.index(_matching(dag, selection.first, "--from")[0]) if selection.first else 0
    end = labels.index(_matching(dag, selection.last, "--until")[-1]) if selection.last else len(labels) - 1
    if start > end:
        raise ConfigError(f"--from {selection.first} comes after --until {selection.last}: nothing would run")
    return set(labels[start : end + 1])


def outside_inputs(store: Store, dag: Sequence[Step], chosen: set[str], argument: str) -> set[Need]:
    """The inputs that the chosen steps read from steps that are not chosen; all must be in the store.

    Raises `ConfigError` with the first missing input and the command that makes it. `argument` is the configuration in
    that command.
    """
    needs: set[Need] = set()
    for step in dag:
        for name, need in step.needs.items() if step.label in chosen else ():
            if need.producer in chosen or need in needs:
                continue
            kind, _, key = step.inputs[name].partition("/")
            if store.find(kind, key) is None:
                raise ConfigError(
                    f"{step.label} needs the {kind} of {need.producer} ({short_id(kind, key)}), which is not in "
                    f"{store.location}: make it with `nautile run {argument} {shell_command('--until', need.producer)}`"
                )
            needs.add(need)
    return needs


def _matching(dag: Sequence[Step], name: str, option: str) -> list[str]:
    """Labels of the steps whose label or stage is `name`. Raises `ConfigError`, with a guess, if there are none."""
    labels = [step.label for step in dag if name in (step.stage.name, step.label)]
    if labels:
        return labels
    stages = list(dict.fromkeys(step.stage.name for step in dag))
    uses = [step.label for step in dag if step.label != step.stage.name]
    guess = did_you_mean(name, [*stages, *uses])
    raise ConfigError(
        f"{option}: no stage {name!r}{guess}; there are {', '.join(stages)} (or one of {', '.join(uses)})"
    )
