"""Read a sweep file: its arms and their runs, all checked before the first run begins."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from nautile.common.commands import config_words
from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.common.text import did_you_mean, visible
from nautile.configs.changes import short_names
from nautile.configs.load import load, load_own, locate
from nautile.configs.schema import RunConfig
from nautile.configs.sweep import SweepConfig
from nautile.evals.benchmarks.registry import composites, parts_of
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.evals.scoring.scores import k_of
from nautile.flows.dag import Step
from nautile.flows.forecast import forecast_calls, forecast_lines
from nautile.flows.run_state import EVALUATE
from nautile.flows.selection import PreparedRun, Selection, is_in_store, prepare_run
from nautile.store.artifacts import Store
from nautile.store.manifest import now

MOST_ARMS = 20  # maximum number of runs without --yes
LONGEST_VALUE = 40  # characters of a value in the name of an arm
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.]+")


@dataclass(frozen=True)
class SweepRun:
    """A run of the sweep: an arm with one seed.

    `settings`: all of its settings in the form of `--set`, including those of the whole sweep. `run_name`: the name of
    its configuration.
    """

    arm: str
    seed: int | None
    after: str | None
    settings: tuple[str, ...]
    run_name: str
    config: RunConfig
    prepared: PreparedRun

    @property
    def title(self) -> str:
        """The arm, and the seed if the sweep has several."""
        return self.arm if self.seed is None else f"{self.arm} seed {self.seed}"

    def left(self, store: Store) -> list[Step]:
        """The steps that are not in the store."""
        return [step for step in self.prepared.steps if not is_in_store(store, step)]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep. `base`: the configuration in the form of a command-line argument."""

    name: str
    file: Path
    base: str
    section: SweepConfig
    runs: tuple[SweepRun, ...]
    after: str  # label of the evaluation that is compared

    def record(self) -> dict[str, Any]:
        """The record of the sweep as JSON data, from which `flows.sweep.report` makes its report."""
        return {
            "name": self.name,
            "file": str(self.file.resolve()),
            "config": self.base,
            "verdict": self.section.verdict,
            "way": self.section.way,
            "after": self.after,
            "benchmarks": list(self.section.benchmarks),
            "runs": [
                {
                    "arm": run.arm,
                    "seed": run.seed,
                    "name": run.run_name,
                    "after": run.after or self.after,
                    "settings": list(run.settings),
                    "steps": [
                        {"label": step.label, "key": step.key, "outputs": list(step.outputs)}
                        for step in run.prepared.steps
                    ],
                }
                for run in self.runs
            ],
        }

    def save(self, store: Store) -> None:
        """Write the record to the store, with the time when each run first stood in it.

        For the dashboard, and for commands that take the newest checkpoint, which is to be none of a sweep.
        """
        store.prepare()
        store.sweeps.mkdir(exist_ok=True)
        path, record = store.sweeps / f"{self.name}.json", self.record()
        before = read_json(path)
        known = before.get("runs", []) if isinstance(before, dict) else []
        for run in record["runs"]:
            begun = (old.get("begun") for old in known if {**old, "begun": None} == {**run, "begun": None})
            run["begun"] = next(begun, None) or now()
        write_json(path, record)


def read_sweep(path: Path, store: Store, many: bool = False) -> Sweep:
    """Read and check a sweep: all configurations and DAGs, and that no two runs are the same.

    `path`: a file, or the name of a shipped sweep. `many`: allow more than `MOST_ARMS` runs. Raises `ConfigError` with
    the file and the arm.
    """
    path = locate(path, sweeps=True)
    section = load_own(path, SweepConfig)
    name = _name(path, store)
    # A configuration beside the sweep file comes first; else the word is as on the command line.
    beside = path.parent / section.config
    base = str(beside) if beside.is_file() else section.config
    arms = expand(section, path)
    count = len(arms) * max(1, len(section.seeds))
    if count > MOST_ARMS and not many:
        raise ConfigError(f"{path}: {count} runs; pass --yes to allow more than {MOST_ARMS}")
    runs: list[SweepRun] = []
    afters = {arm.name: EVALUATE + arm.after for arm in section.arms if arm.after}
    for arm, own in arms:
        for seed in section.seeds or (None,):
            settings = (*section.set, *own, *([] if seed is None else [f"seed={seed}"]))
            run_name = f"{name}.{_slug(arm)}" + ("" if seed is None else f".seed{seed}")
            try:
                # The words of the command line that will start this run: what is checked here is what runs later.
                words = (*settings, f"name={run_name}")
                config = load(base, words)
                selection = Selection(last=afters.get(arm, section.until))
                prepared = prepare_run(config, selection, store, config_words(base, words))
                runs.append(SweepRun(arm, seed, afters.get(arm), settings, run_name, config, prepared))
            except ConfigError as error:
                raise ConfigError(f"{path}: arm {arm!r}: {error}") from None
    after = _checked_evaluation(path, section, runs)
    _refuse_equal(path, runs)
    return Sweep(name, path, base, section, tuple(runs), after)


def planned(sweep: Sweep, store: Store) -> dict[str, Any]:
    """The steps that each run would reuse, share with a run before it, and compute; and the forecast of paid calls."""
    known_keys, runs, to_compute = set[str](), list[dict[str, Any]](), list[Step]()
    for run in sweep.runs:
        row: dict[str, Any] = {"arm": run.arm, "seed": run.seed, "settings": list(run.settings)}
        row |= {"reused": [], "shared": [], "computed": []}
        for step in run.prepared.steps:
            origin = "reused" if is_in_store(store, step) else "shared" if step.key in known_keys else "computed"
            row[origin].append(step.label)
            if origin == "computed":
                to_compute.append(step)
            # Runs side by side wait at the lock of a shared key, so the counts stay true.
            known_keys.add(step.key)
        runs.append(row)
    return {"runs": runs, "calls": forecast_lines(forecast_calls(to_compute, store))}


def expand(section: SweepConfig, path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Name and settings of each arm.

    Raises `ConfigError` for two arms with the same or a too similar name, and for fields that the sweep itself sets.
    """
    if section.grid is None:
        arms = [(arm.name, arm.set) for arm in section.arms]
    else:
        short = short_names(list(section.grid))
        arms = [
            (
                ", ".join(
                    f"{short[field]}={visible(value if isinstance(value, str) else toml_value(value), LONGEST_VALUE)}"
                    for field, value in zip(section.grid, values, strict=True)
                ),
                tuple(f"{field}={toml_value(value)}" for field, value in zip(section.grid, values, strict=True)),
            )
            for values in product(*section.grid.values())
        ]
    by_slug: dict[str, str] = {}
    for arm, settings in arms:
        # The slug is in file names and in the names of runs, so two arms must differ in it and not only in punctuation.
        if (other := by_slug.setdefault(_slug(arm), arm)) != arm or sum(name == arm for name, _ in arms) > 1:
            both = f"two arms are named {arm!r}" if other == arm else f"arms {other!r} and {arm!r}: names too similar"
            raise ConfigError(f"{path}: {both}; names must differ in letters, digits, `_` or `.`")
        for setting in (*section.set, *settings):
            field = setting.partition("=")[0].strip()
            if field == "name" or (field == "seed" and section.seeds):
                raise ConfigError(f"{path}: arm {arm!r} sets `{field}`, which the sweep itself sets for each run")
    return arms


def toml_value(value: Any) -> str:
    """A value in TOML syntax, in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(name)} = {toml_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value)


def setting_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings in the form of `--set`: `{"seed": 3}` is `seed=3`."""
    return [f"{field}={toml_value(value)}" for field, value in settings.items()]


def _name(path: Path, store: Store) -> str:
    """The name of the sweep: that of its file, with a digest of the path if another sweep file has the same name."""
    name = _slug(path.stem)
    record = read_json(store.sweeps / f"{name}.json")
    other = Path(record["file"]) if isinstance(record, dict) else path
    if not other.is_file() or other.samefile(path):
        return name
    return f"{name}-{sha256(str(path.resolve()).encode()).hexdigest()[:6]}"


def _slug(name: str) -> str:
    return _NOT_IN_A_NAME.sub("-", name).strip("-.") or "arm"


def _refuse_equal(path: Path, runs: Sequence[SweepRun]) -> None:
    """Raise `ConfigError` for two runs whose steps all have the same keys: they would be compared with themselves."""
    by_keys: dict[tuple[str, ...], SweepRun] = {}
    for run in runs:
        other = by_keys.setdefault(tuple(step.key for step in run.prepared.steps), run)
        if other is not run:
            raise ConfigError(
                f"{path}: arms {other.title!r} and {run.title!r} make the same artifacts: their settings differ only "
                "in fields that no key contains (docs/store.md lists these)"
            )


def _checked_evaluation(path: Path, section: SweepConfig, runs: Sequence[SweepRun]) -> str:
    """The label of the evaluation to compare, which all runs must have; checks `after` and `benchmarks`.

    An arm with an `after` of its own is compared by that evaluation, and needs no other.
    """
    evaluations = [
        [
            step
            for step in run.prepared.steps
            if step.label.startswith(EVALUATE) and "model_under_test" not in step.section
        ]
        for run in runs
    ]
    evaluated = [steps for steps, run in zip(evaluations, runs, strict=True) if run.after is None]
    if not evaluated:
        raise ConfigError(f"{path}: every arm has an `after` of its own: write it once for all, before the arms")
    labels = [step.label for step in evaluated[0] if all(step.label in {s.label for s in steps} for steps in evaluated)]
    names = [label.removeprefix(EVALUATE) for label in labels]
    if not labels:
        raise ConfigError(f"{path}: the arms have no common evaluation; `until` may end the runs before the first")
    if section.after is not None and section.after not in names:
        guess = did_you_mean(section.after, names)
        raise ConfigError(f"{path}: after: no evaluation of {section.after!r}{guess}; every arm has {', '.join(names)}")
    after = labels[-1] if section.after is None else EVALUATE + section.after
    labelled = zip(evaluations, (run.after or after for run in runs), strict=True)
    compared = [step for steps, label in labelled for step in steps if step.label == label]
    if section.way == "sampled":
        least = min(step.section["evaluate"]["samples"] or 0 for step in compared)
        if least < (k_of(section.verdict) or 1):
            raise ConfigError(
                f"{path}: way: {section.verdict} of sampled answers, and an arm asks for {least}; set evaluate.samples"
            )
    known = set.intersection(*({*_benchmarks(step)} for step in compared))
    for name in section.benchmarks:
        if name not in known:
            raise ConfigError(
                f"{path}: benchmarks: {name!r} is not evaluated in every arm{did_you_mean(name, known)}; "
                f"common to all: {', '.join(sorted(known))}"
            )
    return after


def _benchmarks(step: Step) -> set[str]:
    """The names of an evaluation's benchmarks, and of their means."""
    evaluate = step.section["evaluate"]
    names = {part for entry in evaluate["benchmarks"] for part in parts_of(entry["name"])}
    names |= {HELD_OUT} if evaluate.get("held_out") else set()
    return names | {name for name, parts in composites().items() if names >= set(parts)} | {"average"}
