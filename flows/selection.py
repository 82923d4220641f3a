"""Which part of a plan to run, and where the inputs of that part come from when the rest is not run."""

from collections.abc import Sequence
from contextvars import ContextVar

from prefect.runtime import deployment, flow_run

from common.errors import ConfigError
from configs.base import Section
from configs.schema import RunConfig
from flows.dag import Execution, Need
from store.artifacts import Store


class Selection(Section):
    """Which executions of the plan to run, by stage (`evaluate`) or by label (`evaluate:align`). Nothing given: all."""

    first: str | None = None
    last: str | None = None
    only: str | None = None
    force: bool = False

    def again(self, stopped_at: str | None = None) -> str:
        """The options of `nautile run` that go on with this choice after it stopped at an execution.

        A forced choice goes on from there, so that what it has just made is not made once more.
        """
        first = stopped_at if self.force and not self.only and stopped_at else self.first
        given = (("--from", first), ("--until", self.last), ("--only", self.only))
        return "".join(f" {option} {value}" for option, value in given if value) + (" --force" if self.force else "")


def choose(executions: Sequence[Execution], selection: Selection) -> set[str]:
    """Labels of the executions that `selection` picks. Raises `ConfigError` for a name that fits none."""
    if selection.only and (selection.first or selection.last):
        raise ConfigError("--only stands alone: leave out --from and --until")
    labels = [execution.label for execution in executions]
    if selection.only:
        return set(_matching(executions, selection.only, "--only"))
    start = labels.index(_matching(executions, selection.first, "--from")[0]) if selection.first else 0
    end = labels.index(_matching(executions, selection.last, "--until")[-1]) if selection.last else len(labels) - 1
    if start > end:
        raise ConfigError(f"--from {selection.first} comes after --until {selection.last}: nothing would run")
    return set(labels[start : end + 1])


def outside_needs(executions: Sequence[Execution], chosen: set[str]) -> dict[str, list[Need]]:
    """For each execution that is not chosen but whose outputs a chosen one reads: what is read of it."""
    found: dict[str, list[Need]] = {}
    for execution in executions:
        for need in execution.needs.values() if execution.label in chosen else ():
            if need.producer not in chosen and need not in found.setdefault(need.producer, []):
                found[need.producer].append(need)
    return found


def given_artifacts(store: Store, executions: Sequence[Execution], chosen: set[str], config: str) -> dict[Need, str]:
    """Ids of what the chosen executions read of the others, which must be in the store under the plan's keys.

    Raises `ConfigError` naming the first that is missing and the command that makes it; `config` is its argument.
    """
    found: dict[Need, str] = {}
    keys = {execution.label: execution.key for execution in executions}
    for label, needs in outside_needs(executions, chosen).items():
        for need in needs:
            artifact = store.find(need.kind, keys[label])
            if artifact is None:
                readers = [e.label for e in executions if e.label in chosen and need in e.needs.values()]
                raise ConfigError(
                    f"{readers[0]} needs the {need.kind} of {label} ({need.kind}/{keys[label][:12]}), which is not in "
                    f"{store.location}: make it with `nautile run {config} --until {label}`"
                )
            found[need] = artifact.full_id
    return found


def _matching(executions: Sequence[Execution], name: str, option: str) -> list[str]:
    labels = [execution.label for execution in executions if name in (execution.stage, execution.label)]
    if labels:
        return labels
    known = list(dict.fromkeys(e.stage for e in executions))
    several = [e.label for e in executions if e.label != e.stage]
    raise ConfigError(f"{option}: no stage {name!r}; there are {', '.join(known)} (or one of {', '.join(several)})")


# The configuration as it was named on the command line; not known to a run that was asked for in Prefect.
typed: ContextVar[str] = ContextVar("typed", default="")


def way_on(config: RunConfig, selection: Selection, label: str) -> str:
    """A run of a deployment is tried again with the form's values; one that was typed is typed again."""
    if deployment.id:
        return f"prefect flow-run retry {flow_run.id}    # or Retry on the run's page"
    # Not above: Prefect keeps the flow to the end of the process, and with it all that its module refers to; DuckDB's
    # binding, were it among that, would tell the terminal of leaks.
    from flows.run import command

    return command(typed.get() or config.name, selection, label)
