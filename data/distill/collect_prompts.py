"""Collect the prompts of a run: draw from all prompt sets in proportion, screen, drop duplicates, write files.

Every file has the sets in the run's proportions, so a distillation that stops early still has its mix. Finished files
survive a crash; a resume starts at the rows that the last marker names.

    prompts-00000.jsonl      the prompts      prompts-00000.u8, .bands.u8    hashes for finding their duplicates
    prompts-00000.json       the marker: rows read and prompts taken of each set, and rows dropped by reason
"""

import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.events import Emit
from nautile.common.files import write_atomically
from nautile.common.shares import whole_shares
from nautile.common.text import most_common_reasons
from nautile.configs.distill import DistillConfig, PromptSetConfig
from nautile.data.distill.prompts import Prompt, count_prompt_rows, read_prompt_set
from nautile.data.screening.duplicates import SeenTexts, TextHashes
from nautile.data.screening.language import detect_language
from nautile.data.tokens.losses import losses_line

BLOCK = 256  # rows of a set screened together

BenchmarkScreen = Callable[[Sequence[str]], Sequence[Any]]  # texts -> for each, the benchmark questions it overlaps


@dataclass
class CollectedPrompts:
    """What was collected: prompts by set, dropped rows by set and reason, and the files of `chunk` prompts each."""

    prompt_counts: Counter[str] = field(default_factory=Counter)  # by set
    dropped_rows: dict[str, Counter[str]] = field(default_factory=dict)  # set -> reason -> rows
    files: list[Path] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            name: {
                "prompts": self.prompt_counts[name],
                "left_out": dict(self.dropped_rows.get(name, Counter()).most_common()),
            }
            for name in sorted({*self.prompt_counts, *self.dropped_rows})
        }

    def lost(self, prompt_sets: Sequence[PromptSetConfig]) -> str:
        """The rows that could not be read, in one line with reason and path; empty if there are none."""
        names = {s.name: f"prompt set {s.name!r}, {s.path or s.source}" for s in prompt_sets}
        read = {names[name]: self.prompt_counts[name] + rows.total() for name, rows in self.dropped_rows.items()}
        return losses_line(read, {}, {names[name]: rows for name, rows in self.dropped_rows.items()})


def collect_prompts(
    config: DistillConfig, seed: int, work: Path, screen: BenchmarkScreen | None, emit: Emit
) -> CollectedPrompts:
    """Draw `config.prompts` prompts into files in `work`; the seed determines which. Finished files are skipped.

    Raises `ConfigError` for a set that cannot be read or has too few prompts, `Retryable` as `read_prompt_set`.
    """
    collected, seen_texts, rows_read = _load_finished(config, work)
    quota = quotas(config)
    total = sum(collected.prompt_counts.values())
    files = work / "prompt-sets"
    if total < config.prompts:
        check_set_sizes(config, {s.name: count_prompt_rows(s, files) for s in config.prompt_sets})
    rows = {s.name: _ScreenedRows(s, seed, files, rows_read[s.name], screen, seen_texts) for s in config.prompt_sets}
    while total < config.prompts:
        part: list[Prompt] = []
        while len(part) < config.chunk and total < config.prompts:
            # Next is the set that is furthest behind its quota; ties go by name.
            name = min(quota, key=lambda name: ((collected.prompt_counts[name] + 1) / quota[name], name))
            part.append(_next_prompt(rows[name], collected, seen_texts, quota[name]))
            collected.prompt_counts[name] += 1
            total += 1
        # All sets, also those without a prompt in this file: the last marker alone says where every set continues.
        rows_read |= {name: screened.rows_read for name, screened in rows.items()}
        _save(work, part, collected, seen_texts, rows_read)
        # Without the total: 100 % of the prompts are collected before the first of them is asked.
        emit("progress", done=total, total=None, unit="prompts", note=f"collecting {config.prompts:,} prompts")
    shutil.rmtree(files, ignore_errors=True)
    return collected


def check_set_sizes(config: DistillConfig, rows: Mapping[str, int]) -> None:
    """Raise `ConfigError` if a set has fewer rows than its quota of prompts. A check before any row is read.

    `rows`: number of rows by set, for the sets where it is known.
    """
    quota = quotas(config)
    short = [
        f"{name!r} has {rows[name]:,} rows, {count:,} asked"
        for name, count in quota.items()
        if rows.get(name, count) < count
    ]
    if short:
        raise ConfigError(
            f"distill.prompts {config.prompts:,} cannot be met: prompt set {'; '.join(short)}; lower distill.prompts, "
            "give other sets more weight, or set the `count` of this one"
        )


def quotas(config: DistillConfig) -> dict[str, int]:
    """Number of prompts of each set: its `count`, else by weight a share of what the counts leave."""
    remaining = config.prompts - sum(s.count or 0 for s in config.prompt_sets)
    weights = {s.name: s.weight for s in sorted(config.prompt_sets, key=lambda s: s.name) if s.count is None}
    quota = {s.name: s.count or 0 for s in config.prompt_sets} | (whole_shares(remaining, weights) if weights else {})
    return {name: count for name, count in quota.items() if count}


def read_prompts(path: Path) -> list[Prompt]:
    return [Prompt(**json.loads(line)) for line in path.read_bytes().splitlines()]


class _ScreenedRows:
    """Iterates over the rows of a prompt set: (prompt, its hashes), or (reason to drop the row, None)."""

    def __init__(
        self,
        config: PromptSetConfig,
        seed: int,
        files: Path,
        skip: int,
        screen: BenchmarkScreen | None,
        seen_texts: SeenTexts,
    ) -> None:
        self.config, self.rows_read = config, skip
        self._rows = read_prompt_set(config, seed, files, skip)
        self._screen, self._seen = screen, seen_texts
        self._block: deque[tuple[Prompt | str, TextHashes | None]] = deque()

    def __iter__(self) -> Iterator[tuple[Prompt | str, TextHashes | None]]:
        return self

    def __next__(self) -> tuple[Prompt | str, TextHashes | None]:
        if not self._block:
            self._read_block()
        if not self._block:
            raise StopIteration
        # Counted as a row is handed out, not as its block is read: the marker then names exactly the rows that are in a
        # file or dropped, and a resume begins with the next one.
        self.rows_read += 1
        return self._block.popleft()

    def _read_block(self) -> None:
        rows = [row for row, _ in zip(self._rows, range(BLOCK), strict=False)]
        queries = [row.query for row in rows if isinstance(row, Prompt)]
        # Screening and hashing are much faster for many texts at once.
        screened = zip(
            self._screen(queries) if self._screen else [None] * len(queries), self._seen.hashes(queries), strict=True
        )
        languages = self.config.languages
        for row in rows:
            if isinstance(row, str):  # the reason why there is no prompt in it
                self._block.append((row, None))
                continue
            hits, hashes = next(screened)
            if hits:
                self._block.append(("in_a_benchmark", None))
            elif languages and (detect_language(row.query) or languages[0]) not in languages:
                self._block.append(("other_language", None))
            else:
                self._block.append((row, hashes))


def _next_prompt(rows: _ScreenedRows, collected: CollectedPrompts, seen_texts: SeenTexts, quota: int) -> Prompt:
    """The next prompt of a set that is no duplicate. Raises `ConfigError` if there are no more."""
    name = rows.config.name
    drop_reasons = collected.dropped_rows.setdefault(name, Counter())
    for prompt, hashes in rows:
        if isinstance(prompt, str):
            drop_reasons[prompt] += 1
            continue
        assert hashes is not None, "every prompt was hashed with its block"
        if (duplicate := seen_texts.duplicate(hashes)) is not None:
            drop_reasons[duplicate] += 1
        else:
            seen_texts.add(hashes)
            return prompt
    reasons = most_common_reasons(drop_reasons) or "none dropped"
    raise ConfigError(
        f"distill.prompts needs {quota} prompts of prompt set {name!r}, but it has "
        f"{collected.prompt_counts[name]} distinct ones ({reasons}); lower distill.prompts, or give other sets more "
        "weight"
    )


def _save(
    work: Path, part: list[Prompt], collected: CollectedPrompts, seen_texts: SeenTexts, rows_read: dict[str, int]
) -> None:
    """Write a file of prompts and their hashes. The marker is written last: with it the file is finished."""
    stem = work / f"prompts-{len(collected.files):05d}"
    rows = "".join(json.dumps(asdict(prompt), ensure_ascii=True) + "\n" for prompt in part)
    # `take_unsaved` gives each hash once: those of this file's prompts.
    exact, bands = seen_texts.take_unsaved()
    write_atomically(stem.with_suffix(".jsonl"), rows.encode())
    write_atomically(stem.with_suffix(".u8"), exact)
    write_atomically(stem.with_suffix(".bands.u8"), bands)
    marker = {"rows_read": rows_read, "taken": collected.prompt_counts, "dropped": collected.dropped_rows}
    write_atomically(stem.with_suffix(".json"), json.dumps(marker).encode())
    collected.files.append(stem.with_suffix(".jsonl"))


def _load_finished(config: DistillConfig, work: Path) -> tuple[CollectedPrompts, SeenTexts, Counter[str]]:
    """Load what earlier processes collected: the prompts' counts and files, their hashes, and rows read by set."""
    collected, seen_texts, rows_read = CollectedPrompts(), SeenTexts(config.near_duplicates), Counter[str]()
    while (stem := work / f"prompts-{len(collected.files):05d}").with_suffix(".json").is_file():
        marker = json.loads(stem.with_suffix(".json").read_bytes())
        # The counts in a marker are sums over all files so far, so the last one replaces those before it.
        collected.prompt_counts = Counter(marker["taken"])
        collected.dropped_rows = {name: Counter(counts) for name, counts in marker["dropped"].items()}
        rows_read = Counter(marker["rows_read"])
        seen_texts.load(stem.with_suffix(".u8"), stem.with_suffix(".bands.u8"))
        collected.files.append(stem.with_suffix(".jsonl"))
    return collected, seen_texts, rows_read
