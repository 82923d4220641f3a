"""The prompts of a run on disk: drawn from all prompt sets in step, screened, without copies, in files of `chunk`.

Sets take turns so that every file holds them in the run's proportions: a distillation that stops early has its mix. A
finished file stands after a crash; the next one begins where its mark says each set had been read to.

    prompts-00000.jsonl      the prompts      prompts-00000.u8, .bands.u8    what they are known again by
    prompts-00000.json       the mark: rows read and prompts taken of each set, and what was left out and why
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.events import Emit
from common.files import write_atomically
from configs.distill import DistillConfig, PromptSetConfig
from data.distill.prompts import Prompt, read
from data.distill.seen import SeenTexts
from data.screening.language import detect_language

BLOCK = 256  # rows of a set screened together

BenchmarkScreen = Callable[[Sequence[str]], Sequence[Any]]  # for each text something true if a benchmark asks it


@dataclass
class CollectedPrompts:
    """What was drawn: by set, prompts taken and rows left out by reason. `files`: of `chunk` prompts each."""

    taken: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            name: {"prompts": self.taken[name], "left_out": dict(self.dropped.get(name, Counter()).most_common())}
            for name in sorted({*self.taken, *self.dropped})
        }


def collect_prompts(
    config: DistillConfig, seed: int, work: Path, screen: BenchmarkScreen | None, emit: Emit
) -> CollectedPrompts:
    """Draw `config.prompts` prompts into `work`; the same ones for the same seed. Finished files are not drawn again.

    Raises `ConfigError` for a set that cannot be read or runs out before it has given its part; `Retryable` as `read`.
    """
    gathered, novelty, rows_read = _resumed(config, work)
    quota = quotas(config)
    sets = {one.name: _Source(one, seed, rows_read[one.name], screen, novelty) for one in config.prompt_sets}
    total = sum(gathered.taken.values())
    while total < config.prompts:
        part: list[Prompt] = []
        while len(part) < config.chunk and total < config.prompts:
            name = min(quota, key=lambda one: ((gathered.taken[one] + 1) / quota[one], one))
            part.append(_next(sets[name], gathered, novelty, quota[name]))
            gathered.taken[name] += 1
            total += 1
        rows_read |= {name: source.rows_read for name, source in sets.items()}
        _keep(work, part, gathered, novelty, rows_read)
        emit("progress", done=total, total=config.prompts, unit="prompts", note="gathering")
    return gathered


def quotas(config: DistillConfig) -> dict[str, int]:
    """How many prompts each set gives: its count, or by weight a part of what the counts leave (largest remainders)."""
    left = config.prompts - sum(one.count or 0 for one in config.prompt_sets)
    weights = {one.name: one.weight for one in config.prompt_sets if one.count is None}
    shares = {name: left * weight / sum(weights.values()) for name, weight in weights.items()}
    found = {one.name: one.count or 0 for one in config.prompt_sets} | {name: int(s) for name, s in shares.items()}
    short = config.prompts - sum(found.values())
    for name in sorted(shares, key=lambda one: (int(shares[one]) - shares[one], one))[:short]:
        found[name] += 1
    return {name: count for name, count in found.items() if count}


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of one gathered file."""
    return [Prompt(**json.loads(line)) for line in path.read_bytes().splitlines()]


class _Source:
    """A set's rows, screened a block at a time. Iterates over (prompt, its mark) or (reason, None), in order."""

    def __init__(
        self, config: PromptSetConfig, seed: int, skip: int, screen: BenchmarkScreen | None, novelty: SeenTexts
    ) -> None:
        self.config, self.rows_read = config, skip
        self._rows = read(config, seed, skip)
        self._screen, self._novelty = screen, novelty
        self._waiting: deque[tuple[Prompt | str, Any]] = deque()

    def __iter__(self) -> Iterator[tuple[Prompt | str, Any]]:
        return self

    def __next__(self) -> tuple[Prompt | str, Any]:
        if not self._waiting:
            self._fill()
        if not self._waiting:
            raise StopIteration
        self.rows_read += 1
        return self._waiting.popleft()

    def _fill(self) -> None:
        block = [row for row, _ in zip(self._rows, range(BLOCK), strict=False)]
        held = iter(self._screened([row.query for row in block if isinstance(row, Prompt)]))
        wanted = self.config.languages
        for row in block:
            if isinstance(row, Prompt):
                reason, mark = next(held)
                if reason is None and wanted and (detect_language(row.query) or wanted[0]) not in wanted:
                    reason = "other_language"
                self._waiting.append((row, mark) if reason is None else (reason, None))
            else:
                self._waiting.append((row, None))

    def _screened(self, queries: list[str]) -> list[tuple[str | None, Any]]:
        hits = self._screen(queries) if self._screen else [None] * len(queries)
        marks = self._novelty.marks(queries)
        return [("in_a_benchmark" if hit else None, mark) for hit, mark in zip(hits, marks, strict=True)]


def _next(source: _Source, gathered: CollectedPrompts, novelty: SeenTexts, quota: int) -> Prompt:
    """The set's next prompt that is none of those there already."""
    name = source.config.name
    dropped = gathered.dropped.setdefault(name, Counter())
    for prompt, mark in source:
        if isinstance(prompt, str):
            dropped[prompt] += 1
        elif (copy := novelty.copy(mark)) is not None:
            dropped[copy] += 1
        else:
            novelty.add(mark)
            return prompt
    left_out = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common(4)) or "none left out"
    raise ConfigError(
        f"distill.prompts asks for {quota} of prompt set {name!r}, but it has {gathered.taken[name]} distinct prompts "
        f"({left_out}); ask for fewer, or give other sets more weight"
    )


def _keep(
    work: Path, part: list[Prompt], gathered: CollectedPrompts, novelty: SeenTexts, rows_read: dict[str, int]
) -> None:
    """Write a file and what belongs to it, its mark last."""
    stem = work / f"prompts-{len(gathered.files):05d}"
    rows = "".join(json.dumps(asdict(prompt), ensure_ascii=True) + "\n" for prompt in part)
    exact, bands = novelty.take_fresh()
    write_atomically(stem.with_suffix(".jsonl"), rows.encode())
    write_atomically(stem.with_suffix(".u8"), exact)
    write_atomically(stem.with_suffix(".bands.u8"), bands)
    mark = {"rows_read": rows_read, "taken": gathered.taken, "dropped": gathered.dropped}
    write_atomically(stem.with_suffix(".json"), json.dumps(mark).encode())
    gathered.files.append(stem.with_suffix(".jsonl"))


def _resumed(config: DistillConfig, work: Path) -> tuple[CollectedPrompts, SeenTexts, Counter[str]]:
    gathered, novelty, rows_read = CollectedPrompts(), SeenTexts(config.near_duplicates), Counter[str]()
    while (stem := work / f"prompts-{len(gathered.files):05d}").with_suffix(".json").is_file():
        mark = json.loads(stem.with_suffix(".json").read_bytes())
        gathered.taken = Counter(mark["taken"])
        gathered.dropped = {name: Counter(counts) for name, counts in mark["dropped"].items()}
        rows_read = Counter(mark["rows_read"])
        novelty.load(stem.with_suffix(".u8"), stem.with_suffix(".bands.u8"))
        gathered.files.append(stem.with_suffix(".jsonl"))
    return gathered, novelty, rows_read
