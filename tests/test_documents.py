"""README, docs and the files for contributors: links resolve, README stays short, workflows call targets that exist."""

import re
from pathlib import Path

import pytest
import yaml

from tests.support.samples.document import Command, sections

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
    ]
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_of_a_page_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), (page, target)
        titles = re.findall(r"(?m)^#+ (.+)$", linked.read_text(encoding="utf-8")) if heading else []
        assert not heading or heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["operations", "servers", "uses", "one-gpu"])  # whose commands tests run
def test_every_command_is_read_as_one_and_what_is_not_tried_names_a_test_that_tries_it_small(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    commands = [item for items in sections(text).values() for item in items if isinstance(item, Command)]
    assert len(commands) == sum(line.startswith("$ ") for line in text.splitlines())
    for why in (command.untried for command in commands if command.untried):
        named = re.findall(r"tests/[\w/]+\.py", why)
        assert named, why
        assert all((ROOT / test).is_file() for test in named), why
    outside = re.sub(r"^```console\n.*?^```$", "", text.partition("\n## ")[2], flags=re.MULTILINE | re.DOTALL)
    assert [line for line in outside.splitlines() if line.startswith(("nautile ", "prefect ", "export "))] == []


def test_the_readme_is_at_most_1500_words():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500


def test_workflows_and_forms_are_whole_and_call_targets_of_the_makefile():
    targets = re.findall(
        r"(?m)^([\w.$()/-]+):", (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(READY)", ".venv/.ready")
    )
    steps = [
        step
        for workflow in WORKFLOWS
        for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
    ]
    called = [words[-1] for words in (step.get("run", "").split() for step in steps) if words[:1] == ["make"]]
    assert {"check", "test-all"} <= set(called) <= set(targets)
    assert all(
        {"name", "description", "body"} <= yaml.safe_load(form.read_text(encoding="utf-8")).keys() for form in FORMS
    )
    assert WORKFLOWS
    assert FORMS
