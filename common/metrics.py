"""The glossary of metrics: title, unit, description, and what a good value looks like.

All charts, tables and documents take the texts of metrics from here; metrics.md beside this file has them.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """title: what people read in place of the name; unit: empty where the value is a bare number.

    good: what to expect of a healthy run, and what a bad value means. smooth: whether a moving average may be drawn
    of it; never for a schedule, a count, or what is measured a few times only.
    """

    title: str
    unit: str
    what: str
    good: str
    smooth: bool = True

    @property
    def help(self) -> str:
        """The tooltip: what it is, its unit, and what good looks like."""
        return " ".join(part for part in (self.what, f"Unit: {self.unit}." if self.unit else "", self.good) if part)


def _read() -> dict[str, dict[str, Metric]]:
    sections: dict[str, dict[str, Metric]] = {}
    for line in Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            entries = sections.setdefault(line.removeprefix("## "), {})
        elif line.startswith("| `"):
            name, title, unit, what, good, smooth = (cell.strip() for cell in line.strip("|").split("|"))
            entries[name.strip("`")] = Metric(title, unit, what, good, smooth != "no")
    return sections


# Section -> name -> metric. A name in angle brackets stands for any word: `rejected_<reason>`.
GLOSSARY = _read()
_KNOWN = {name: metric for section in GLOSSARY.values() for name, metric in section.items()}


@cache
def metric(name: str) -> Metric:
    """The glossary's entry of a metric; of an unknown one, its name in words and nothing else."""
    if name in _KNOWN:
        return _KNOWN[name]
    for pattern, entry in _KNOWN.items():
        # `<benchmark>` becomes a named group; a name in brackets stands for one part between slashes.
        if "<" in pattern and (match := re.fullmatch(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", pattern), name)):
            title = entry.title
            for word, value in match.groupdict().items():
                title = title.replace(f"<{word}>", value.replace("_", " "))
            return replace(entry, title=title)
    return Metric(name.replace("_", " "), "", "", "")
