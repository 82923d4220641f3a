"""What an operator is asked in the middle of a run, and what they need to answer: the stage and its expected cost.

Cost is told from two sides: what the configuration allows (its money, tokens, prompts, steps), and what the same stage
took the last time it was made here. What is not known is said to be unknown.
"""

from datetime import datetime
from typing import Any

from common.errors import ConfigError
from common.text import amount, duration
from configs.schema import RunConfig
from flows.dag import Execution
from flows.operate import approval
from store.artifacts import Store

_LAST = """
SELECT r.config, max(r.ended) AS ended, sum(r.seconds) AS seconds,
    (SELECT sum(c.dollars) FROM calls c WHERE c.execution = r.execution) AS dollars
FROM runs r WHERE r.label = ? AND NOT r.reused
GROUP BY r.config, r.execution HAVING bool_or(r.state = 'done') ORDER BY (r.config = ?) DESC, ended DESC LIMIT 1
"""


def before(store: Store, config: RunConfig, execution: Execution, force: bool, run_id: str) -> None:
    """Ask whether to begin, where `[operation.STAGE] approve` says so; of what is there already nothing is asked.

    Raises `ConfigError` as `approval.ask`.
    """
    asked = config.operation.of(execution.stage)
    if not asked.approve or (not force and _made(store, execution)):
        return
    cost = expected(store, config, execution)
    question = f"Stage {execution.label} of {config.name} asks for approval before it begins. Expected cost: {cost}"
    approval.ask(store, run_id, f"approve:{execution.label}", execution.label, question, asked.patience)


def after(store: Store, config: RunConfig, execution: Execution, outputs: dict[str, str], run_id: str) -> None:
    """Ask whether to go on with less, where a stage's money ran out and `at_budget` is "pause"."""
    asked = config.operation.of(execution.stage)
    if asked.at_budget == "go_on":
        return
    for artifact_id in outputs.values():
        manifest = store.get(artifact_id).manifest
        facts = manifest["facts"]
        if facts.get("budget_exhausted") and manifest["run"] == run_id:  # whose it is has been asked when it was made
            question = (
                f"Stage {execution.label} of {config.name} stopped at its budget: {_left_undone(facts)}. To go on with "
                f"more, cancel, raise {execution.stage}.budget_dollars (or budget_tokens) and run "
                f"`nautile run {config.name} --from {execution.stage}`: that makes the stage anew. Or go on with less."
            )
            approval.ask(store, run_id, f"budget:{execution.label}", execution.label, question, asked.patience)
            return


def expected(store: Store, config: RunConfig, execution: Execution) -> str:
    """One line: what the stage may spend by its configuration, and what it took the last time."""
    return f"{'; '.join([*_allowed(config, execution), _last(store, config, execution)])}."


def _allowed(config: RunConfig, execution: Execution) -> list[str]:
    section: Any = execution.section.get(execution.stage) or {}
    if execution.stage == "pretrain":
        return [f"{amount(sum(phase.tokens for phase in config.pretrain.phases))} tokens to train on"]
    if execution.stage == "distill":
        return [f"{section['prompts']:,} prompts", _money(section)]
    if execution.stage in ("align", "reason"):
        rows = section["rollout"]["prompts"] * section["rollout"]["group"]
        return [f"{section['policy']['steps']:,} steps of {rows:,} completions"]
    if execution.stage == "self_distill":
        rows = section["problems"]["count"] * section["rollout"]["group"] * section["rounds"]
        return [f"{rows:,} completions to draw"]
    if execution.stage == "evaluate" and "model_under_test" in execution.section:
        return [_money(section)]
    return []


def _money(section: dict[str, Any]) -> str:
    limits = []
    if dollars := section.get("budget_dollars"):
        limits.append(f"${dollars:,.2f}")
    if tokens := section.get("budget_tokens"):
        limits.append(f"{tokens:,} tokens")
    return f"at most {' and '.join(limits)}" if limits else "no limit of money is set"


def _last(store: Store, config: RunConfig, execution: Execution) -> str:
    # Not above, as in flows/selection.py: the flow's module reaches this one, and Prefect keeps all that it reaches.
    from store.catalog import Catalog, CatalogBusy

    try:
        Catalog(store).ingest(patience=1.0)
        rows = Catalog(store).query(_LAST, [execution.label, config.name], patience=1.0)
    except (CatalogBusy, ConfigError) as error:
        return f"what it took before cannot be told now ({error})"
    if not rows or rows[0]["seconds"] is None:
        return "it was not made here before, so its time is not known"
    last = rows[0]
    when: datetime = last["ended"]
    money = f" and ${last['dollars']:,.4f}" if last["dollars"] is not None else ""
    whose = "" if last["config"] == config.name else f" for {last['config']}"
    return f"the last time{whose} ({when:%Y-%m-%d}) it took {duration(last['seconds'])}{money}"


def _left_undone(facts: dict[str, Any]) -> str:
    undone = facts.get("rejected", {}).get("failed_budget")
    spent = f"${facts['dollars']:,.4f} spent, " if facts.get("dollars") is not None else ""
    total = f" of {facts['prompts']:,}" if facts.get("prompts") else ""
    return f"{spent}{undone:,}{total} prompts were not asked about" if undone else f"{spent}its work is not done"


def _made(store: Store, execution: Execution) -> bool:
    try:
        return all(store.find(kind, execution.key) for kind in execution.outputs)
    except ConfigError:
        return False  # damaged: it will be made anew
