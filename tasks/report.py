"""The report as a stage: every artifact of the run in, one `report` out: report.html, report.md, report.json, and the
paper's two tables in files of their own.

Its key follows from the artifacts it reads, as any stage's does. Curves, calls and times come from the store's event
files, through the catalog, for the executions that made those artifacts.
"""

from collections import Counter

from common.errors import ConfigError
from common.files import write_json, write_text
from configs.evaluation import ReportConfig
from evals.tables.svg import picture
from store.mirror import open_store
from tasks.engine.job import Job
from tasks.engine.stage import stage
from tasks.reporting.data import gather, read_inputs
from tasks.reporting.render import html_page, markdown
from tasks.reporting.sections import compose, paper_tables
from tasks.reporting.tables import write_table


@stage("report", version=2, outputs=("report",))
def report(job: Job) -> None:
    """Gather, compose, draw."""
    if not job.inputs:
        raise ConfigError("stage report: it was given no artifacts to report on")
    config = job.part("report", ReportConfig)
    store = open_store(job.staging.parents[1])
    inputs = read_inputs(store, job.inputs)
    found = gather(store, inputs, config.samples)
    sections = compose(found)
    made = Counter(one.artifact.kind for one in inputs)
    subtitle = (
        f"From {len(inputs)} artifacts, the last of them made {inputs[-1].artifact.manifest['created'][:19]} UTC."
    )
    folder = job.output("report")
    write_json(folder / "report.json", {"title": config.title, **found})
    for name, table in zip(("table1", "table2"), paper_tables(found["scores"]), strict=True):
        write_table(folder, name, table, picture(table))
    write_text(folder / "report.md", markdown(config.title, subtitle, sections))
    write_text(folder / "report.html", html_page(config.title, subtitle, sections))
    job.describe("report", sections=[section.title for section in sections], inputs=dict(sorted(made.items())))
