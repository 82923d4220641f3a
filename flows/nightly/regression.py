"""What happens when an evaluation has regressed: the samples that were lost, put where people look.

An automation of the deployment starts this flow on the event `nautile.regression` (`flows.operate.deployments`); it
can be run
by hand for any two evaluations as well.
"""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from common.text import fenced, visible
from evals.scoring.comparison import comparison_table
from evals.tables.results import to_markdown
from flows.cli.compare import compared
from store.mirror import open_store

SHOWN, LONGEST = 10, 600


@flow(name="regression", flow_run_name="regression of {after}", retries=0, log_prints=False)
def regression(after: str, before: str, store_root: str | None = None) -> State[dict[str, Any]]:
    """Show what evaluation `after` got wrong that `before` had right, and how to look further."""
    found = compared(open_store(store_root), before, after, "strict", "generate")
    lost = [one for one in found["changed"] if one["change"] == "lost"]
    create_markdown_artifact(
        evidence(found, lost, before, after), key="regression", description=visible(f"{after} after {before}", 200)
    )
    message = f"{len(lost):,} samples were lost from {before} to {after}, {len(found['changed']) - len(lost):,} gained."
    return Completed(message=message, data={"lost": len(lost), "changed": len(found["changed"])})


def evidence(found: dict[str, Any], lost: list[dict[str, Any]], before: str, after: str) -> str:
    """Markdown: the paired table, the commands that show more, and the first samples; what models said is fenced."""
    parts = [to_markdown(comparison_table(found, "Before", "After"))]
    parts.append(f"Everything that changed: `nautile compare {before} {after}`. Its origin: `nautile lineage {after}`.")
    parts.append(f"**{len(lost):,} samples lost**, the first {min(SHOWN, len(lost))}:")
    for one in lost[:SHOWN]:
        parts.append(f"{one['benchmark']} {one['index']}")
        said = [f"expected: {visible(one['expected'], 200)}", visible(one["prompt"], LONGEST)]
        said += [
            f"{name}: {visible(one[side]['output'] or '', LONGEST)}" for name, side in (("before", "a"), ("after", "b"))
        ]
        parts.append(fenced("\n\n".join(said)))
    return "\n\n".join(parts)
