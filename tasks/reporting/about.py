"""The line that says what a report is about, for its pages and for `nautile report`, which loads no more than this."""

from collections.abc import Mapping
from typing import Any

Facts = Mapping[str, Any]


def about_line(about: Facts) -> str:
    """One line about the run: configuration, seeds, commit, machine, run and time, as far as known."""
    names = {"commits": "commit", "machines": "machine", "run": "run"}
    parts = [f"configuration {about['configuration']}"] if "configuration" in about else []
    parts += _seeds_in_words(about.get("seeds", {}))
    for name, words in names.items():
        value = about.get(name)
        values = [value] if isinstance(value, str) else value or []
        parts += [f"{words} {', '.join(str(entry) for entry in values)}"] if values else []
    parts += [f"{about['artifacts']} artifacts, the newest of {about['newest']} UTC"] if "newest" in about else []
    return " · ".join(parts)


def _seeds_in_words(seeds: Mapping[str, list[int]]) -> list[str]:
    """One number if data, weights and sampling have the same seed, else each by name; evaluation's if it is not 0."""
    shown = {name: values for name, values in seeds.items() if name != "evaluation"}
    first = next(iter(shown.values()), [])
    if shown and all(values == first for values in shown.values()):
        shown = {"": first}
    if (tested := seeds.get("evaluation", [0])) != [0]:
        shown["evaluation"] = tested
    return [f"{name} seed {', '.join(map(str, values))}".strip() for name, values in shown.items()]
