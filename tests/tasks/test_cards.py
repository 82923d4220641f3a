"""The cards of models and documents over a toy chain: facts of the records alone, text as text, the Hub's schema."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from nautile.common.files import write_text
from nautile.configs.load import load
from nautile.data.label_set import LabelSet, write_label_set
from nautile.store.artifacts import Store
from nautile.tasks.reporting.cards import Publication, Snippet, dataset_card, model_card, model_facts
from tests.support.servers.upload_hub import card_errors
from tests.support.stages.toy_stages import TOY

HOSTILE = (
    "<img src=x onerror=alert(1)> [x](http://evil.example) ![y](http://evil.example) `code` <!-- \x1b[31m\n# head\n"
)
PUBLICATION = Publication("me/small", "nautile", [Snippet("So:", "bash", "nautile chat small")], license="apache-2.0")


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the toy chain's store that can be changed, and its artifact ids."""
    original, outputs = made
    return Store(shutil.copytree(original.root, tmp_path / "store")), outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config, folder = load(TOY), tmp_path_factory.mktemp("weights")
    parts = {"model": config.model.model_dump(mode="json"), "tokenizer": config.tokenizer.fields}
    write_text(folder / "config.json", json.dumps(parts))
    return folder


@pytest.fixture(scope="module")
def facts(made, folder):
    store, outputs = made
    return model_facts(store, store.get(outputs["self_distill"]["checkpoint"]), folder)


def words(page: str) -> str:
    """The page without the escapes of Markdown, on one line."""
    return " ".join(page.replace("\\", "").split())


def test_the_facts_come_from_the_lineage_of_the_checkpoint(facts, made):
    _, outputs = made
    assert facts["artifact"]["id"] == outputs["self_distill"]["checkpoint"]
    assert [row["label"] for row in facts["stages"]] == ["pretrain", "align", "reason", "self_distill"]
    assert [(row["name"], row["tokens"]) for row in facts["phases"]] == [("one", 1000), ("two", 1000)]
    assert {row["name"] for row in facts["sources"]} == {"wikipedia", "synth", None}
    assert (facts["documents"]["documents"], facts["teachers"][0]["asked"]) == (1, 4)
    assert {row["label"] for row in facts["problems"]} == {"align", "reason", "self_distill"}
    assert set(facts["scores"]) == {"pretrain", "align", "reason", "self_distill"}
    assert facts["cost"]["dollars"] == pytest.approx(0.03)
    assert facts["missing"] == []


def test_the_card_shows_results_with_intervals_cost_stand_ins_and_commit(facts):
    page = model_card(facts, replace(PUBLICATION, dataset="me/texts"))
    assert card_errors(page, "model") == []
    assert "license: apache-2.0\n" in page
    assert "- me/texts\n" in page
    assert re.search(r"value: 35\.0\n.*\n *args:\n *interval_95:\n *- 20\.0\n *- 50\.0\n *questions: 20\n", page)
    text = words(page)
    assert "35.00 [20.00, 50.00]" in text
    assert "Table 2. Benchmarks" in text
    assert "3 requests to endpoints: 30 tokens in, 60 tokens out, 0.0300 dollars" in text
    assert "wikipedia stands in for the web (ingest:wikipedia)" in text
    assert "50% distilled, 50% synth" in text
    assert "Weights: apache-2.0, as their publisher states." in text
    for commit in facts["commits"]:
        assert commit[:12] in text
    assert facts["lineage"][0]["id"] in text


def test_what_was_read_of_each_source_is_shown_and_what_is_not_known_is_said(facts):
    read = [
        {"label": "pretrain", "source": "synth", "tokens": 1000, "reading": {"train_on": "replies", "fill": 0.89}},
    ]
    page = words(model_card({**facts, "read": read}, PUBLICATION))
    assert "| synth | 1,000 | replies | 89% | not known | not known | not known |" in page


def test_a_score_that_training_text_was_not_screened_for_is_labelled_in_the_card_and_its_front_matter(facts):
    note = "training text was not screened for it"
    own = facts["scores"]["self_distill"]
    other = {**own["benchmarks"]["held_out"], "title": "Words", "not_screened": note}
    scores = {**facts["scores"], "self_distill": {**own, "benchmarks": {**own["benchmarks"], "gsm_symbolic": other}}}
    page = model_card({**facts, "scores": scores}, PUBLICATION)
    assert "name: Words (stand-in, not screened for)" in page
    assert note in words(page)
    assert note not in words(model_card(facts, PUBLICATION))


def test_what_is_not_recorded_is_said_and_not_filled_in(facts):
    page = words(model_card(facts, replace(PUBLICATION, license=None)))
    assert "license: unknown" in page
    assert "their licence is not recorded" in page
    assert "| wikipedia | wikipedia | not recorded | not recorded | 1,000 | 2 |" in page
    assert "The languages of its training text are not recorded." in page
    assert "None" not in page


def test_a_checkpoint_without_an_evaluation_claims_no_result(copied, folder):
    store, outputs = copied
    for evaluation in store.list("evaluation"):
        if evaluation.manifest["label"] == "evaluate:self_distill":
            store.discard(evaluation.folder)
    page = model_card(model_facts(store, store.get(outputs["self_distill"]["checkpoint"]), folder), PUBLICATION)
    assert "**This checkpoint has no evaluation in the store: no result is claimed for it.**" in page
    assert "model-index" not in page
    assert "Table 2" not in page
    assert "35.00 [20.00, 50.00]" in page, "the stages before it were evaluated"


def test_a_folder_that_is_no_artifact_has_a_card_that_says_so(made, folder):
    page = model_card(model_facts(made[0], None, folder), replace(PUBLICATION, license=None))
    assert card_errors(page, "model") == []
    text = words(page)
    assert "The checkpoint is not in a store: how it was made is not known." in text
    assert "Which parts were stand-ins is not recorded." in text
    assert "The cost is not recorded." in text
    assert "No stage of this run names a stand-in" not in text


def test_an_input_that_the_store_no_longer_has_is_named(copied, folder):
    store, outputs = copied
    gone = store.get(outputs["align"]["checkpoint"])
    store.discard(gone.folder)
    facts = model_facts(store, store.get(outputs["self_distill"]["checkpoint"]), folder)
    assert facts["missing"][0].startswith(f"{gone.id}, the input `checkpoint` of reason, is no longer in the store")
    page = words(model_card(facts, PUBLICATION))
    assert f"{gone.id}, the input `checkpoint` of reason, is no longer in the store" in page
    assert "The corpora are not recorded." in page


def with_hostile_text(value, name=""):
    """`value` with hostile text in every string that is not a name that code depends on."""
    if isinstance(value, dict):
        return {key: with_hostile_text(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [with_hostile_text(item, name) for item in value]
    if not isinstance(value, str) or name in ("benchmark", "over", "stage", "label"):
        return value
    return f"{value} {HOSTILE}"


def active_parts(page: str) -> set[str]:
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(page.partition("\n---\n")[2])
    inline = [child for token in tokens for child in token.children or ()]
    return {token.type for token in (*tokens, *inline)} & {"html_block", "html_inline", "link_open", "image"}


def test_no_text_of_a_record_is_markup_in_a_card(facts, made):
    page = model_card(with_hostile_text(facts), PUBLICATION)
    assert page.count("onerror=alert") > 40
    assert active_parts(page) == set()
    assert "\x1b" not in page
    assert card_errors(page, "model") == []
    store, outputs = made
    documents = store.get(outputs["distill"]["documents"])
    hostile = replace(
        documents, manifest=documents.manifest | {"facts": with_hostile_text(documents.manifest["facts"])}
    )
    page = dataset_card(store, hostile, "me/texts", [], None)
    assert "onerror=alert" in page
    assert active_parts(page) == set()
    assert "\x1b" not in page


def test_the_card_of_documents_has_prompts_teachers_and_rejects(made):
    store, outputs = made
    page = dataset_card(store, store.get(outputs["distill"]["documents"]), "me/texts", [], "cc-by-sa-4.0")
    assert card_errors(page, "dataset") == []
    text = words(page)
    assert "1 documents that teachers wrote in answer to 4 prompts" in text
    assert "| wikipedia | wikipedia | CC BY-SA 4.0 | not recorded | not recorded | not recorded |" in text
    assert "| local | toy | not recorded | 4 | 1 | yes |" in text
    assert "| too short | 2 | 50.0% |" in text
    assert "No benchmark was held out" in text
    assert "path: data/train-*.parquet" in page
    assert "because" in page


def test_a_cost_that_the_ledger_does_not_have_is_not_zero(copied, folder):
    store, outputs = copied
    for path in (*(store.root / "events").iterdir(), *store.root.glob("catalog.duckdb*")):
        path.unlink()
    page = words(model_card(model_facts(store, store.get(outputs["self_distill"]["checkpoint"]), folder), PUBLICATION))
    assert "Stages asked endpoints, but no request is in the catalog: what they cost is not known." in page
    assert "The cost is not recorded." in page


@pytest.mark.parametrize(
    ("labels", "task", "sentence"),
    [
        (None, "text-generation", "reasons before it answers"),
        (LabelSet(form="chat", method="full"), "text-generation", "reasons before it answers"),
        (LabelSet(form="label", method="head", labels=("good", "<b>`x`")), "text-classification", "are not calibrated"),
        (LabelSet(form="label", method="head", labels=("a", "b"), temperature=2), "text-classification",
         "that they are calibrated is not shown"),
        (LabelSet(form="entities", method="lora", labels=("place",)), "text-generation", "extracting entities"),
    ],
)  # fmt: skip
def test_the_card_of_a_tuned_checkpoint_names_its_task(copied, folder, tmp_path, labels, task, sentence):
    store, _ = copied
    tuned = Path(shutil.copytree(folder, tmp_path / "tuned"))
    if labels is not None:
        write_label_set(tuned, labels)
    page = model_card(model_facts(store, None, tuned), PUBLICATION)
    assert f"pipeline_tag: {task}\n" in page
    assert sentence in page
