"""The scheduled evaluation: the newest checkpoint (or a named one) against the last and the best one before it.

A checkpoint that has its evaluation is not evaluated again, and two evaluations that were compared are not compared
again: the comparison is an artifact with a key of its own, so a night without a new checkpoint is quiet, and a
regression is raised once. It is raised before the comparison is kept: killed in between, it is raised twice, not never.
"""

import logging
from contextlib import nullcontext
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from common.errors import ConfigError
from common.files import write_json, write_text
from configs.operation import NEWEST
from configs.schema import RunConfig
from evals.tables.results import to_html, to_markdown
from flows.dag import Need, Step, evaluate_section
from flows.nightly.alert import publish, raise_regression
from flows.nightly.earlier import Earlier, Side, earlier, stand, table_of
from flows.operate import approval, concurrency
from store.artifacts import Artifact, Store
from store.catalog import Catalog, CatalogBusy
from store.manifest import stage_key
from store.mirror import open_store
from tasks.engine.child_process import cancelling
from tasks.engine.prefect_task import as_prefect_task
from tasks.engine.stage import RunContext
from tasks.evaluate import evaluate

logger = logging.getLogger(__name__)

KIND, VERSION = "comparison", 1


@flow(name="evaluation", flow_run_name="evaluation of {config.name}", retries=0, log_prints=False)
def evaluation(config: RunConfig, checkpoint: str = "", store_root: str | None = None) -> State[dict[str, Any]]:
    """Evaluate a checkpoint that was not, compare it with those before it, and raise what has regressed.

    `checkpoint`: an artifact id, or "newest"; empty: the one of `[schedule]`.
    """
    store = open_store(store_root)
    store.prepare()
    chosen = checkpoint_of(store, checkpoint or config.schedule.checkpoint)
    if chosen is None:
        return Completed(
            message=f"No checkpoint in {store.root} yet: nothing was evaluated.", data={"evaluation": None}
        )
    run_id = str(flow_run.id)
    new = _evaluated(store, config, chosen, run_id)
    before = earlier(store, new, config.schedule)
    key = comparison_key(new, before, config)
    told: dict[str, Any] = {"checkpoint": chosen.id, "evaluation": new.id, "comparison": None, "regressions": []}
    if known := _compared(store, key, new, before):
        told |= {"comparison": known.id, "regressions": known.manifest["facts"]["regressions"]}
        return Completed(message=f"{new.id} of {chosen.id} was compared before: {known.id}. Nothing new.", data=told)
    sides, refused = stand(new, before, config.schedule)
    lost = [{"against": side.role, "before": side.artifact.id, **one} for side in sides for one in side.fallen]
    notes = [*_notes(before), *refused]
    if lost:
        notes += raise_regression(config, chosen, new, lost, run_id)
    if sides:
        kept = _keep(store, key, config, new, before, sides, lost, notes, run_id)
        told |= {"comparison": kept.id, "regressions": lost}
    headline = _headline(chosen, new, sides, lost)
    publish(config.name, headline, [table_of(side) for side in sides], lost, notes)
    return Completed(message=" ".join([headline, *notes]), data=told)


def checkpoint_of(store: Store, name: str) -> Artifact | None:
    """The checkpoint that is meant; None if the newest is, and there is none. Raises `ConfigError` for a wrong id."""
    if name == NEWEST:
        found = store.list("checkpoint")
        return found[-1] if found else None
    artifact = store.get(name)
    if artifact.kind != "checkpoint":
        raise ConfigError(f"schedule.checkpoint: {artifact.id} is none: `nautile artifacts checkpoint` lists them")
    return artifact


def comparison_key(new: Artifact, before: Earlier, config: RunConfig) -> str:
    """The key of the comparison of `new` by the rule of `[schedule]`."""
    section = config.schedule.model_dump(mode="json", include={"against", "rule", "margin"})
    inputs = {"new": new.full_id, **{role: one.full_id for role, one in before.by_role.items()}}
    return stage_key(KIND, VERSION, section, inputs)


def _evaluated(store: Store, config: RunConfig, checkpoint: Artifact, run_id: str) -> Artifact:
    """The evaluation of `checkpoint` by the configuration: the one the store has, or a new one."""
    label = f"evaluate:{checkpoint.manifest['label']}"  # as the pipeline calls it, which shares its key
    section, inputs = evaluate_section(config), {"checkpoint": checkpoint.full_id}
    needs = {"checkpoint": Need(checkpoint.manifest["label"], "checkpoint")}
    step = Step(label, evaluate, section, needs, key=evaluate.key(section, inputs))
    context = RunContext(run_id, str(store.root), False, label, config.name, config.launch)
    with cancelling():
        approval.before_step(store, config, step, False, run_id)
        with concurrency.permit(label) if concurrency.is_limited() else nullcontext():
            return store.get(as_prefect_task(evaluate)(section, inputs, context)["evaluation"])


def _compared(store: Store, key: str, new: Artifact, before: Earlier) -> Artifact | None:
    """The comparison with that key, if it is of these very makings of its inputs (a forced rerun is another making)."""
    try:
        found = store.find(KIND, key)
    except ConfigError:
        return None  # damaged: it is made anew
    makings = {"new": new.execution, **{role: one.execution for role, one in before.by_role.items()}}
    return found if found and found.manifest["input_executions"] == makings else None


def _keep(
    store: Store,
    key: str,
    config: RunConfig,
    new: Artifact,
    before: Earlier,
    sides: list[Side],
    lost: list[dict[str, Any]],
    notes: list[str],
    run_id: str,
) -> Artifact:
    """Publish the comparison as an artifact; the samples that changed are in the evaluations, and are only counted."""
    tables = [table_of(side) for side in sides]
    plain = [
        {
            "roles": side.roles,
            "evaluation": side.artifact.id,
            "left_out": side.unmatched,
            "changed": len(side.found["changed"]),
            **{name: value for name, value in side.found.items() if name != "changed"},
        }
        for side in sides
    ]
    with store.lock(key) as _:
        folder = store.staging(key) / "output" / KIND
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "comparison.json", {"sides": plain, "regressions": lost, "notes": notes})
        write_text(folder / "comparison.md", "\n".join(to_markdown(table) for table in tables))
        write_text(folder / "comparison.html", "\n".join(to_html(table) for table in tables))
        kept = store.publish(
            KIND,
            key,
            folder,
            stage="evaluation",
            version=VERSION,
            config=config.schedule.model_dump(mode="json", include={"against", "rule", "margin"}),
            inputs={"new": new, **before.by_role},
            facts={"regressions": lost, "benchmarks": {s.artifact.id: len(s.found["benchmarks"]) for s in sides}},
            run=run_id,
            label="evaluation",
            supersede=True,
        )
        store.discard(store.staging(key))
    try:
        Catalog(store).ingest(patience=5.0)
    except (CatalogBusy, ConfigError) as error:
        logger.warning("catalog: %s", error)  # built from files: whoever asks next takes it in
    return kept


def _notes(before: Earlier) -> list[str]:
    passed = [f"{count} {reason}" for reason, count in sorted(before.passed_over.items())]
    return [f"Passed over: {', '.join(passed)}."] if passed else []


def _headline(checkpoint: Artifact, new: Artifact, sides: list[Side], lost: list[dict[str, Any]]) -> str:
    said = f"{new.id} of {checkpoint.id}"
    if not sides:
        return f"{said}: no earlier evaluation to compare it with."
    if not lost:
        return f"{said}: no benchmark has fallen beyond its interval."
    names = ", ".join(f"{one['title']} ({100 * one['lead']:+.1f} against the {one['against']})" for one in lost)
    return f"{said} has REGRESSED: {names}."
