"""batch(step): pure, complete, exact in its mixture, equal over hosts; and what is refused."""

import errno
import hashlib
import os
import resource
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.configs.training import PhaseConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens import loader as loader_module
from nautile.data.tokens.loader import Loader, Mixture, OpenFiles, RowReader
from nautile.data.tokens.shards import OFFSETS, FirstFitPacker, ShardIndex, read_index, write_index, write_shard
from tests.support.samples.shards import Shard

ROW = 64


@pytest.fixture(scope="module")
def sources(web_tokens, synth_tokens):
    return {"web": web_tokens, "synth": synth_tokens}


def phases(*parts):
    return [PhaseConfig(name=f"phase{n}", tokens=tokens, mixture=mixture) for n, (tokens, mixture) in enumerate(parts)]


def loader(sources, *parts, batch_rows=4, seed=0, ranks=300, **hosts):
    return Loader(sources, phases(*parts), batch_rows, seed, TokenizerConfig(ranks=ranks), **hosts)


def content(batch, row):
    return tuple(batch["tokens"][row][batch["segments"][row] > 0].tolist())


def rows_on_disk(folder, split="train"):
    index = read_index(folder)
    shards = [Shard(folder / entry.file, entry, index) for entry in index.shards if entry.split == split]
    return [tuple(shard.row(n)[0].tolist()) for shard in shards for n in range(shard.entry.rows)]


def test_a_run_that_begins_after_the_rows_of_another_goes_on_in_their_order(sources):
    """The second phase by itself, after the rows that the first drew, is the second phase."""
    parts = (4000, {"web": 1}), (8000, {"web": 1, "synth": 1})
    whole, first = loader(sources, *parts), loader(sources, parts[0])
    later = loader(sources, parts[1], before={**first.rows_drawn, "gone": 3})
    assert later.steps == whole.steps - first.steps
    for step in range(later.steps):
        for name, array in later.batch(step).items():
            np.testing.assert_array_equal(array, whole.batch(first.steps + step)[name])
    assert later.rows_drawn == {name: whole.rows_drawn[name] - first.rows_drawn[name] for name in sources}


def test_the_arrays_have_their_documented_meaning(sources, tokenizer):
    mixed = loader(sources, (8000, {"web": 1, "synth": 1}))
    lengths = tokenizer.byte_lengths
    for step in range(mixed.steps):
        batch = mixed.batch(step)
        types = {name: str(array.dtype) for name, array in batch.items()}
        assert types == dict.fromkeys(["tokens", "targets", "segments", "positions", "source"], "int32") | {
            "weights": "float32",
            "bytes": "int64",
        }
        for name in ("tokens", "targets", "segments", "positions", "weights"):
            assert batch[name].shape == (4, ROW)
        for row in range(4):
            tokens, targets, segments, positions, weights = (
                batch[name][row] for name in ("tokens", "targets", "segments", "positions", "weights")
            )
            used = int((segments > 0).sum())
            assert (segments[:used] > 0).all()
            assert not tokens[used:].any()
            for t in range(ROW):
                fresh = t == 0 or segments[t] != segments[t - 1]
                if segments[t]:
                    assert positions[t] == (0 if fresh else positions[t - 1] + 1)
                    assert fresh <= (t == 0 or segments[t] == segments[t - 1] + 1)
                if t + 1 < ROW:
                    inside = segments[t] > 0 and segments[t] == segments[t + 1]
                    assert weights[t] == inside
                    assert targets[t] == (tokens[t + 1] if inside else 0)
            assert batch["bytes"][row] == lengths[targets[weights > 0]].sum()


def test_every_token_of_web_text_but_a_documents_first_is_a_target_once(sources, tokenizer):
    """Over one epoch, targets and first tokens together are the corpus: rows cut documents without losing targets."""
    rows = len(rows_on_disk(sources["web"]))
    web = loader({"web": sources["web"]}, (rows * ROW, {"web": 1}), batch_rows=1)
    assert web.steps == rows
    learnt, corpus, documents = Counter(), Counter(), 0
    for step in range(web.steps):
        batch = web.batch(step)
        learnt.update(batch["targets"][batch["weights"] > 0].tolist())
        corpus.update(batch["tokens"][batch["segments"] > 0].tolist())
        documents += int((batch["tokens"] == tokenizer.end_of_text).sum())
    assert corpus.total() - learnt.total() == documents
    assert learnt[tokenizer.end_of_text] == documents == read_index(sources["web"]).total("documents", "train")


def test_of_replies_every_token_is_a_target_once_and_of_prompts_none(sources, tokenizer):
    """Over one epoch, by the lengths on disk. The reply's first token and its end marker are among the targets."""
    rows, index = len(rows_on_disk(sources["synth"])), read_index(sources["synth"])
    plan = {"synth": sources["synth"]}, (rows * ROW, {"synth": 1})
    chat = loader(*plan, batch_rows=1, train_on={"synth": "replies"})
    learnt, expected = Counter(), Counter()
    for step in range(rows):
        batch = chat.batch(step)
        learnt.update(batch["targets"][batch["weights"] > 0].tolist())
        assert batch["bytes"][0] == tokenizer.byte_lengths[batch["targets"][batch["weights"] > 0]].sum()
    for entry in (entry for entry in index.shards if entry.split == "train"):
        shard = Shard(sources["synth"] / entry.file, entry, index)
        ends = np.cumsum(shard.lengths)
        for end, length, prompt in zip(ends, shard.lengths, shard.prompts, strict=True):
            expected.update(shard.tokens[int(end) - int(length) + int(prompt) : int(end)].tolist())
    assert learnt == expected
    assert learnt[tokenizer.think_start] == 0
    tokens = index.total("tokens", "train")
    whole, replies = (tokens - index.total(name, "train") for name in ("documents", "prompt_tokens"))
    assert (chat.reading()["synth"].trained_share, learnt.total()) == (pytest.approx(replies / whole), replies)
    assert 0.2 < replies / whole < 0.8


def test_replies_alone_leave_the_rest_of_a_batch_as_it_is(sources):
    """Tokens, targets, positions, the draw of rows and the other source's weights do not depend on what is trained."""
    plan = sources, (6000, {"web": 0.5, "synth": 0.5})
    whole, replies = loader(*plan), loader(*plan, train_on={"synth": "replies"})
    assert (replies.steps, replies.rows_drawn) == (whole.steps, whole.rows_drawn)
    synth = whole.names.index("synth")
    for step in range(whole.steps):
        first, second = whole.batch(step), replies.batch(step)
        for name in ("tokens", "targets", "segments", "positions", "source"):
            np.testing.assert_array_equal(first[name], second[name])
        chat = first["source"] == synth
        np.testing.assert_array_equal(first["weights"][~chat], second["weights"][~chat])
        assert (second["weights"][chat] <= first["weights"][chat]).all()
        assert second["weights"][chat].sum() < first["weights"][chat].sum()
    held_out = [it.validation("synth", 100)["weights"].sum() for it in (whole, replies)]
    assert held_out[1] < held_out[0]
    assert (replies.reading()["web"].train_on, replies.reading()["web"].trained_share) == ("all", 1.0)


def chat_artifact(folder, lengths, row_length=16):
    """An artifact of chat records, of each its (tokens, tokens of the prompt); returns its folder."""
    config = TokenizerConfig(ranks=300)
    packer, entries = FirstFitPacker(row_length), []
    for number, (length, prompt) in enumerate(lengths):
        packer.add(np.full(length, number, np.uint32), prompt)
    for split in ("train", "validation"):
        entries.append(write_shard(folder, 0, split, packer.finish(), config.vocabulary))
    fingerprint = tokenizer_for(config).fingerprint
    write_index(folder, ShardIndex(config, fingerprint, row_length, "synth", tuple(entries)))
    return folder


def test_a_prompt_that_fills_its_row_leaves_a_row_without_weight(tmp_path):
    folder = chat_artifact(tmp_path, [(30, 25), (6, 2), (40, 16), (40, 15)])
    chat = loader({"it": folder}, (4 * 16, {"it": 1}), batch_rows=4, train_on={"it": "replies"})
    batch = chat.batch(0)
    by_document = dict(zip(batch["tokens"][:, 0].tolist(), batch["weights"].sum(axis=1).tolist(), strict=True))
    assert by_document == {0: 0, 1: 4, 2: 0, 3: 1}, "cropped to 16 tokens, of which 16, 2, 16 and 15 are the prompt's"
    figures = chat.reading()["it"]
    assert (figures.cropped_share, figures.fill, figures.epochs) == (0.75, 54 / 64, 1.0)
    assert figures.trained_share == pytest.approx(5 / (54 - 4))


def test_replies_of_a_source_without_any_are_refused(sources, tmp_path):
    with pytest.raises(ConfigError, match=r"source 'web': train_on 'replies' needs prompts, and form 'web' has none"):
        loader({"web": sources["web"]}, (1000, {"web": 1}), train_on={"web": "replies"})
    folder = chat_artifact(tmp_path, [(30, 25), (16, 16)])
    with pytest.raises(ConfigError, match=r"source 'it': train_on 'replies' leaves nothing .* row of 16 tokens: raise"):
        loader({"it": folder}, (1000, {"it": 1}), train_on={"it": "replies"})


def test_prompts_that_are_longer_than_their_documents_are_noticed(sources, tmp_path, monkeypatch):
    folder = shutil.copytree(sources["synth"], tmp_path / "synth")
    for path in (folder / "shards").glob("train-*"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 255  # of the last prompt's length
        path.write_bytes(content)
    monkeypatch.setattr("nautile.data.tokens.loader.DIGEST_LIMIT", -1)  # as of a corpus too large to be read as a whole
    chat = loader({"it": folder}, (90 * ROW, {"it": 1}), train_on={"it": "replies"})
    with pytest.raises(ConfigError, match=r"shard .* is damaged \(a prompt is longer than its document\)"):
        [chat.batch(step) for step in range(chat.steps)]


def test_a_batch_is_a_function_of_seed_and_step(sources):
    plan = [(6000, {"web": 1}), (9000, {"web": 0.3, "synth": 0.7})]
    first, second = loader(sources, *plan), loader(sources, *plan)
    forward = [first.batch(step) for step in range(first.steps)]
    for step in reversed(range(second.steps)):
        assert all((second.batch(step)[name] == forward[step][name]).all() for name in forward[step])
    other = loader(sources, *plan, seed=1)
    assert any((other.batch(step)["tokens"] != forward[step]["tokens"]).any() for step in range(first.steps))


def test_the_bytes_of_batches_are_those_of_earlier_versions(sources):
    """A run that was begun by an earlier version goes on with the same rows."""
    mixed = loader(sources, (6000, {"web": 1}), (9000, {"web": 0.3, "synth": 0.7}))
    batches = [mixed.batch(step) for step in range(mixed.steps)] + [mixed.validation(name, 100) for name in mixed.names]
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(name.encode())
            digest.update(batch[name].tobytes())
    assert digest.hexdigest() == "7b2ddb72e1258e4b48a5eb698692fee6897cc8e22430adad6ad30c08e9da89c3"


@pytest.fixture(scope="module")
def many_shards(make_tokens, web_records):
    """Artifact of a shard a document."""
    return make_tokens(web_records, rows_per_shard=1, row_length=16)[0]


def epochs_of(folder, count=2):
    rows = len(rows_on_disk(folder))
    web = loader({"web": folder}, (count * rows * 16, {"web": 1}), batch_rows=1)
    return [web.batch(step) for step in range(web.steps)]


@pytest.mark.slow
def test_no_shard_is_opened_twice_however_many_there_are(many_shards, monkeypatch):
    opened = Counter()
    counted = vars(os) | {"open": lambda path, *rest: opened.update([path]) or os.open(path, *rest)}
    monkeypatch.setattr(loader_module, "os", SimpleNamespace(**counted))  # other modules read the index and the rows
    epochs_of(many_shards)
    shards = (entry.file for entry in read_index(many_shards).shards if entry.split == "train")
    assert opened == Counter(f"{many_shards}/{file}" for file in shards)
    assert len(opened) > 100


@pytest.mark.slow
def test_more_shards_than_the_process_may_hold_open_give_the_same_rows(many_shards, monkeypatch):
    expected = epochs_of(many_shards)
    monkeypatch.setattr(loader_module, "MOST_FILES", 16)
    monkeypatch.setattr(loader_module.resource, "getrlimit", lambda which: (16, 16))
    assert all((a["tokens"] == b["tokens"]).all() for a, b in zip(epochs_of(many_shards), expected, strict=True))


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch):
    limits = []
    monkeypatch.setattr(loader_module.resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(loader_module.resource, "setrlimit", lambda which, pair: limits.append(pair))
    OpenFiles(100)
    OpenFiles(2000)
    OpenFiles(36_000)
    assert limits == [(2512, 4096), (4096, 4096)]
    monkeypatch.setattr(loader_module.resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    OpenFiles(36_000)
    assert limits[2] == (36_512, resource.RLIM_INFINITY)
    monkeypatch.setattr(loader_module.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    OpenFiles(36_000)
    assert len(limits) == 3


def test_an_artifact_without_row_offsets_is_refused(sources, tmp_path):
    folder = shutil.copytree(sources["web"], tmp_path / "web")
    (folder / OFFSETS).unlink()
    with pytest.raises(ConfigError, match=r"rows\.u4 is missing or damaged; build it again"):
        loader({"it": folder}, (6000, {"it": 1}))


def test_a_shard_that_is_cut_or_removed_meanwhile_is_named_when_it_is_reached(sources, tmp_path):
    folder = shutil.copytree(sources["web"], tmp_path / "web")
    shards = sorted((folder / "shards").glob("train-*"))
    web = loader({"web": folder}, (6000, {"web": 1}))
    for shard in shards[1:]:
        shard.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"web: shard shards/train-00000-0000\d\.bin is too short; build it again"):
        [web.batch(step) for step in range(web.steps)]
    web = loader({"web": shutil.copytree(sources["web"], tmp_path / "gone")}, (6000, {"web": 1}))
    shutil.rmtree(tmp_path / "gone" / "shards")
    with pytest.raises(ConfigError, match=r"gone: shard .* cannot be opened \(No such file"):
        web.batch(0)


def test_an_error_of_another_file_than_a_shard_stays_and_no_descriptor_is_lost(sources):
    """A remote's files are opened through others, such as a lock; several at once, of which one may fail."""

    opened, index = [], read_index(sources["web"])
    failing = [entry.file for entry in index.shards if entry.split == "train"][1]

    def open_shard(path):
        if path.endswith(failing):
            raise OSError(errno.EMFILE, "Too many open files", "/cache/lock")
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    files = OpenFiles(len(index.shards), SimpleNamespace(limit=10**12, open=open_shard))
    reader = RowReader(sources["web"], index, 0, files)
    with pytest.raises(OSError, match="Too many open files: '/cache/lock'"):
        reader.read("train", np.arange(reader.rows("train")))
    assert len(opened) > 1
    assert set(files._open.values()) == set(opened), "they are closed with the others"


def test_row_offsets_of_another_artifact_are_noticed(sources, tmp_path):
    folder = shutil.copytree(sources["web"], tmp_path / "web")
    offsets = np.fromfile(folder / OFFSETS, "<u4")
    offsets[2::7] //= 2
    offsets.tofile(folder / OFFSETS)
    web = loader({"web": folder}, (6000, {"web": 1}))
    with pytest.raises(ConfigError, match=r"shard .*\.bin (and rows\.u4 differ|is too short|cannot be read)"):
        [web.batch(step) for step in range(web.steps)]


def test_an_epoch_has_every_row_once_and_the_next_another_order(sources):
    disk = rows_on_disk(sources["web"])
    rows = len(disk)
    web = loader({"web": sources["web"]}, (3 * rows * ROW, {"web": 1}), batch_rows=1)
    drawn = [content(web.batch(step), 0) for step in range(web.steps)]
    epochs = [drawn[:rows], drawn[rows : 2 * rows], drawn[2 * rows :]]
    assert all(Counter(epoch) == Counter(disk) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != disk
    assert web.epochs("web") == 3


def test_a_later_phase_continues_where_the_earlier_stopped(sources):
    rows = len(rows_on_disk(sources["web"]))
    first = rows // 2
    split = loader({"web": sources["web"]}, (first * ROW, {"web": 1}), ((rows - first) * ROW, {"web": 1}), batch_rows=1)
    whole = loader({"web": sources["web"]}, (rows * ROW, {"web": 1}), batch_rows=1)
    drawn = [content(split.batch(step), 0) for step in range(split.steps)]
    assert drawn == [content(whole.batch(step), 0) for step in range(whole.steps)]
    assert [split.phase(0), split.phase(first - 1), split.phase(first)] == ["phase0", "phase0", "phase1"]


def test_phases_last_their_tokens_and_mixtures_are_exact(sources):
    mixed = loader(sources, (4 * ROW * 10, {"web": 1}), (4 * ROW * 25 + 1, {"web": 1, "synth": 4}))
    assert mixed.steps == 10 + 26
    assert mixed.names == ("synth", "web")
    counts = Counter(int(s) for step in range(10, 35) for s in mixed.batch(step)["source"])
    assert counts == {0: 80, 1: 20}
    assert mixed.rows_drawn == {"web": 40 + 21, "synth": 104 * 4 // 5}
    with pytest.raises(IndexError, match="36 steps"):
        mixed.batch(36)
    with pytest.raises(IndexError):
        mixed.phase(-1)


@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_hosts_hold_slices_of_the_same_global_batch(sources, hosts):
    plan = [(6000, {"web": 1}), (9000, {"web": 0.3, "synth": 0.7})]
    options = {"batch_rows": 6, "train_on": {"synth": "replies"}}
    whole = loader(sources, *plan, **options)
    parts = [loader(sources, *plan, host=host, hosts=hosts, **options) for host in range(hosts)]
    for step in range(0, whole.steps, 3):
        batch, slices = whole.batch(step), [part.batch(step) for part in parts]
        for name, array in batch.items():
            assert (np.concatenate([piece[name] for piece in slices]) == array).all()


def test_validation_is_the_first_rows_of_its_own_split(sources):
    mixed = loader(sources, (4000, {"web": 1, "synth": 1}))
    held_out, train = rows_on_disk(sources["web"], "validation"), set(rows_on_disk(sources["web"]))
    batch = mixed.validation("web", 2)
    assert [content(batch, row) for row in range(2)] == held_out[:2]
    assert not train & set(held_out)
    assert set(batch["source"].tolist()) == {mixed.names.index("web")}
    assert len(mixed.validation("web", 10_000)["tokens"]) == len(held_out)
    assert (batch["bytes"] > 0).all()


def test_no_validation_rows_gives_arrays_of_no_rows(make_tokens, web_records):
    folder, _ = make_tokens(web_records, validation_share=0.0)
    batch = loader({"web": folder}, (1000, {"web": 1})).validation("web", 8)
    assert batch["tokens"].shape == batch["weights"].shape == (0, ROW)
    assert batch["bytes"].shape == (0,)


def test_what_does_not_fit_is_refused_by_name(sources, make_tokens, web_records, tmp_path):
    with pytest.raises(ConfigError, match=r"web.* another tokenizer \(ranks 300, and this run has 400"):
        loader({"web": sources["web"]}, (1000, {"web": 1}), ranks=400)
    longer, _ = make_tokens(web_records, row_length=32)
    with pytest.raises(ConfigError, match=r"has rows of (32|64) tokens, others of (32|64)"):
        loader({"web": sources["web"], "other": longer}, (1000, {"web": 1}))
    with pytest.raises(ConfigError, match="no tokens of source 'news'"):
        loader(sources, (1000, {"news": 1}))
    with pytest.raises(ConfigError, match="batch_rows 4 does not divide among 3 hosts"):
        loader(sources, (1000, {"web": 1}), hosts=3)
    with pytest.raises(ConfigError, match="no token sources"):
        loader({}, (1000, {"web": 1}))
    shutil.copytree(sources["web"], tmp_path / "flipped")
    victim = tmp_path / "flipped" / "shards" / "train-00000-00002.bin"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 255
    victim.write_bytes(content)
    with pytest.raises(ConfigError, match=r"flipped: shard shards/train-00000-00002\.bin is damaged"):
        loader({"web": tmp_path / "flipped"}, (1000, {"web": 1}))


WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1)


@given(weights=WEIGHTS, first=st.integers(0, 5000), rows=st.integers(0, 300))
def test_counts_and_rows_agree_and_shares_are_exact(weights, first, rows):
    mixture = Mixture(weights)
    source, nth = mixture.assign(first, rows)
    before, after = mixture.counts(first), mixture.counts(first + rows)
    assert after.sum() == first + rows
    for i, name in enumerate(mixture.sources):
        assert nth[source == i].tolist() == list(range(before[i], after[i]))  # each source's rows in turn, none twice
        exact = weights[name] / sum(weights.values()) * (first + rows)
        assert abs(after[i] - exact) <= len(weights) + 0.01


def test_two_to_one_is_two_to_one_in_every_three():
    source, _ = Mixture({"synth": 2, "web": 1}).assign(0, 30_000)
    assert set(np.unique(source.reshape(-1, 3).sum(axis=1))) == {1}


def test_no_overflow_far_into_a_run():
    mixture = Mixture({"a": 1 / 3, "b": 1 / 7, "c": 11})
    counts = mixture.counts(10**10)
    _, nth = mixture.assign(10**10, 100)
    assert (nth >= 0).all()
    assert counts.min() > 0
