"""The flow that runs after a regression: publish the samples whose verdict got worse as a Prefect artifact.

An automation of the deployment starts it on the event `nautile.regression` (`flows.operate.automations`). It can also
be started manually for any two evaluations.
"""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from nautile.common.commands import shell_command
from nautile.common.text import fenced, visible
from nautile.evals.scoring.comparison import comparison_table
from nautile.evals.tables.results import to_markdown
from nautile.flows.operate.automations import sent_before_the_end
from nautile.flows.sweep.comparisons import compare_evaluations
from nautile.store.mirror import open_store

MAX_SAMPLES, MAX_CHARACTERS = 10, 600  # what a page in Prefect shows comfortably; the command shows the rest


@flow(name="regression", flow_run_name="regression of {after}", retries=0, log_prints=False)
def regression(after: str, before: str) -> State[dict[str, Any]]:
    """Show the samples that are right in evaluation `before` and wrong in `after`, and the commands that show more."""
    with sent_before_the_end():
        comparison = compare_evaluations(open_store(), before, after, "strict", "generate")
        changed = comparison["changed"]
        lost = [sample for sample in changed if sample["change"] == "lost"]
        create_markdown_artifact(
            regression_report(comparison, lost, before, after),
            key="regression",
            description=visible(f"{after} after {before}", 200),
        )
    message = f"{len(lost):,} samples were lost from {before} to {after}, {len(changed) - len(lost):,} gained."
    return Completed(message=message, data={"lost": len(lost), "changed": len(changed)})


def regression_report(comparison: dict[str, Any], lost: list[dict[str, Any]], before: str, after: str) -> str:
    """The report as Markdown: the paired table, commands that show more, and the first lost samples as fenced text."""
    parts = [
        to_markdown(comparison_table(comparison, "Before", "After")),
        f"All changed samples: `{shell_command('nautile', 'compare', before, after)}`. Its origin: "
        f"`{shell_command('nautile', 'lineage', after)}`.",
        f"**{len(lost):,} samples lost**, the first {min(MAX_SAMPLES, len(lost))}:",
    ]
    for sample in lost[:MAX_SAMPLES]:
        # Everything from the model and the benchmark stands in a fence, so that it is not rendered in Prefect's page.
        texts = [f"expected: {visible(sample['expected'], 200)}", visible(sample["prompt"], MAX_CHARACTERS)]
        for name, side in (("before", "a"), ("after", "b")):
            texts.append(f"{name}: {visible(sample[side]['output'] or '', MAX_CHARACTERS)}")
        parts += [f"{sample['benchmark']} {sample['index']}", fenced("\n\n".join(texts))]
    return "\n\n".join(parts)
