"""The file of `nautile sweep`: a configuration, the settings of its arms, and the benchmarks to compare them by.

config = "local"
seeds = [0, 1]

[grid]
"reason.policy.steps" = [3, 30]
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nautile.configs.base import Section, Seed


class ArmConfig(Section):
    """An arm of a sweep, if there is no grid."""

    name: str = Field(pattern=r"^[^\W_](.{0,58}\S)?$")
    set: tuple[str, ...] = ()  # settings in the syntax of `--set`; empty: the configuration as it is
    after: str | None = None  # this arm ends with, and is compared by, its evaluation after this stage


class SweepConfig(Section):
    """Arms from a grid (all combinations, the last field changing fastest) or from a list; each has a run per seed.

    The other arms are compared with the first one.
    """

    config: str  # a file beside this one or in the working folder, or the name of a shipped configuration
    set: tuple[str, ...] = ()  # settings of all arms, applied before their own
    grid: dict[str, tuple[Any, ...]] | None = None  # field -> its values
    arms: tuple[ArmConfig, ...] = ()
    seeds: tuple[Seed, ...] = ()  # of each run (`seed`); empty: the seed of the configuration
    until: str | None = None  # the last step of each run, as the option `--until` of `nautile run`
    after: str | None = None  # the stage whose evaluation is compared; None: the last one that all arms have
    benchmarks: tuple[str, ...] = ()  # to compare; empty: all that were evaluated, and their means
    verdict: str = Field("strict", pattern=r"^(strict|lenient|pass@[1-9][0-9]{0,5})$")  # pass@K: of way "sampled"
    way: Literal["generate", "likelihood", "sampled"] = "generate"

    @field_validator("grid", mode="before")
    @classmethod
    def _flat(cls, grid: Any) -> Any:
        """Flatten nested tables: without quotes TOML parses `align.policy.steps = [3]` as tables."""
        return dict(_leaves(grid, "")) if isinstance(grid, dict) else grid

    @model_validator(mode="after")
    def _arms_given(self) -> "SweepConfig":
        if (self.grid is None) == (not self.arms):
            raise ValueError("write either [grid] or [[arms]]" + (", not both" if self.arms else ""))
        if self.grid is not None and not self.grid:
            raise ValueError('grid: it is empty; write a field and its values, as "reason.policy.steps" = [3, 30]')
        for field, values in (self.grid or {}).items():
            if not values:
                raise ValueError(f"grid.{field}: it has no value")
        if self.verdict.startswith("pass@") and self.way != "sampled":
            raise ValueError(f'verdict {self.verdict}: needs several answers to a question: add way = "sampled"')
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: a seed is listed twice")
        return self


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
