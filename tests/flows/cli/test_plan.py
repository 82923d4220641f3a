"""What pretraining will read of its sources: from the tokens in a store; without them only what is certain."""

import pytest

from nautile.common.events import silent
from nautile.configs.load import load
from nautile.data.records import SynthRecord
from nautile.data.tokens.build import CorpusPlan, write_tokens
from nautile.flows.dag import dag_in
from nautile.flows.forecast import forecast_reading, pack_anew, reading_markdown
from tests.support.stages.toy_stages import TOY

REPLIES = ["ingest.sources.1.train_on='replies'", "distill.train_on='replies'"]


def publish(store, config, label, folder, facts):
    key = next(step.key for step in dag_in(store, config) if step.label == label)
    store.publish("tokens", key, folder, stage="toy", version=1, config={}, inputs={}, facts=facts)


def tokenised(store, config, records):
    """The artifact of records, published as the tokens of `ingest:synth`."""
    plan = CorpusPlan(config.tokenizer, "synth", config.ingest.row_length, 4096, validation_share=0.0)
    folder = store.staging("a" * 64)
    corpus = write_tokens(lambda skip: iter(records[skip:]), plan, folder / "work", folder / "out", silent)
    publish(store, config, "ingest:synth", folder / "out", corpus.facts())
    return corpus


@pytest.fixture
def records():
    return [
        SynthRecord(query=f"What is {n} plus {n}?", synthetic_reasoning=f"{n} twice", synthetic_answer=str(2 * n))
        for n in range(60)
    ]


def test_a_source_in_the_store_is_shown_with_its_figures(store, records):
    config = load(TOY, REPLIES)
    corpus = tokenised(store, config, records)
    reading = forecast_reading(config, store)
    synth, index = reading["synth"], corpus.index
    assert (synth.train_on, synth.fill) == ("replies", pytest.approx(index.fill(), abs=1e-4))
    assert synth.trained_share == pytest.approx(index.trained_share("replies"), abs=1e-4)
    # 1,000 positions of rows of 64, in batches of two: 8 steps, half of whose rows are of this source.
    assert synth.epochs == pytest.approx(8 / index.rows("train"))
    assert forecast_reading(load(TOY), store)["synth"].trained_share == 1.0, "the same tokens, trained on as a whole"
    page = reading_markdown(reading, [])
    assert "| wikipedia | all | not known | not known | 100% | not known |" in page
    assert f"| synth | replies | {synth.fill:.0%} |" in page


def test_other_row_lengths_are_packed_from_the_lengths_in_the_store(store, records):
    config = load(TOY)
    assert pack_anew(config, store, [32]) == []
    corpus = tokenised(store, config, records)
    assert corpus.index.total("cropped_documents") == 0
    short, same, longer = pack_anew(config, store, [32, 64, 128])
    assert (same.source, same.row_length, same.cropped_share) == ("synth", 64, 0.0)
    assert same.fill == pytest.approx(corpus.index.fill(), abs=0.02), "in the order of the rows, not of the documents"
    assert short.cropped_share > 0.9
    assert longer.cropped_share == 0
    assert f"| synth | 128 | {longer.fill:.0%} | 0% |" in reading_markdown(forecast_reading(config, store), [longer])


def test_rows_longer_than_what_documents_were_cropped_to_are_left_out(store, records):
    config = load(TOY)
    tokenised(store, config, [*records, SynthRecord(query="q", synthetic_reasoning="so " * 99, synthetic_answer="a")])
    assert [row.row_length for row in pack_anew(config, store, [32, 64, 128])] == [32, 64]


def test_of_the_published_run_at_least_the_bound_is_known_and_with_its_documents_five_passes(store):
    config = load("nautile_370m")
    reading = forecast_reading(config, store)
    assert {name: source.train_on for name, source in reading.items()} == dict.fromkeys(reading, "all")
    distilled = reading["distilled"]
    assert (distilled.fill, distilled.epochs, reading["synth"].least_epochs) == (None, None, None)
    assert distilled.least_epochs == pytest.approx(0.02 * 250e9 / 1024 / 1_730_000, rel=1e-3)
    folder = store.staging("b" * 64)
    (folder / "shard").write_bytes(b"1")
    publish(store, config, "distill", folder, {"rows": 1_730_000 * 580 // 1024, "fill": 0.98, "cropped_share": 0.0})
    assert forecast_reading(config, store)["distilled"].epochs == pytest.approx(5, abs=0.1)


def test_tokens_of_an_earlier_version_are_not_known(store):
    config = load(TOY, REPLIES)
    folder = store.staging("b" * 64)
    (folder / "shard").write_bytes(b"1")
    publish(store, config, "ingest:synth", folder, {"rows": 4})
    synth = forecast_reading(config, store)["synth"]
    assert (synth.fill, synth.cropped_share, synth.trained_share, synth.epochs) == (None, None, None, 2.0)
