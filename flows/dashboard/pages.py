"""The pages of the dashboard by theme: address, title, and the function that draws the page of the chosen run."""

from collections.abc import Callable
from typing import NamedTuple

from nautile.flows.dashboard.artifacts import lineage, storage
from nautile.flows.dashboard.evaluation import classification, evaluations, extraction, surveys
from nautile.flows.dashboard.runs import compare, logs, overview, system
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.dashboard.training import curves, distillation, samples, tuning


class Page(NamedTuple):
    """A page: its theme (a heading of the navigation), its title, and the function that draws it."""

    theme: str
    title: str
    draw: Callable[[ChosenRun | None], None]


PAGES = {  # address -> page
    "overview": Page("Runs", "Overview", overview.page),
    "compare": Page("Runs", "Compare", compare.page),
    "logs": Page("Runs", "Logs", logs.page),
    "system": Page("Runs", "System", system.page),
    "training": Page("Training", "Training", curves.training),
    "samples": Page("Training", "Training samples", samples.training_samples),
    "reinforcement": Page("Training", "Reinforcement", curves.reinforcement),
    "rollouts": Page("Training", "Rollouts and traces", samples.rollouts),
    "distillation": Page("Training", "Distillation", distillation.page),
    "tuning": Page("Training", "Tuning", tuning.page),
    "evaluations": Page("Evaluation", "Evaluations", evaluations.page),
    "classification": Page("Evaluation", "Classification", classification.page),
    "extraction": Page("Evaluation", "Extraction", extraction.page),
    "surveys": Page("Evaluation", "Surveys", surveys.page),
    "lineage": Page("Artifacts", "Lineage", lineage.page),
    "storage": Page("Artifacts", "Storage", storage.page),
}
