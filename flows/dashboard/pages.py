"""The pages of the dashboard by theme: address, title, and the function that draws the page of the chosen run."""

import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from nautile.flows.dashboard import artifacts, compare, curves, evaluations, overview, samples, system
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.uses import PAGES as PAGES_OF_USES


class Page(NamedTuple):
    """A page: its theme (a heading of the navigation), its title, and the function that draws it."""

    theme: str
    title: str
    draw: Callable[[ChosenRun | None], None]


PAGES = {  # address -> page
    "overview": Page("Runs", "Overview", overview.page),
    "compare": Page("Runs", "Compare", compare.page),
    "logs": Page("Runs", "Logs", system.system),
    "system": Page("Runs", "System", system.system),
    "training": Page("Training", "Training", curves.training),
    "samples": Page("Training", "Training samples", samples.training_samples),
    "reinforcement": Page("Training", "Reinforcement", curves.reinforcement),
    "rollouts": Page("Training", "Rollouts and traces", samples.rollouts),
    "distillation": Page("Training", "Distillation", samples.distillation),
    "evaluations": Page("Evaluation", "Evaluations", evaluations.page),
    "lineage": Page("Artifacts", "Lineage", artifacts.lineage),
    "storage": Page("Artifacts", "Storage", artifacts.storage),
}


def _by_reference(reference: str) -> Callable[[ChosenRun | None], None]:
    """The function that draws a page, imported when it is first drawn."""
    return lambda run: pkgutil.resolve_name(reference)(run)


PAGES |= {address: Page(theme, title, _by_reference(draw)) for address, (theme, title, draw) in PAGES_OF_USES.items()}
