"""The scheduled evaluation: compare the newest or a named checkpoint with the last and the best one before it.

An evaluated checkpoint is not evaluated again, and a comparison is an artifact with its own key, so it is not repeated.
A night without a new checkpoint therefore does nothing, and a regression is raised once. It is raised before the
comparison is published: if the process is killed in between, it is raised twice, but never lost.
"""

import logging
import time
from contextlib import ExitStack
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Completed

from nautile.common.commands import retry_command
from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import write_json, write_text
from nautile.configs.keys import with_local_files
from nautile.configs.operation import NEWEST
from nautile.configs.schema import RunConfig
from nautile.evals.tables.results import to_html, to_markdown
from nautile.flows.dag import Need, Step, evaluate_section
from nautile.flows.forms import ConfigName, Overrides, RunName, begin_process, failed_state, run_name
from nautile.flows.nightly.alert import publish, raise_regression
from nautile.flows.nightly.earlier import (
    EarlierComparison,
    EarlierEvaluations,
    compare_with_earlier,
    earlier_table,
    find_earlier,
)
from nautile.flows.nightly.own_checkpoints import executions_of_others, newest_own
from nautile.flows.operate import approval, concurrency
from nautile.flows.operate.automations import sent_before_the_end
from nautile.flows.operate.notifications import notifying
from nautile.flows.plans import recorded, refused
from nautile.flows.selection import PreparedRun, Selection, is_in_store
from nautile.flows.stored_configs import follow
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog, CatalogBusy
from nautile.store.layout import StagingFiles
from nautile.store.manifest import stage_key
from nautile.store.mirror import MirroredStore, open_store
from nautile.tasks.engine.child_process import cancelling
from nautile.tasks.engine.errors import StageCrash, advice, reason
from nautile.tasks.engine.prefect_task import as_prefect_task
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.evaluate import evaluate

logger = logging.getLogger(__name__)

KIND, VERSION = "comparison", 1
_RULE = {"against", "rule", "margin"}  # the fields of [schedule] that determine a comparison


@flow(name="evaluation", flow_run_name=run_name, retries=0, log_prints=False)
def evaluation(
    config: ConfigName = "local",
    overrides: Overrides = (),
    checkpoint: str = "",
    name: RunName = "",
) -> State[dict[str, Any]]:
    """Evaluate a checkpoint unless it has been evaluated, compare it with earlier ones, and raise regressions.

    Args:
        config: The configuration that is deployed here, the name of a shipped one, the path of a file on the worker, or
            the reference to one in the store, as a run of `nautile run` has it.
        overrides: Values that replace those of the configuration, one in each entry, such as `schedule.margin=0.02`.
        checkpoint: An artifact id, or "newest"; empty: the one that `[schedule]` names.
        name: What the run is called. Without it, it keeps the name that it has.
    """
    run_id = str(flow_run.id)
    begin_process()
    with sent_before_the_end():
        try:
            run_config, *_ = follow(open_store(), config, overrides)
        except ConfigError as error:
            return refused(config, error)
        try:
            notify, alerts = run_config.operation.notify, run_config.operation.alerts
            with notifying(notify, run_config.name, run_id, lambda _: retry_command(run_id), alerts):
                return _evaluate_and_compare(open_store(), run_config, checkpoint, run_id)
        except (ConfigError, Retryable, StageCrash) as error:
            if not deployment.id:
                raise
            logger.error("the evaluation failed", exc_info=error)
            return failed_state(f"{reason(error)}\n{advice(error)}")


def _evaluate_and_compare(store: Store, config: RunConfig, checkpoint: str, run_id: str) -> State[dict[str, Any]]:
    """The body of the flow; returns its final state, whose message and data describe the result."""
    store.prepare()
    # With a remote: checkpoints and evaluations are made on other machines, this folder may be empty.
    store.refresh(events=True)
    chosen = checkpoint_of(store, config, checkpoint or config.schedule.checkpoint)
    if chosen is None:
        return Completed(
            message=f"No checkpoint of {config.name} in {store.root} yet: nothing was evaluated.",
            data={"evaluation": None},
        )
    new = _evaluate(store, config, chosen, run_id)
    earlier = find_earlier(store, new, config.schedule, executions_of_others(store, config))
    key = comparison_key(new, earlier, config)
    data: dict[str, Any] = {"checkpoint": chosen.id, "evaluation": new.id, "comparison": None, "regressions": []}
    # The usual night: the checkpoint, the rule and the earlier evaluations are the same, so all of this was said
    # before.
    if published := _find_comparison(store, key, new, earlier):
        _mirror(store, published)  # an earlier night may have failed here
        data |= {"comparison": published.id, "regressions": published.manifest["facts"]["regressions"]}
        return Completed(
            message=f"{new.id} of {chosen.id} was compared before: {published.id}. Nothing new.", data=data
        )
    comparisons, problems = compare_with_earlier(new, earlier, config.schedule)
    regressions = [
        {"against": comparison.role, "before": comparison.artifact.id, **regression}
        for comparison in comparisons
        for regression in comparison.regressions
    ]
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(earlier.skipped.items()))
    notes = [*([f"Skipped: {skipped}."] if skipped else []), *problems]
    # The order matters if the process is killed: alert first, then the artifact that says the alert was raised.
    if regressions:
        notes += raise_regression(config, chosen, new, regressions, run_id)
    if comparisons:
        artifact = _publish_comparison(store, key, config, new, earlier, comparisons, regressions, notes, run_id)
        data |= {"comparison": artifact.id, "regressions": regressions}
    headline = f"{new.id} of {chosen.id}"
    if not comparisons:
        headline += ": no earlier evaluation to compare it with."
    elif not regressions:
        headline += ": no benchmark has dropped beyond its interval."
    else:
        drops = (f"{row['title']} ({100 * row['lead']:+.1f} against the {row['against']})" for row in regressions)
        headline += f" has REGRESSED: {', '.join(drops)}."
    publish(config.name, headline, [earlier_table(comparison) for comparison in comparisons], regressions, notes)
    return Completed(message=" ".join([headline, *notes]), data=data)


def checkpoint_of(store: Store, config: RunConfig, name: str) -> Artifact | None:
    """The named checkpoint, or the newest of the configuration's pipeline; None if it has none.

    Raises `ConfigError` for a wrong id.
    """
    if name == NEWEST:
        return newest_own(store, config)
    artifact = store.get(name)
    if artifact.kind != "checkpoint":
        raise ConfigError(
            f"schedule.checkpoint: {artifact.id} is not a checkpoint: `nautile artifacts checkpoint` lists them"
        )
    return artifact


def comparison_key(new: Artifact, earlier: EarlierEvaluations, config: RunConfig) -> str:
    """The key of the comparison of `new` with the earlier evaluations, which includes the rule of `[schedule]`."""
    section = config.schedule.model_dump(mode="json", include=_RULE)
    inputs = {"new": new.full_id, **{role: artifact.full_id for role, artifact in earlier.by_role.items()}}
    return stage_key(KIND, VERSION, section, inputs)


def _evaluate(store: Store, config: RunConfig, checkpoint: Artifact, run_id: str) -> Artifact:
    """The evaluation of `checkpoint` with the configuration: from the store, or a new one."""
    # The same label and key as in the pipeline, so that both share the artifact.
    label = f"evaluate:{checkpoint.manifest['label']}"
    section = with_local_files(evaluate_section(config), store.digest_memory)
    inputs = {"checkpoint": checkpoint.full_id}
    needs = {"checkpoint": Need(checkpoint.manifest["label"], "checkpoint")}
    step = Step(label, evaluate, section, needs, key=evaluate.key(section, inputs))
    resource = config.deployment("evaluate").resource or "accelerator"
    # On a server that nobody prepared there is no limit; the empty name means none.
    limit = concurrency.declared_limits().get(resource, "")
    operation = config.operation.of("evaluate")
    context = RunContext(
        run_id, str(store.root), False, label, config.name, config.launch, operation=operation, limit=limit
    )
    with cancelling(), ExitStack() as stack:
        if not is_in_store(store, step):  # else nothing runs, so no run is recorded
            plan = PreparedRun(config.name, Selection(), [step], set())
            # From here on the run is recorded, so it must be detectable when its process is killed: the lock shows that
            # it lives.
            stack.enter_context(store.run_lock(run_id).for_life())
            stack.enter_context(recorded(store, config, plan, run_id, str(flow_run.name), retry_command(run_id)))
        approval.before_step(store, config, step, False, run_id)
        # In another thread, as the pipeline's steps, so that a cancelled one can end as such.
        return store.get(as_prefect_task(evaluate).submit(section, inputs, context).result()["evaluation"])


def _find_comparison(store: Store, key: str, new: Artifact, earlier: EarlierEvaluations) -> Artifact | None:
    """The published comparison, if it was made from the same executions of its inputs (a forced rerun changes them)."""
    try:
        artifact = store.find(KIND, key)
    except ConfigError:
        return None  # damaged: compare again
    executions = {"new": new.execution, **{role: other.execution for role, other in earlier.by_role.items()}}
    return artifact if artifact and artifact.manifest["input_executions"] == executions else None


def _mirror(store: Store, comparison: Artifact) -> None:
    """Send the comparison to the store's remote, if it has one: the next night may be on another machine."""
    if isinstance(store, MirroredStore):
        store.push([comparison])


def _publish_comparison(
    store: Store,
    key: str,
    config: RunConfig,
    new: Artifact,
    earlier: EarlierEvaluations,
    comparisons: list[EarlierComparison],
    regressions: list[dict[str, Any]],
    notes: list[str],
    run_id: str,
) -> Artifact:
    """Publish the comparison as an artifact. Changed samples are only counted, because the evaluations contain them."""
    tables = [earlier_table(comparison) for comparison in comparisons]
    sides = [
        {
            "roles": side.roles,
            "evaluation": side.artifact.id,
            "left_out": side.unmatched,
            "changed": len(side.comparison["changed"]),
            **{name: value for name, value in side.comparison.items() if name != "changed"},
        }
        for side in comparisons
    ]
    counts = {side.artifact.id: len(side.comparison["benchmarks"]) for side in comparisons}
    # Two nights on two machines may end with the same comparison. The lock and `supersede` make the second one replace
    # the first.
    with store.lock(key), store.lease(key, time.sleep, lambda host: None) as lease:
        folder = StagingFiles(store.staging(key)).output(KIND)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "comparison.json", {"sides": sides, "regressions": regressions, "notes": notes})
        write_text(folder / "comparison.md", "\n".join(to_markdown(table) for table in tables))
        write_text(folder / "comparison.html", "\n".join(to_html(table) for table in tables))
        artifact = store.publish(
            KIND,
            key,
            folder,
            stage="evaluation",
            version=VERSION,
            config=config.schedule.model_dump(mode="json", include=_RULE),
            inputs={"new": new, **earlier.by_role},
            facts={"regressions": regressions, "benchmarks": counts},
            fence=lease.fence,
            run=run_id,
            label="evaluation",
            supersede=True,
        )
        store.discard(store.staging(key))
        _mirror(store, artifact)
    try:
        Catalog(store).ingest(patience=5.0)
    except (CatalogBusy, ConfigError) as error:
        logger.warning("catalog: %s", error)  # not an error: the next reader of the catalog ingests the new files
    return artifact
