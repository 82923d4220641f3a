"""Split labelled rows by a hash of their source: stable under reordering and adding of rows.

Rows of one source (an article, an author; by default the text itself) are always in one split, and so are copies.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nautile.common.errors import ConfigError
from nautile.data.screening.duplicates import HASH_RANGE, text_hash
from nautile.uses.labelled.config import TuneConfig
from nautile.uses.labelled.rows import LabelledRow, check_known, labels_of, read_rows, with_labels


@dataclass
class SplitReport:
    """Counts of rows in the data, and of those that were dropped. `balance`: split -> label -> rows."""

    rows: int = 0
    duplicates: int = 0  # further copies of a text with the same target, or of any if a text may have several labels
    contradictory_texts: int = 0  # texts that have several targets
    contradictory: int = 0  # rows of such texts; all of them are dropped
    leaked: dict[str, int] = field(default_factory=dict)  # split -> training rows dropped because they are in it too
    balance: dict[str, dict[str, int]] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)  # delimiters and encodings of the tables, where they were found
    examples: list[tuple[str, list[str]]] = field(default_factory=list)  # contradictory texts, cut, and their targets


@dataclass(frozen=True)
class Splits:
    """The rows of each split, and the labels in order (empty for a form without labels)."""

    train: list[LabelledRow]
    validation: list[LabelledRow]
    test: list[LabelledRow]
    labels: tuple[str, ...]
    report: SplitReport


def read_splits(config: TuneConfig, work: Path, files: Mapping[str, str]) -> Splits:
    """Read and split the configured data. `work`, `files`: see `read_rows`. Raises as `read_rows` and `split_rows`."""
    sections = (config.validation, config.test)
    form = "labels" if config.multi_label else config.form
    found: list[str] = []
    validation, test = (read_rows(section, form, work, files, found) if section else None for section in sections)
    rows = read_rows(config.data, form, work, files, found)
    splits = split_rows(
        rows, validation, test, validation_share=config.validation_share, test_share=config.test_share,
        leakage=config.leakage, labelled=config.form == "label", multi_label=config.multi_label,
    )  # fmt: skip
    splits.report.found += found
    return splits


def split_rows(
    rows: Sequence[LabelledRow],
    validation: Sequence[LabelledRow] | None,
    test: Sequence[LabelledRow] | None,
    *,
    validation_share: float,
    test_share: float,
    leakage: Literal["refuse", "drop"],
    labelled: bool,
    multi_label: bool = False,
) -> Splits:
    """Divide `rows` into the splits that are not given (None), and check all splits against each other.

    A row in two splits is an error with `leakage="refuse"`. With "drop" it is dropped from the training rows; a row
    that validation and test share stays in the test. Raises `ConfigError` for such leaks, for an empty split, and if
    `labelled` for a label that occurs once, that the training rows lack, or that is the only one. `multi_label`: the
    labels of a text's copies are put together; else copies with different labels are left out.
    """
    report = SplitReport(rows=len(rows) + len(validation or ()) + len(test or ()))
    # Copies go first. Of a text that is in several splits one copy is then in each, and shows below as a leak.
    train = _distinct(rows, report, multi_label)
    held_test = _distinct(test, report, multi_label) if test is not None else []
    held_validation = _distinct(validation, report, multi_label) if validation is not None else []
    if labelled:
        _check_labels(train)
    shares = (0.0 if test is not None else test_share, 0.0 if validation is not None else validation_share)
    if any(shares):
        parts: dict[str, list[LabelledRow]] = {"train": [], "validation": held_validation, "test": held_test}
        for row in train:
            position = text_hash(f"split/{row.source}") / HASH_RANGE  # uniform in [0, 1)
            split = "test" if position < shares[0] else "validation" if position < sum(shares) else "train"
            parts[split].append(row)
        train = parts["train"]
    held_out_keys: dict[str, set[int]] = {}
    for name, held_rows in (("test", held_test), ("validation", held_validation)):
        held_out_keys[name] = {text_hash(row.text) for row in held_rows}
        held_out_keys[name] |= {text_hash(row.source) for row in held_rows}
    for name, keys in held_out_keys.items():
        clean_rows = [row for row in train if not keys & {text_hash(row.text), text_hash(row.source)}]
        if len(clean_rows) < len(train):
            report.leaked[name] = len(train) - len(clean_rows)
        train = clean_rows
    test_keys = held_out_keys["test"]
    clean_rows = [row for row in held_validation if not test_keys & {text_hash(row.text), text_hash(row.source)}]
    if len(clean_rows) < len(held_validation):
        report.leaked["validation and test"] = len(held_validation) - len(clean_rows)
        held_validation = clean_rows
    if report.leaked and leakage == "refuse":
        counts = ", ".join(f"{count} with {name}" for name, count in report.leaked.items())
        raise ConfigError(
            f"tune: training rows that other splits have too: {counts}; take them out, or set tune.leakage = "
            '"drop" so that they are not learnt from'
        )
    parts = {"train": train, "validation": held_validation, "test": held_test}
    if empty := [name for name, part in parts.items() if not part]:
        raise ConfigError(f"tune: no row is left for {', '.join(empty)} of {report.rows} rows; give more rows")
    labels: tuple[str, ...] = ()
    if labelled:
        labels = tuple(sorted({label for row in train for label in labels_of(row)}))
        if multi_label and (always := [label for label in labels if all(label in labels_of(row) for row in train)]):
            raise ConfigError(
                f"tune: every training row has the label {always[0]!r}; give rows without it, or take it out"
            )
        for name in ("validation", "test"):
            check_known(parts[name], labels, f"tune: the {name} split")
        report.balance = {
            name: dict(Counter(label for row in part for label in labels_of(row))) for name, part in parts.items()
        }
    else:
        report.balance = {name: {"": len(part)} for name, part in parts.items()}
    return Splits(train, held_validation, held_test, labels, report)


def _check_labels(rows: Sequence[LabelledRow]) -> None:
    counts = Counter(label for row in rows for label in labels_of(row))
    if seldom := [(label, row.number) for row in rows for label in labels_of(row) if counts[label] == 1]:
        raise ConfigError(
            f"tune: {len(seldom)} label(s) occur once, such as {seldom[0][0]!r} in row {seldom[0][1]}: a label needs "
            "rows to learn from and rows to test on; give more of it, or take it out"
        )
    if len(counts) < 2:
        raise ConfigError(f"tune: no row has another label than {next(iter(counts), '')!r}; a task needs two")


def _distinct(rows: Sequence[LabelledRow], report: SplitReport, multi_label: bool) -> list[LabelledRow]:
    """Drop copies, and texts that have several targets; both are counted in the report.

    `multi_label`: of copies one is left, with the labels of all.
    """
    by_text: dict[int, list[LabelledRow]] = defaultdict(list)
    for row in rows:
        by_text[text_hash(row.text)].append(row)
    distinct_rows = []
    for copies in by_text.values():
        targets = sorted({row.target for row in copies})
        if multi_label:
            report.duplicates += len(copies) - 1
            distinct_rows.append(with_labels(copies[0], {label for row in copies for label in labels_of(row)}))
            continue
        if len(targets) > 1:
            report.contradictory_texts += 1
            report.contradictory += len(copies)
            if len(report.examples) < 5:
                report.examples.append((copies[0].text[:200], targets))
            continue
        report.duplicates += len(copies) - 1
        distinct_rows.append(copies[0])
    return distinct_rows
