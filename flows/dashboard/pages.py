"""The pages of the dashboard by theme, each by the reference of the function that draws it."""

from nautile.flows.uses import PAGES as PAGES_OF_USES
from nautile.flows.uses import Page

_HERE = "nautile.flows.dashboard"
OWN_PAGES = {  # address -> page
    "overview": Page("Runs", "Overview", f"{_HERE}.overview:page"),
    "compare": Page("Runs", "Compare", f"{_HERE}.compare:page"),
    "logs": Page("Runs", "Logs", f"{_HERE}.system:logs"),
    "system": Page("Runs", "System", f"{_HERE}.system:system"),
    "training": Page("Training", "Training", f"{_HERE}.curves:training"),
    "samples": Page("Training", "Training samples", f"{_HERE}.samples:training_samples"),
    "reinforcement": Page("Training", "Reinforcement", f"{_HERE}.curves:reinforcement"),
    "rollouts": Page("Training", "Rollouts and traces", f"{_HERE}.samples:rollouts"),
    "distillation": Page("Training", "Distillation", f"{_HERE}.samples:distillation"),
    "evaluations": Page("Evaluation", "Evaluations", f"{_HERE}.evaluations:page"),
    "lineage": Page("Artifacts", "Lineage", f"{_HERE}.artifacts:lineage"),
    "storage": Page("Artifacts", "Storage", f"{_HERE}.artifacts:storage"),
}
PAGES = OWN_PAGES | PAGES_OF_USES
