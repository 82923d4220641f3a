"""The pretrain stage: tokens in by source name, a checkpoint out, text samples, and refusals by name."""

import json

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.data.chat_template import encode_turns
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.loader import Loader
from nautile.data.tokens.shards import FirstFitPacker, ShardIndex, write_index, write_shard
from nautile.model.training.loop import openings
from nautile.model.weights.files import load_weights
from nautile.store.artifacts import Store
from nautile.tasks.engine.job import Job
from nautile.tasks.pretrain import pretrain, rows_before, snapshot
from tests.support.processes.training import MODEL, ROW, STEPS, TOKENIZER, settings, sources, write_tokens


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("shards"))


def job(staging, inputs, events=None, **changes):
    section = {
        "pretrain": settings(**changes).model_dump(mode="json"),
        "model": MODEL.model_dump(mode="json"),
    }
    seen = [] if events is None else events
    return Job(
        "pretrain", "key", "execution", section, inputs, staging, lambda kind, **fields: seen.append((kind, fields))
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A published pretraining: its checkpoint, its tokens by source, and its events."""
    store, events = Store(tmp_path_factory.mktemp("store")), []
    store.prepare()
    made = {"stage": "toy", "version": 1, "config": {}}
    tokens = {
        name: store.publish("tokens", key * 64, folder, inputs={}, facts={}, **made)
        for key, (name, folder) in zip("ab", sources(store.staging("e" * 64)).items(), strict=True)
    }
    folders = {name: artifact.folder for name, artifact in tokens.items()}
    run = job(store.staging("c" * 64), folders, events, sample_every=STEPS)
    pretrain.work(run)
    facts = json.loads((run.staging / "facts" / "checkpoint.json").read_text())
    checkpoint = store.publish("checkpoint", "c" * 64, run.output("checkpoint"), inputs=tokens, facts=facts, **made)
    return checkpoint, folders, events


@pytest.mark.slow
def test_a_checkpoint_with_its_facts_and_samples(first):
    checkpoint, _, events = first
    _, model, tokenizer = load_weights(checkpoint.folder)
    assert (model, tokenizer) == (MODEL, TOKENIZER)
    facts = checkpoint.manifest["facts"]
    assert facts["steps"] == STEPS
    assert facts["stand_ins"] == []
    assert set(facts["validation"]["web"]) == {"loss", "bits_per_byte"}
    samples = [fields for kind, fields in events if kind == "sample"]
    assert {fields["source"] for fields in samples} == {"web", "synth"}
    assert [fields["index"] for fields in samples] == list(range(len(samples)))
    for fields in samples:
        assert fields["set"] == f"pretrain-{STEPS}"
        assert fields["text"]
        assert fields["reference"]


@pytest.mark.slow
def test_a_branch_begins_with_the_weights_and_after_the_rows_of_another(first, shards, tmp_path):
    """The schedule and the optimizer begin anew. Rows are passed over only where the tokens are the very same."""
    checkpoint, folders, before = first
    events = []
    branch = job(tmp_path / "s" / "a", {"start.checkpoint": checkpoint.folder, **folders}, events, sample_every=STEPS)
    pretrain.work(branch)
    loss, rate, usual = (
        {fields["step"]: fields["value"] for kind, fields in seen if kind == "metric" and fields["name"] == name}
        for name, seen in (("loss", events), ("learning_rate", events), ("loss", before))
    )
    assert loss[3] == pytest.approx(checkpoint.manifest["facts"]["train_loss"], abs=0.3)
    assert loss[3] < usual[3] - 0.5
    assert rate[3] == pytest.approx(0.01)
    facts = json.loads((branch.staging / "facts" / "checkpoint.json").read_text())
    assert checkpoint.manifest["facts"]["rows_drawn"] == {"web": 72, "synth": 24}
    assert facts["rows_drawn"] == {"web": 144, "synth": 48}
    assert facts["tokens_by_source"] == checkpoint.manifest["facts"]["tokens_by_source"]
    assert rows_before(checkpoint.folder, {"web": shards["web"], "synth": folders["synth"]}) == {"synth": 24}


@pytest.mark.slow
def test_a_snapshot_of_a_saved_step_has_its_weights_and_rows(first, tmp_path):
    checkpoint, folders, _ = first

    def snapshot_of(step):
        section, staging = {"of": "c" * 64, "step": step}, checkpoint.store.staging("d" * 64)
        work = Job("snapshot", "key", "e", section, folders, staging, [].append)
        snapshot.work(work)
        return work, json.loads((work.staging / "facts" / "checkpoint.json").read_text())

    work, facts = snapshot_of(20)
    assert facts["rows_drawn"] == {"web": 64, "synth": 16}
    weights = work.output("checkpoint") / "weights.safetensors"
    assert weights.read_bytes() != (checkpoint.folder / weights.name).read_bytes()
    assert snapshot_of(STEPS)[1]["steps"] == STEPS
    assert weights.read_bytes() == (checkpoint.folder / weights.name).read_bytes()
    with pytest.raises(ConfigError, match=r"the checkpoint of step 7 is damaged"):
        snapshot_of(7)


@pytest.mark.slow
def test_a_branch_from_another_shape_is_refused_by_the_field(first, tmp_path):
    checkpoint, folders, _ = first
    branch = job(tmp_path / "s" / "a", {"start.checkpoint": checkpoint.folder, **folders})
    branch.section["model"] |= {"width": 32, "context": 64}
    with pytest.raises(ConfigError, match=r"pretrain\.start: checkpoint has model\.width 16, and this run 32: set it"):
        pretrain.work(branch)


def test_an_opening_is_a_whole_prompt_of_a_chat(tmp_path):
    """A chat document is cut where the assistant begins to think; longer prompts than the limit are passed over."""
    tokenizer, packer = tokenizer_for(TOKENIZER), FirstFitPacker(96)
    turns = [(f"{n}?", "so", str(n)) for n in range(6)]
    turns.insert(1, ("long " * 12, "so", "1"))
    arrays, lengths, prompts = encode_turns(tokenizer, turns)
    for ids, prompt in zip(np.split(np.concatenate(arrays), np.cumsum(lengths)[:-1]), prompts, strict=True):
        packer.add(ids, prompt)
    entries = tuple(write_shard(tmp_path, 0, split, packer.finish(), 261) for split in ("train", "validation"))
    write_index(tmp_path, ShardIndex(TOKENIZER, tokenizer.fingerprint, 96, "synth", entries))
    loader = Loader({"chat": tmp_path}, (), 4, 0, TOKENIZER)
    result = openings(loader, "chat", tokenizer, limit=40)
    assert 0 < len(result) <= 4
    for opening in result:
        assert tokenizer.decode(opening.prompt).endswith("?\n<|im_end|><|im_start|>assistant\n<|think_start|>")
        assert tokenizer.decode(opening.reference).startswith("so<|think_end|>")


def test_what_is_refused(tmp_path, shards):
    with pytest.raises(ConfigError, match="no input tokens"):
        pretrain.work(job(tmp_path / "s" / "a", {}))
    with pytest.raises(ConfigError, match=r"phases 'two': its mixture names \['synth'\], and the inputs are \['web'\]"):
        pretrain.work(job(tmp_path / "s" / "b", {"web": shards["web"]}))
    other = write_tokens(tmp_path / "other", 0, ranks=300)
    with pytest.raises(ConfigError, match=r"'web'\) was written with another tokenizer \(ranks 300, and"):
        pretrain.work(job(tmp_path / "s" / "c", {"synth": shards["synth"], "web": other}))
    longer = write_tokens(tmp_path / "longer", 0, row=2 * ROW)
    with pytest.raises(ConfigError, match="has rows of"):
        pretrain.work(job(tmp_path / "s" / "d", {"synth": shards["synth"], "web": longer}))
