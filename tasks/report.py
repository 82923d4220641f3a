"""The `report` stage: from all artifacts of a run to one `report`.

It writes report.html, report.md and report.json, and the paper's two tables as files. Curves, endpoint calls and
durations come from the catalog, for the executions that published these artifacts.
"""

from collections import Counter

from nautile.common.errors import ConfigError
from nautile.common.files import write_json, write_text
from nautile.configs.evaluation import ReportConfig
from nautile.store.layout import StagingFiles
from nautile.store.mirror import open_store
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.tasks.reporting.data import collect, read_inputs
from nautile.tasks.reporting.opening import about_line
from nautile.tasks.reporting.render import html_page, markdown, write_table
from nautile.tasks.reporting.sections import compose, paper_tables

TITLE = "Nautile"


@stage("report", version=5, outputs=("report",))
def report(job: Job) -> None:
    """Collect the data of the run, compose the sections, render them as a page and as Markdown."""
    if not job.inputs:
        raise ConfigError("stage report: no inputs; run at least one other stage first")
    config = job.part("report", ReportConfig)
    # The store whose `staging/KEY` this is: a stage is not told of the store.
    store = open_store(StagingFiles(job.staging).store_root)
    inputs = read_inputs(store, job.inputs)
    data = collect(store, inputs, config.samples)
    sections = compose(data)
    kinds = Counter(item.artifact.kind for item in inputs)
    configuration = data["about"].get("configuration")
    title, subtitle = f"{TITLE}: {configuration}" if configuration else TITLE, about_line(data["about"])
    folder = job.output("report")
    write_json(folder / "report.json", {"title": TITLE, **data})
    for name, table in zip(("table1", "table2"), paper_tables(data["scores"]), strict=True):
        write_table(folder, name, table)
    write_text(folder / "report.md", markdown(title, subtitle, sections))
    write_text(folder / "report.html", html_page(title, subtitle, sections))
    job.describe("report", sections=[section.title for section in sections], inputs=dict(sorted(kinds.items())))
