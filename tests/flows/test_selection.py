"""`--from`, `--until`, `--only`: what they pick, what they need, and what is said when it is not there."""

import shutil

import pytest

from nautile.common.errors import ConfigError
from nautile.common.processes import free_port
from nautile.configs.operation import LaunchConfig
from nautile.configs.training import ProblemsConfig
from nautile.flows import pipeline
from nautile.flows.dag import Need, build_dag
from nautile.flows.selection import (
    PreparedRun,
    Selection,
    check_ray_hosts,
    choose,
    outdated_lines,
    outside_inputs,
    prepare_run,
)
from nautile.store.artifacts import Store
from tests.support.stages.toy_dag import toy_dag


@pytest.fixture(scope="module")
def dag(toy):
    return build_dag(toy, toy_dag)


@pytest.mark.parametrize(
    ("options", "picked"),
    [
        ({"only": "reason"}, ["reason"]),
        ({"only": "evaluate:align"}, ["evaluate:align"]),
        ({"only": "ingest"}, ["ingest:wikipedia", "ingest:synth"]),
        ({"first": "self_distill"}, ["self_distill", "evaluate:self_distill", "report"]),
        ({"last": "distill"}, ["held_out", "ingest:wikipedia", "ingest:synth", "index", "distill"]),
        ({"first": "align", "last": "evaluate:align"}, ["align", "evaluate:align"]),
        ({"first": "distill", "last": "pretrain"}, ["distill", "pretrain"]),
    ],
)
def test_what_is_picked(dag, options, picked):
    chosen = choose(dag, Selection(**options))
    assert [e.label for e in dag if e.label in chosen] == picked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "dream"}, "--only: no stage 'dream'; there are held_out, ingest, index, distill, pretrain"),
        ({"first": "evaluate:dream"}, "--from: no stage 'evaluate:dream'"),
        ({"only": "reason", "first": "align"}, "--only cannot be combined"),
        ({"ask_again": True}, "--ask-again needs --force"),
        ({"first": "reason", "last": "align"}, "--from reason comes after --until align"),
    ],
)
def test_what_is_refused(dag, options, message):
    with pytest.raises(ConfigError, match=message):
        choose(dag, Selection(**options))


def test_a_missing_input_names_the_command_that_makes_it(dag, tmp_path):
    message = (
        r"reason needs the checkpoint of align \(checkpoint/\w{12}\).*make it with `nautile run my.toml --until align`"
    )
    with pytest.raises(ConfigError, match=message):
        outside_inputs(Store(tmp_path), dag, {"reason"}, "my.toml")


def test_what_is_needed_of_the_rest(dag, made):
    store, _ = made
    needs = {Need("align", "checkpoint"), Need("held_out", "questions")}
    assert outside_inputs(store, dag, {"reason", "evaluate:reason"}, "toy") == needs
    assert outside_inputs(store, dag, {step.label for step in dag}, "toy") == set()


@pytest.mark.parametrize(
    ("selection", "options"),
    [
        (Selection(), ""),
        (Selection(first="align", last="reason"), " --from align --until reason"),
        (Selection(force=True), " --from reason --force"),
        (Selection(only="reason", force=True), " --only reason --force"),
        (Selection(only="align", force=True, ask_again=True), " --only align --force --ask-again"),
    ],
)
def test_how_to_go_on_after_a_stop_and_the_parameters_of_a_run(selection, options, monkeypatch):
    assert selection.options("reason") == options
    monkeypatch.setattr(pipeline, "run_selected", lambda argument, overrides, selected: selected)
    parameters = pipeline.pipeline.validate_parameters({"config": "toy", **selection.parameters()})
    assert pipeline.pipeline.fn(**parameters) == selection


def test_an_unknown_objective_and_prompts_in_the_wrong_stage_are_refused_before_anything_runs(toy, store, tmp_path):
    unknown = toy.model_copy(update={"reason": toy.reason.model_copy(update={"objective": "most"})})
    with pytest.raises(ConfigError, match=r"^reason\.objective: unknown objective 'most'; the known ones are balanced"):
        prepare_run(unknown, Selection(), store)
    prompts = ProblemsConfig.model_validate({"source": "prompts", "prompt_set": {"name": "a", "source": "wikipedia"}})
    for stage in ("reason", "self_distill"):
        wrong = toy.model_copy(update={stage: getattr(toy, stage).model_copy(update={"problems": prompts})})
        with pytest.raises(ConfigError, match=rf"^{stage}\.problems\.source: its prompts have no answers"):
            prepare_run(wrong, Selection(), store)
    (tmp_path / "mine.jsonl").write_text("{}\n", encoding="utf-8")
    file = ProblemsConfig(source="jsonl", path=str(tmp_path / "mine.jsonl"))
    answered = toy.model_copy(update={"align": toy.align.model_copy(update={"answered": file})})
    with pytest.raises(ConfigError, match=r"^align\.answered\.path: .*mine\.jsonl:1: no `question`"):
        prepare_run(answered, Selection(), store)


def test_a_ray_cluster_is_asked_for_the_hosts_of_what_is_to_run(toy, store):
    launch = LaunchConfig(engine="ray", processes=2, ray_address=f"127.0.0.1:{free_port()}")
    run = PreparedRun("toy", Selection(), [step for step in build_dag(toy) if step.label == "pretrain"], set())
    with pytest.raises(ConfigError, match=r"launch.engine 'ray': no cluster answers at .* set launch.ray_address"):
        check_ray_hosts(store, launch, run)
    check_ray_hosts(store, launch.model_copy(update={"processes": 1}), run)
    check_ray_hosts(store, launch.model_copy(update={"stages": ("reason",)}), run)


@pytest.mark.parametrize("text", ["other weights", None])
def test_steps_that_describe_weights_which_were_made_again_are_named(dag, made, tmp_path, text):
    """As after `--only pretrain --force`; the same bytes again change nothing."""
    store = Store(shutil.copytree(made[0].root, tmp_path / "store"))
    run = PreparedRun("toy.toml", Selection(first="pretrain"), list(dag), set())
    assert outdated_lines(store, run) == []
    before = store.get(made[1]["pretrain"]["checkpoint"])
    folder = shutil.copytree(before.path, store.staging(before.key) / "again")
    if text:
        (folder / "weights.txt").write_text(text, encoding="utf-8")
    store.publish(
        "checkpoint", before.key, folder, stage="pretrain", version=1, config={}, inputs={}, facts={},
        execution="again", outputs=("checkpoint",), run="r2", label="pretrain", supersede=True,
    )  # fmt: skip
    lines = outdated_lines(store, run)
    assert {line.partition(" ")[0] for line in lines} == ({"align", "evaluate:pretrain", "report"} if text else set())
    assert all("pretrain was made again since" in line for line in lines)
    assert all(f"`nautile run toy.toml --from {line.partition(' ')[0]} --force`" in line for line in lines)
    forced = PreparedRun("toy.toml", Selection(first="pretrain", force=True), list(dag), set())
    assert outdated_lines(store, forced) == []
