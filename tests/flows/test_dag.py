"""The DAG: what depends on what, and which keys a change of the configuration moves."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.configs.distill import IndexConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.load import load
from nautile.configs.plugins import PlugIn
from nautile.configs.rewards import REWARDS
from nautile.configs.schema import RunConfig
from nautile.configs.stages import STAGES
from nautile.evals.benchmarks.catalogue import Benchmark
from nautile.evals.benchmarks.registry import BENCHMARKS
from nautile.evals.benchmarks.versions import GRADERS
from nautile.flows.dag import Need, Step, build_dag, pipeline_steps
from tests.support.stages.toy_dag import toy_dag

ROOT = Path(__file__).resolve().parents[2]

LABELS = [
    "held_out",
    "ingest:wikipedia",
    "ingest:synth",
    "index",
    "distill",
    "pretrain",
    "evaluate:pretrain",
    "align",
    "evaluate:align",
    "reason",
    "evaluate:reason",
    "self_distill",
    "evaluate:self_distill",
    "report",
]


OWN_TOKENIZER = {"ranks": 2048, "train": {"megabytes": {"synth": 1.0}}}


def alone(config: RunConfig) -> dict:
    """Each source by itself: none is compared with an earlier one."""
    return {**config.ingest.model_dump(), "deduplicate": {"across": False}}


def keys(config: RunConfig) -> dict[str, str]:
    return {step.label: step.key for step in build_dag(config, toy_dag)}


def changed(config: RunConfig, **update) -> list[str]:
    """Labels whose keys move when top-level fields of the configuration are replaced."""
    before, after = keys(config), keys(RunConfig.model_validate({**config.model_dump(), **update}))
    return [label for label in before if before[label] != after.get(label)]


def test_each_reads_what_is_made_before_it(toy):
    steps = {step.label: step for step in build_dag(toy, toy_dag)}
    seen: dict[str, tuple[str, ...]] = {}
    for label, step in steps.items():
        for need in step.needs.values():
            assert need.kind in seen[need.producer]
        seen[label] = step.outputs
    assert steps["pretrain"].needs == {
        "wikipedia": Need("ingest:wikipedia", "tokens"),
        "synth": Need("ingest:synth", "tokens"),
        "distilled": Need("distill", "tokens"),
    }
    assert steps["index"].needs == {"exemplars": Need("ingest:synth", "exemplars")}
    assert steps["distill"].needs["retrieval"] == Need("index", "retrieval")
    assert steps["reason"].needs["checkpoint"] == Need("align", "checkpoint")
    assert steps["evaluate:reason"].needs == {"checkpoint": Need("reason", "checkpoint")}


def test_supervised_training_stands_between_pretraining_and_reinforcement(toy):
    solutions = {"problems": {"count": 8, "tasks": [{"name": "gcd"}]}, "optimizer": {}}
    config = RunConfig.model_validate({**toy.model_dump(), "supervise": solutions})
    before, steps = keys(toy), {step.label: step for step in build_dag(config, toy_dag)}
    place = LABELS.index("align")
    assert list(steps) == [*LABELS[:place], "supervise", "evaluate:supervise", *LABELS[place:]]
    assert steps["supervise"].needs == {
        "checkpoint": Need("pretrain", "checkpoint"), "questions": Need("held_out", "questions")
    }  # fmt: skip
    assert steps["align"].needs["checkpoint"] == Need("supervise", "checkpoint")
    assert [label for label in before if steps[label].key == before[label]] == LABELS[:place]


def test_each_step_names_what_it_uses(toy):
    resources = {step.label: step.resource for step in build_dag(toy, toy_dag)}
    trained = {
        f"{prefix}{name}" for name in ("pretrain", "align", "reason", "self_distill") for prefix in ("", "evaluate:")
    }
    assert {label for label, resource in resources.items() if resource == "accelerator"} == trained
    assert {label for label, resource in resources.items() if resource == "network"} == {"distill"}
    assert set(resources.values()) <= toy.resources.limits().keys()
    embedded = {step.label: step.resource for step in build_dag(load("local"))}  # its teacher runs on this machine
    assert embedded["distill"] == "cpu"


def test_whatever_is_trained_on_is_screened_against_the_benchmarks(toy):
    steps = {step.label: step for step in build_dag(toy, toy_dag)}
    screened = {"ingest:wikipedia", "ingest:synth", "distill", "align", "reason", "self_distill"}
    reading = {label for label, step in steps.items() if Need("held_out", "questions") in step.needs.values()}
    assert reading == screened | {"report"}


def test_a_later_source_reads_the_signatures_of_the_earlier_ones(toy):
    steps = {step.label: step for step in build_dag(toy, toy_dag)}
    assert steps["ingest:synth"].needs["against.wikipedia"] == Need("ingest:wikipedia", "signatures")
    assert not any(name.startswith("against.") for name in steps["ingest:wikipedia"].needs)
    config = RunConfig.model_validate({**toy.model_dump(), "ingest": alone(toy)})
    apart = {step.label: step for step in build_dag(config, toy_dag)}
    assert apart["ingest:wikipedia"].outputs == ("tokens",)
    assert set(apart["ingest:synth"].needs) == {"questions"}


def test_a_tokenizer_of_its_own_is_read_by_what_tokenises_and_depends_on_the_sources_that_it_reads(toy):
    own = RunConfig.model_validate({**toy.model_dump(), "tokenizer": {**OWN_TOKENIZER, "ranks": 300}})
    steps = {step.label: step for step in build_dag(own)}
    reading = {label for label, step in steps.items() if Need("tokenizer", "tokenizer") in step.needs.values()}
    assert reading == {"ingest:wikipedia", "ingest:synth", "distill", "report"}
    assert not any("tokenizer" in steps[label].section for label in reading)

    def moved(**changes) -> bool:
        sources = own.model_dump()["ingest"]["sources"]
        sources = [source | changes.get(source["name"], {}) for source in sources]
        ingest = {**own.ingest.model_dump(), "sources": sources}
        config = RunConfig.model_validate({**own.model_dump(), "ingest": ingest})
        return next(step for step in build_dag(config) if step.label == "tokenizer").key != steps["tokenizer"].key

    assert moved(synth={"records": 7})
    assert not moved(
        synth={"train_on": "replies", "validation_share": 0.5, "rows_per_shard": 3}, wikipedia={"records": 7}
    )
    unknown = {"ranks": 300, "train": {"megabytes": {"books": 1}}}
    with pytest.raises(ValidationError, match=r"tokenizer\.train\.megabytes: ingest\.sources has none named books"):
        RunConfig.model_validate({**toy.model_dump(), "tokenizer": unknown})


def test_how_many_items_are_asked_moves_no_training(toy):
    """All of a benchmark are held out, however few are asked; of one made to the number asked for, those.

    Where no list says what is held out.
    """
    benchmarks = [{"name": "gsm8k", "items": 10}, {"name": "wiki_trivia", "items": 10}]
    evaluate = toy.evaluate.model_dump()
    base = RunConfig.model_validate({**toy.model_dump(), "evaluate": {**evaluate, "benchmarks": benchmarks}})
    fewer = [{**benchmarks[0], "items": 5}, benchmarks[1]]
    assert changed(base, evaluate={**evaluate, "benchmarks": fewer})[0] == "evaluate:pretrain"
    made = [benchmarks[0], {**benchmarks[1], "items": 5}]
    assert changed(base, evaluate={**evaluate, "benchmarks": made}) == LABELS


@pytest.mark.parametrize("name", ["local", "nautile_370m"])
@pytest.mark.parametrize("what", ["reordered", "pinned to another commit", "dropped", "added"])
def test_what_is_asked_moves_evaluations_and_the_report_alone(name, what):
    config = load(name)
    rows = config.evaluate.model_dump()["benchmarks"]
    real = {"name": "gsm8k", "revision": "0" * 40, "items": 3}
    asked = {
        "reordered": rows[::-1],
        "pinned to another commit": [*(row for row in rows if row["name"] != "gsm8k"), real],
        "dropped": rows[1:],
        "added": [*rows, {"name": "instructions", "items": 3}],
    }[what]
    after = RunConfig.model_validate(
        {**config.model_dump(), "evaluate": {**config.evaluate.model_dump(), "benchmarks": asked}}
    )
    before, keys_after = ({step.label: step.key for step in build_dag(one)} for one in (config, after))
    moved = [label for label in before if before[label] != keys_after[label]]
    assert moved == [label for label in before if label.startswith("evaluate:") or label == "report"]


def test_what_is_held_out_is_one_list_in_any_order(toy):
    """Ingestion and what follows from it depend on the list alone; without one it is what is asked."""
    rows = [{"name": "wiki_trivia", "items": 10}, {"name": "gsm8k", "items": 10}, {"name": "mmlu"}]
    base = RunConfig.model_validate({**toy.model_dump(), "held_out": {"benchmarks": rows}})
    assert changed(base, held_out={"benchmarks": rows[::-1]}) == []
    assert changed(base, held_out={"benchmarks": [rows[0], {"name": "gsm8k"}, rows[2]]}) == []
    assert changed(base, held_out={"benchmarks": rows[1:]}) == LABELS
    asked = {**toy.evaluate.model_dump(), "benchmarks": rows}
    without_a_list = RunConfig.model_validate({**toy.model_dump(), "evaluate": asked})
    assert keys(without_a_list)["held_out"] == keys(base)["held_out"]
    assert changed(base, evaluate=asked)[0] == "evaluate:pretrain"


@pytest.mark.parametrize(
    ("planted", "asked"),
    [
        *(
            (
                lambda patch, name=name: patch.setitem(BENCHMARKS._entries, name, replace(BENCHMARKS[name], version=2)),
                name,
            )
            for name in ("gsm8k", "wiki_choice")
        ),
        (lambda patch: patch.setitem(GRADERS, "exact", GRADERS["exact"] + 1), "wiki_trivia"),
        (lambda patch: patch.setitem(GRADERS, "math", GRADERS["math"] + 1), "gsm_symbolic"),
    ],
)
def test_another_parser_or_grader_makes_a_new_evaluation_of_its_benchmark_and_trains_nothing(
    toy, monkeypatch, planted, asked
):
    def config(*names: str) -> RunConfig:
        listed = {**toy.evaluate.model_dump(), "held_out": None, "benchmarks": [{"name": name} for name in names]}
        return RunConfig.model_validate({**toy.model_dump(), "evaluate": listed})

    using, others = config(asked, "ifeval"), config("ifeval", "mmlu")
    before = keys(using), keys(others)
    planted(monkeypatch)
    after = keys(using), keys(others)
    moved = [label for label in LABELS if before[0][label] != after[0][label]]
    assert moved == [label for label in LABELS if label.startswith("evaluate:") or label == "report"]
    assert before[1] == after[1]


def test_the_source_of_a_plug_ins_benchmark_is_in_evaluations_alone_and_its_file_in_what_is_held_out(
    toy, monkeypatch, tmp_path
):
    path = tmp_path / "mine.jsonl"
    path.write_text("{}\n")
    monkeypatch.setitem(globals(), "mine", Benchmark(title="Mine", path=str(path), size=1, read=str))
    monkeypatch.setitem(BENCHMARKS.plug_ins, "mine", PlugIn("benchmarks", "mine", f"{__name__}:mine", "a test"))
    monkeypatch.setattr(PlugIn, "digest", "one")
    asked = toy.evaluate.model_dump() | {"benchmarks": [{"name": "mine"}]}
    config = RunConfig.model_validate({**toy.model_dump(), "evaluate": asked, "held_out": None})
    before = keys(config)
    monkeypatch.setattr(PlugIn, "digest", "two")
    after = keys(config)
    moved = [label for label in LABELS if after[label] != before[label]]
    assert moved == [label for label in LABELS if label.startswith("evaluate:") or label == "report"]
    path.write_text("{}\n{}\n")
    assert keys(config)["held_out"] != after["held_out"]


def test_what_is_trained_on_moves_pretraining_and_no_tokens(toy):
    """And is in no section where it is the default: configurations without it keep their keys."""
    steps = {step.label: step for step in build_dag(toy, toy_dag)}
    assert "train_on" not in json.dumps([step.section for step in steps.values()])
    sources = toy.ingest.model_dump()["sources"]
    replies = {**toy.ingest.model_dump(), "sources": [sources[0], {**sources[1], "train_on": "replies"}]}
    assert changed(toy, ingest=replies) == LABELS[LABELS.index("pretrain") :]
    assert changed(toy, distill=toy.distill.model_dump() | {"train_on": "replies"})[0] == "pretrain"
    config = RunConfig.model_validate({**toy.model_dump(), "ingest": replies})
    pretrain = next(step for step in build_dag(config, toy_dag) if step.label == "pretrain")
    assert pretrain.section["train_on"] == {"synth": "replies"}


def test_another_reward_moves_the_key_of_its_stage_with_its_version_and_the_default_is_in_none(toy, monkeypatch):
    monkeypatch.setitem(REWARDS.plug_ins, "brief", PlugIn("rewards", "brief", "math:fsum", "a test"))
    monkeypatch.setattr(PlugIn, "digest", "one")
    sections = json.dumps([step.section for step in build_dag(toy, toy_dag)])
    assert "reward" not in sections
    brief = toy.reason.model_copy(update={"reward": "brief"}).model_dump()
    assert changed(toy, reason=brief) == LABELS[LABELS.index("reason") :]
    config = RunConfig.model_validate({**toy.model_dump(), "reason": brief})
    before = keys(config)
    monkeypatch.setattr(PlugIn, "digest", "two")
    assert [label for label in LABELS if keys(config)[label] != before[label]] == LABELS[LABELS.index("reason") :]
    with pytest.raises(ValidationError, match="no reward 'short'; there are verifiable, reasoning_gym, brief"):
        RunConfig.model_validate({**toy.model_dump(), "reason": brief | {"reward": "short"}})


def from_(label: str) -> list[str]:
    return LABELS[LABELS.index(label) :]


@pytest.mark.parametrize(
    ("section", "update", "moved"),
    [
        ("reason", {"objective": "capped"}, from_("reason")),
        ("distill", {"prompts": 3}, from_("distill")),
        ("index", {"recall": 0.9}, from_("index")),
        ("evaluate", {"max_tokens": 7}, [*(x for x in LABELS if x.startswith("evaluate")), "report"]),
        ("report", {"samples": 3}, ["report"]),
    ],
)
def test_a_change_moves_its_step_and_what_follows(toy, section, update, moved):
    assert changed(toy, **{section: getattr(toy, section).model_dump() | update}) == moved
    assert changed(toy, name="another") == []


def without(config: RunConfig, *names: str) -> RunConfig:
    """The configuration without some sections, and without what only they provide."""
    table = {name: value for name, value in config.model_dump().items() if name not in names}
    if "distill" in names:
        for phase in table["pretrain"]["phases"]:
            phase["mixture"].pop("distilled", None)
    return RunConfig.model_validate(table)


@pytest.mark.parametrize(
    "names",
    [
        *((), ("distill",), ("distill", "index"), ("align",), ("reason",), ("self_distill",), ("align", "reason")),
        ("reason", "self_distill"),
        ("index", "distill", "align", "reason", "self_distill"),
    ],
)
def test_a_configuration_without_a_section_has_no_such_step_and_asks_nobody_for_it(toy, names):
    """What is left keeps its order; each trained stage continues the one before it that is there."""
    steps = {step.label: step for step in build_dag(without(toy, *names), toy_dag)}
    gone = {*names, *(f"evaluate:{name}" for name in names)}
    assert list(steps) == [label for label in LABELS if label not in gone]
    trained = [name for name in ("pretrain", "align", "reason", "self_distill") if name in steps]
    for before, after in pairwise(trained):
        assert steps[after].needs["checkpoint"] == Need(before, "checkpoint")
    asked = {label for label, step in steps.items() if step.section.get("endpoints")}
    assert asked == {"distill", "align"} - set(names)
    assert steps["ingest:wikipedia"].outputs == ("tokens", "signatures")
    assert steps["ingest:synth"].outputs == ("tokens", "exemplars", "signatures")
    assert set(steps["report"].needs.values()) == {
        Need(label, kind) for label, step in steps.items() if label != "report" for kind in step.outputs
    }
    assert all(need.producer in steps for step in steps.values() for need in step.needs.values())


def test_false_removes_the_section_of_a_file_that_is_extended():
    config = load("local", ["align=false", "self_distill = false"])
    assert (config.align, config.self_distill, config.trained) == (None, None, ("pretrain", "reason"))
    assert RunConfig.model_validate(config.model_dump()) == config


def test_an_index_comes_with_the_distillation_that_reads_it(toy):
    assert without(toy, "index").index == IndexConfig()
    assert without(toy, "index", "distill").index is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["distill=false"], r"pretrain\.phases 'synth' mixes 'distilled', and there is no \[distill\]"),
        (["index=false"], r"index is false, but \[distill\] shows its teachers exemplars"),
        (
            ["align=false", "reason.start=align"],
            "reason.start: 'align' is no earlier stage of this run; there is pretrain",
        ),
        (["align=true"], "`align`: "),
        (["pretrain=false"], "`pretrain`: "),
    ],
)
def test_a_section_that_another_one_needs_is_asked_for(settings, message):
    with pytest.raises(ConfigError, match=message):
        load("local", settings)


def with_models(config: RunConfig, *endpoints: str) -> RunConfig:
    update = {**config.evaluate.model_dump(), "models": [{"endpoint": name} for name in endpoints]}
    local = config.endpoints["local"].model_dump()
    known = {"local": local, **dict.fromkeys(endpoints, local)}
    return RunConfig.model_validate({**config.model_dump(), "endpoints": known, "evaluate": update})


def test_models_behind_endpoints_are_evaluated_each_alone(toy):
    both = with_models(toy, "qwen", "granite")
    steps = {step.label: step for step in build_dag(both, toy_dag)}
    assert [label for label in steps if label not in LABELS] == ["evaluate:qwen", "evaluate:granite"]
    assert steps["evaluate:qwen"].needs == {}
    assert steps["evaluate:qwen"].section["model_under_test"] == {"endpoint": "qwen", "column": ""}
    assert list(steps["evaluate:qwen"].section["endpoints"]) == ["qwen"]
    assert steps["report"].needs["evaluate:qwen.evaluation"] == Need("evaluate:qwen", "evaluation")
    # Another model changes the report and no other evaluation, of a checkpoint or of a model.
    before, after = keys(with_models(toy, "qwen")), keys(both)
    assert [label for label in before if before[label] != after[label]] == ["report"]


def test_a_model_without_an_endpoint_or_with_the_name_of_a_stage_is_refused(toy):
    update = {**toy.evaluate.model_dump(), "models": [{"endpoint": "nobody"}]}
    with pytest.raises(ValueError, match=r"evaluate\.models\.0\.endpoint: no endpoint 'nobody'"):
        RunConfig.model_validate({**toy.model_dump(), "evaluate": update})
    with pytest.raises(ConfigError, match="'evaluate:align' exists already"):
        build_dag(with_models(toy, "align"), toy_dag)


def test_a_change_of_one_source_leaves_the_other(toy):
    first, second = toy.ingest.sources
    ingest = {**alone(toy), "sources": [first.model_copy(update={"records": 5}).model_dump(), second.model_dump()]}
    moved = changed(RunConfig.model_validate({**toy.model_dump(), "ingest": alone(toy)}), ingest=ingest)
    assert moved[0] == "ingest:wikipedia"
    assert not {"ingest:synth", "index", "distill"} & set(moved)
    assert moved[1:] == LABELS[LABELS.index("pretrain") :]


def test_sources_outside_every_mixture_are_not_read_by_pretraining(toy):
    phases = [{"name": "one", "tokens": 10, "mixture": {"synth": 1.0}}]
    pretrain = toy.pretrain.model_dump() | {"phases": phases}
    config = RunConfig.model_validate({**toy.model_dump(), "pretrain": pretrain})
    needs = next(step.needs for step in build_dag(config, toy_dag) if step.label == "pretrain")
    assert set(needs) == {"synth"}


@pytest.mark.parametrize(("kept", "message"), [((0, 0), "none does"), ((4, 4), "wikipedia, synth do")])
def test_exactly_one_source_keeps_exemplars(toy, kept, message):
    sources = [
        source.model_copy(update={"exemplars": count}).model_dump()
        for source, count in zip(toy.ingest.sources, kept, strict=True)
    ]
    config = RunConfig.model_validate({**toy.model_dump(), "ingest": {"row_length": 64, "sources": sources}})
    with pytest.raises(ConfigError, match=message):
        build_dag(config, toy_dag)


@pytest.fixture(scope="module")
def local() -> RunConfig:
    return load("local")


def sections(config: RunConfig) -> dict[str, dict]:
    return {step.label: step.section for step in build_dag(config)}


@pytest.mark.parametrize("name", ["local", "spark", "smollm2", "nautile_370m"])
def test_the_keys_of_the_shipped_configurations_are_what_they_were(name):
    """Another key would repeat the work, and pay for it."""
    known = json.loads(Path(__file__).with_name("shipped_keys.json").read_text(encoding="utf-8"))
    assert {step.label: step.key for step in build_dag(load(name))} == known[name]


# Files of sweeps, which name a configuration, have tests of their own.
FILES = [path for path in sorted((ROOT / "bench").rglob("*.toml")) if "config" not in tomllib.loads(path.read_text())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_configurations_of_the_benchmarks_still_build_a_dag(path):
    # A benchmark is seldom run: a field that was removed, or a rule that came since, would be noticed months later.
    assert "pretrain" in [step.label for step in build_dag(load(str(path)))]


@pytest.mark.parametrize(
    ("section", "update"),
    [
        ("distill", {"budget_dollars": 7.0, "budget_tokens": 9, "max_rejected_share": 0.3, "chunk": 7}),
        ("pretrain", {"save_every": 7, "keep": 1, "log_every": 3, "validate_every": 3, "validation_rows": 1}),
        ("pretrain", {"micro_rows": 1, "fsdp": 2, "sample_every": 3}),
        ("model", {"remat": "layer", "mixing": "reference", "chunk": 16}),
        ("evaluate", {"batch": 1, "budget_dollars": 2.0}),
        ("operation", {"distill": {"approve": True, "at_budget": "pause", "hours": 1.0}}),
        ("schedule", {"cron": "0 3 * * *", "checkpoint": "checkpoint/abc"}),
    ],
)
def test_an_operational_change_moves_no_key(section, update):
    """Money and weeks hang on it: another key repeats the work, and pays for it."""
    config = load("nautile_370m")
    changed = config.model_dump()
    changed[section] = {**(changed[section] or {}), **update}
    assert {s.label: s.key for s in build_dag(RunConfig.model_validate(changed))} == {
        s.label: s.key for s in build_dag(config)
    }


def test_an_endpoint_may_move_and_cost_otherwise_without_moving_a_key():
    config = load("nautile_370m")
    changed = config.model_dump()
    for endpoint in changed["endpoints"].values():
        endpoint |= {
            "url": "http://127.0.0.1:9/v1", "concurrency": 99, "timeout_s": 7.0, "attempts": 2,
            "requests_per_minute": 3, "dollars_per_million_in": 9.0, "dollars_per_million_out": 9.0,
            "budget_dollars": 1.0, "key_variable": "OTHER", "batch": {"poll_s": 1.0},
        }  # fmt: skip
    assert {s.label: s.key for s in build_dag(RunConfig.model_validate(changed))} == {
        s.label: s.key for s in build_dag(config)
    }


def test_a_stage_is_known_by_its_name_and_found_by_its_child_process(local):
    for step in build_dag(local):
        assert step.label.partition(":")[0] == step.stage.name
        assert STAGES.reference(step.stage.name) == f"{step.stage.work.__module__}:{step.stage.work.__name__}"


def test_there_is_an_operation_for_every_stage_and_for_no_other(local):
    supervise = {"problems": {"source": "gsm8k", "license": "MIT"}, "optimizer": {}}
    optional = local.model_dump() | {"tokenizer": OWN_TOKENIZER, "supervise": supervise}
    assert set(STAGES) == {step.stage.name for step in build_dag(RunConfig.model_validate(optional))}
    assert set(STAGES) - {"tokenizer", "supervise"} == {step.stage.name for step in build_dag(local)}


def test_a_fallback_is_in_the_section_of_the_stage_that_may_use_it():
    config = load("nautile_370m")
    spare = EndpointConfig(kind="openai", model="m", url="http://127.0.0.1/v1")
    first = config.endpoints["gpt_oss_20b"].model_copy(update={"fallback": ("spare",)})
    changed = config.model_copy(update={"endpoints": {**config.endpoints, "gpt_oss_20b": first, "spare": spare}})
    assert "spare" in sections(changed)["distill"]["endpoints"]
    assert "spare" not in sections(changed)["align"]["endpoints"]


def test_another_dag_is_named_by_the_environment(toy, monkeypatch):
    monkeypatch.setenv("NAUTILE_DAG", "tests.support.stages.toy_dag:toy_dag")
    assert {step.stage.work.__module__ for step in build_dag(toy)} == {
        "tests.support.stages.toy_stages",
        "nautile.tasks.report",
    }


@pytest.mark.slow
def test_the_dag_loads_nothing_heavy():
    """Every command that reads a configuration builds its DAG; none should wait for JAX. A stage's process, of which a
    fan-out has thousands, loads what its own stage needs."""
    program = (
        "import sys; import nautile.tasks.engine.child_main; assert 'numpy' not in sys.modules\n"
        "from nautile.configs.load import load; from nautile.flows.dag import build_dag\n"
        "assert build_dag(load('local'))\n"
        "heavy = {'jax', 'scipy', 'orbax', 'faiss', 'prefect', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["no_such_plugin:dag", "tests.support.stages.toy_dag:no_such", "::"])
def test_a_dag_that_is_not_installed_is_named(toy, monkeypatch, name):
    monkeypatch.setenv("NAUTILE_DAG", name)
    with pytest.raises(ConfigError, match=f"^NAUTILE_DAG: {name!r} cannot be imported on host"):
        build_dag(toy)


def test_a_stage_that_no_registry_has_is_named(toy):
    unknown = replace(pipeline_steps(toy)[0].stage, name="unknown")
    with pytest.raises(
        ConfigError, match=r"^own: no stage 'unknown' is known here: install its package, or name it in"
    ):
        build_dag(toy, lambda config: [Step("own", unknown, {}, {})])
