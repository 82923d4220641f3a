"""Commands and dashboard pages of the uses of a model, by reference: `module:name`, imported when it is used.

Nothing else of `flows` knows of them. Without the folder `uses` there are none, and everything else works.
"""

import pkgutil
from importlib.util import find_spec
from typing import Any, NamedTuple


class UseCommand(NamedTuple):
    """The line of a command in `nautile --help`, and its function."""

    help: str
    reference: str


class Page(NamedTuple):
    """A page of the dashboard: its theme (a heading of the navigation), its title, and the function that draws it."""

    theme: str
    title: str
    reference: str

    def draw(self, run: Any) -> None:
        """Draw the page of a run (`dashboard.shared.ChosenRun`, or None)."""
        pkgutil.resolve_name(self.reference)(run)


COMMANDS = {
    "distill": UseCommand(
        "Label texts with a teacher model, and measure its agreement with rows that people have labelled.",
        "nautile.uses.label.command:distill",
    ),
    "tune": UseCommand(
        "Fine-tune a checkpoint on labelled rows, and compare it with baselines trained on the same rows.",
        "nautile.uses.tune.command:tune",
    ),
    "classify": UseCommand(
        "Label every text: with a checkpoint tuned on labels, or zero-shot by the likelihood of each of --labels.",
        "nautile.uses.labelled.command:classify",
    ),
    "extract": UseCommand(
        "Extract a JSON document from every text, constrained to a schema, and check it against the text.",
        "nautile.uses.labelled.command:extract",
    ),
    "simulate": UseCommand(
        "Simulate a survey: option probabilities by persona and group, compared with human answers and baselines.",
        "nautile.uses.simulate.command:simulate",
    ),
    "rescore": UseCommand(
        "Score stored rollouts again, by another reward or judge, without sampling; show what it would change.",
        "nautile.uses.rescore.command:rescore",
    ),
}
PAGES = {  # address -> page
    "tuning": Page("Training", "Tuning", "nautile.uses.tune.page:page"),
    "classification": Page("Evaluation", "Classification", "nautile.uses.classify.page:page"),
    "extraction": Page("Evaluation", "Extraction", "nautile.uses.extract.page:page"),
    "surveys": Page("Evaluation", "Surveys", "nautile.uses.simulate.page:page"),
}
if find_spec("nautile.uses") is None:
    COMMANDS.clear()
    PAGES.clear()
