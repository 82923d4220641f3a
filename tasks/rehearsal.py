"""What several stages have in common when they are made small for a rehearsal (`Stage.rehearsal`)."""

from collections.abc import Mapping
from typing import Any

STEPS = 2  # of a training
TOKENS = 16  # of a completion
PROBLEMS = 4


def few_problems(part: Mapping[str, Any]) -> dict[str, Any]:
    """A section of problems (JSON data) with a few of each of its sources."""
    sources = [{**source, "weight": 1.0} for source in part["sources"] or ()]
    return {**part, "count": min(part["count"], max(PROBLEMS, len(sources))), "sources": sources or None}


def short_rollout(part: Mapping[str, Any]) -> dict[str, Any]:
    """A section of rollouts (JSON data) with a few short completions, of prompts as long as they may be."""
    few = {"prompts": 2, "group": 2, "max_tokens": TOKENS, "thinking_budget": TOKENS // 2}
    return {**part, **{name: part[name] and min(value, part[name]) for name, value in few.items()}}
