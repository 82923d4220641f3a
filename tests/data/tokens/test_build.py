"""Records to shards: counts that add up, the split by hash, and the same bytes in any order of work."""

import gc
import hashlib
import json
import os
import tracemalloc
from functools import partial

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.data import records as records_module
from nautile.data.records import Rejected, SynthRecord, WebRecord, batched
from nautile.data.screening.contamination import ContaminationIndex, HeldOutQuestion
from nautile.data.screening.corpus_copies import find_copies
from nautile.data.screening.duplicates import in_validation, text_hash
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens import build
from nautile.data.tokens.build import (
    CorpusPlan,
    DocumentChecks,
    pack_file,
    publish_tokens,
    remove_partial_files,
    tokenise_file,
    write_tokens,
)
from nautile.data.tokens.shards import read_index
from tests.support.samples.shards import Shard


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_same_records_give_the_same_bytes(make_tokens, web_records, synth_records):
    for records in (web_records, synth_records):
        assert digests(make_tokens(records)[0]) == digests(make_tokens(records)[0])


def test_counts_add_up(make_tokens, web_records, tokenizer):
    rows = [*web_records, web_records[3], WebRecord(web_records[4].text.upper() + "  "), Rejected("no_text")]
    folder, corpus = make_tokens(rows)
    facts = corpus.facts()
    assert facts["records"] == 123
    assert facts["documents"] == 120
    assert facts["rejected"] == {"duplicate": 2, "no_text": 1}
    assert facts["tokens"] == sum(len(tokenizer.encode(record.text)) + 1 for record in web_records)
    assert facts["bytes_per_token"] == round(sum(len(r.text.encode()) for r in web_records) / facts["tokens"], 4)
    index = read_index(folder)
    assert (facts["rows"], facts["validation_rows"]) == (index.rows("train"), index.rows("validation"))
    assert facts["padded"] == (facts["rows"] + facts["validation_rows"]) * 64 - facts["tokens"]
    assert json.loads(json.dumps(facts)) == facts


def test_long_chat_records_are_cropped_and_counted(make_tokens, synth_records):
    _, corpus = make_tokens(synth_records, row_length=48)
    facts = corpus.facts()
    assert facts["cropped_documents"] > 0
    assert facts["cropped"] > 0
    assert facts["tokens"] <= (facts["rows"] + facts["validation_rows"]) * 48


def test_validation_is_chosen_by_content_not_by_position(make_tokens, web_records, tokenizer):
    def held_out(records, share=0.1):
        folder, _ = make_tokens(records, validation_share=share)
        index = read_index(folder)
        ids = [
            int(token)
            for entry in index.shards
            if entry.split == "validation"
            for token in Shard(folder / entry.file, entry, index).tokens
        ]
        return set(tokenizer.decode(ids).split("<|endoftext|>")) - {""}

    expected = {r.text for r in web_records if in_validation(text_hash(r.text), 0.1)}
    assert 0 < len(expected) < len(web_records) / 4
    assert held_out(web_records) == held_out(web_records[::-1]) == expected
    assert held_out(web_records, share=0.0) == set()


def test_progress_is_reported_and_ends_full(make_tokens, web_records):
    events = []
    make_tokens(web_records, emit=lambda kind, **fields: events.append((kind, fields)), records=120)
    assert {kind for kind, _ in events} == {"progress"}
    records = [fields for _, fields in events if fields["unit"] == "records"]
    assert records[-1]["done"] == records[-1]["total"] == 120


def test_records_stop_at_the_plans_number(make_tokens, web_records):
    assert make_tokens(web_records, records=50)[1].facts()["documents"] == 50


def test_nothing_usable_is_an_error_that_says_why(small, tmp_path):
    with pytest.raises(ConfigError, match=r"no usable record for training in the source \(3 no_text\)"):
        write_tokens(
            lambda skip: iter([Rejected("no_text")] * 3),
            CorpusPlan(small, "web", 64, 8, 0.0),
            tmp_path / "work",
            tmp_path / "out",
            lambda kind, **fields: None,
        )


class Stop(Exception):
    pass


@pytest.mark.parametrize("form", ["web", "synth"])
def test_an_interruption_leaves_nothing_behind_and_the_next_run_gives_the_same_bytes(
    make_tokens, web_records, synth_records, small, tmp_path, form
):
    records = [*(web_records if form == "web" else synth_records)]
    records.insert(70, records[2])
    expected, whole = make_tokens(records, exemplars=6)
    plan = CorpusPlan(small, form, 64, 8, 0.1, exemplars=6)
    args = (plan, tmp_path / "work", tmp_path / "out", silent)

    def broken(skip):
        yield from records[:60]
        raise Stop

    with pytest.raises(Stop):
        write_tokens(broken, *args)
    assert not list((tmp_path / "work").iterdir())
    resumed = write_tokens(lambda skip: iter(records), *args)
    assert digests(tmp_path / "out") == digests(expected)
    assert (resumed.facts(), resumed.exemplars) == (whole.facts(), whole.exemplars)
    again = write_tokens(lambda skip: pytest.fail("nothing is left to read"), *args)
    assert (again.facts(), again.exemplars) == (whole.facts(), whole.exemplars)
    assert not list((tmp_path / "work").rglob("tokens.*"))  # the ids' disk was given back


@pytest.mark.parametrize("form", ["web", "synth"])
def test_files_tokenised_in_any_order_and_twice_at_once_give_the_same_bytes(
    web_records, synth_records, small, tmp_path, form
):
    records = [*(web_records if form == "web" else synth_records)]
    parts = [records[:40], [*records[40:70], records[3]], records[70:]]
    plan = CorpusPlan(small, form, 64, 4, 0.1, exemplars=6)

    def build_tokens(name, order, twice=False):
        folders = [tmp_path / name / f"{n:05d}" for n in range(3)]
        for n in order:
            batches = list(batched(parts[n], form))
            if twice:  # a second process begins during the first one's work, and both finish
                batches = amid(
                    batches, lambda n=n: tokenise_file(batched(parts[n], form), plan, DocumentChecks(), folders[n], 6)
                )
            tokenise_file(batches, plan, DocumentChecks(), folders[n], 6)
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["00000", "00001", "00002"]
        find_copies(folders, (), tmp_path / name / "settling", silent)
        out, marks = tmp_path / name / "out", [tmp_path / name / f"{n}.json" for n in range(3)]
        for n in reversed(order):
            packed = pack_file(folders[n], n, plan, marks[n], out)
            assert pack_file(folders[n], n, plan, marks[n], out) == packed
        corpus = publish_tokens(folders, marks, plan, out)
        return digests(out), corpus.facts(), corpus.exemplars

    def amid(batches, interloper):
        yield batches[0]
        interloper()
        yield from batches[1:]

    expected = build_tokens("one", [0, 1, 2])
    assert expected[1]["rejected"] == {"duplicate": 1}
    assert len({name.rpartition("-")[0] for name in expected[0] if "train" in name}) == 3  # every file has its shards
    assert build_tokens("two", [2, 0, 1]) == build_tokens("three", [1, 2, 0], twice=True) == expected


def test_the_leftovers_of_a_killed_process_are_removed(small, tmp_path, web_records):
    (tmp_path / "00003.partial-abc").mkdir()
    (tmp_path / "00003.partial-abc" / "tokens.u2").write_bytes(b"half")
    tokenise_file(
        batched(web_records, "web"), CorpusPlan(small, "web", 64, 8, 0.1), DocumentChecks(), tmp_path / "00003"
    )
    remove_partial_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["00003"]


def test_shards_that_no_marker_names_are_not_published(make_tokens, web_records, small, tmp_path):
    expected, _ = make_tokens(web_records)
    (tmp_path / "out" / "shards").mkdir(parents=True)
    (tmp_path / "out" / "shards" / "train-00009-00000.bin").write_bytes(b"of a process taken for lost")
    plan = CorpusPlan(small, "web", 64, 8, 0.1)
    write_tokens(lambda skip: iter(web_records), plan, tmp_path / "work", tmp_path / "out", silent)
    assert digests(tmp_path / "out") == digests(expected)


def test_contaminated_documents_are_left_out_and_their_hits_kept(small, tmp_path, web_records):
    words = "a train leaves the station at noon and travels sixty miles in one hour"
    rows = [*web_records[:20], WebRecord(f"Once {words} they say."), *web_records[20:]]
    checks = DocumentChecks(ContaminationIndex([HeldOutQuestion("gsm8k", "7", words)]))
    plan = CorpusPlan(small, "web", 64, 8, 0.1)
    args = (plan, tmp_path / "work", tmp_path / "out", silent)
    corpus = write_tokens(lambda skip: iter(rows), *args, checks=checks)
    assert corpus.facts()["rejected"] == {"contaminated": 1}
    assert corpus.facts()["contaminated"] == {"gsm8k": 1}
    assert corpus.documents == len(web_records)
    (hit,) = (tmp_path / "out" / "contamination.jsonl").read_text().splitlines()
    assert (json.loads(hit)["example"], json.loads(hit)["begins"][:12]) == ("7", "Once a train")


def test_everything_is_on_disk_before_the_folder_has_its_name(small, tmp_path, web_records, monkeypatch):
    """A machine that loses power right after the rename must not leave a finished folder with half a file."""
    synced = set()

    def fsync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])

    monkeypatch.setattr(os, "fsync", fsync)
    batches = batched(iter(web_records), "web")
    tokenise_file(batches, CorpusPlan(small, "web", 64, 8, 0.1), DocumentChecks(), tmp_path / "file")
    atomic = {name.removeprefix(".").partition(".jsonl")[0].partition(".json")[0] for name in synced}
    for path in (tmp_path / "file").iterdir():
        assert path.name in synced or path.stem in atomic, path.name


def test_shards_have_their_names_on_disk_before_their_marker(small, tmp_path, web_records, monkeypatch):
    """Once a file is marked as packed its ids are deleted: a shard whose renaming was lost could not be made again."""
    synced, sync, marker = set(), os.fsync, tmp_path / "packed.json"

    def record(descriptor):
        if not marker.exists():
            synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    plan = CorpusPlan(small, "web", 64, 8, 0.1)
    write_tokens(lambda skip: iter(web_records), plan, tmp_path, tmp_path / "out", silent)
    assert marker.is_file()
    assert {(tmp_path / "out" / "shards").stat().st_ino, (tmp_path / "out").stat().st_ino} <= synced


def test_near_copies_go_by_their_bands_and_other_sources_come_first(small, tmp_path, web_records):
    def run(name, records, against=(), bands=None):
        work = tmp_path / name
        plan = CorpusPlan(small, "web", 64, 8, 0.0)
        checks = DocumentChecks(bands=bands)
        args = (plan, work, work / "out", silent)
        return write_tokens(lambda skip: iter(records), *args, checks=checks, against=against), work / "file"

    def by_length(texts):  # documents of equal length are taken for near copies
        return np.array([[len(text), n] for n, text in enumerate(texts, 10_000)], np.uint64)

    lengths = {len(record.text) for record in web_records}
    corpus, folder = run("near", web_records, bands=by_length)
    assert corpus.rejected == {"near_duplicate": len(web_records) - len(lengths)}
    corpus, _ = run("later", [*web_records[:5], WebRecord("something else")], against=[folder])
    assert (corpus.documents, corpus.rejected) == (1, {"duplicate_elsewhere": 5})


def peak(work):
    """Bytes that Python and numpy held at most during `work`."""
    # Earlier tests may have set the garbage collector to run seldom: cycles then count until it does.
    thresholds = gc.get_threshold()
    gc.set_threshold(700)  # Python's own
    gc.freeze()  # what other tests left is not looked through: a collection of all that takes seconds
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def peaks(batches, plan, folder):
    """Peak memory of tokenising a file (the least of three: threads of other tests allocate too) and packing it."""
    tokenising = min(
        peak(partial(tokenise_file, batches(), plan, DocumentChecks(), folder / name)) for name in ("a", "b", "file")
    )
    find_copies([folder / "file"], (), folder / "settling", silent)
    return tokenising, peak(lambda: pack_file(folder / "file", 0, plan, folder / "marker", folder / "out"))


def test_memory_does_not_grow_with_the_rows_of_a_file(small, tmp_path, monkeypatch):
    monkeypatch.setattr(records_module, "BATCH_ROWS", 64)
    monkeypatch.setattr(build, "DOCUMENT_BLOCK", 64)
    assert tokenizer_for(small).byte_lengths.any()  # built before anything is measured
    plan = CorpusPlan(small, "web", 64, 256, 0.0)
    text = "tide and foam " * 20

    def rows(count):
        return batched((WebRecord(f"{n} {text}") for n in range(count)), "web")

    peaks(lambda: rows(10), plan, tmp_path / "first")  # whatever is allocated on first use
    few, many = (peaks(partial(rows, count), plan, tmp_path / str(count)) for count in (300, 1800))
    assert sum(path.stat().st_size for path in (tmp_path / "1800").rglob("*.bin")) > 300_000
    assert many[0] < 1.2 * few[0]  # a batch at a time
    assert many[1] < few[1] + 1500 * 80  # a shard at a time, and a few arrays of one number per document


PLANTED = "how many purple walruses can dance upon the head of one rusty pin in the month of may"


def planted_rows():
    """Every record form with the planted question in one of its fields."""
    for name in ("text", "id", "url", "dump"):
        yield f"web, {name}", WebRecord(**{"text": "some words of a page", name: PLANTED})
    for exercise in (None, "rag", "memo"):
        for name in ("query", "synthetic_reasoning", "synthetic_answer", "constraints", "query_seed_text", "synth_id"):
            fields = {"query": "a query", "synthetic_reasoning": "a thought", "synthetic_answer": "an answer"}
            yield f"synth, {exercise}, {name}", SynthRecord(**{**fields, "exercise": exercise, name: PLANTED})


@pytest.mark.parametrize(("where", "record"), list(planted_rows()), ids=[where for where, _ in planted_rows()])
def test_a_held_out_question_is_found_in_every_field_that_is_trained_on(where, record, small, tokenizer, tmp_path):
    form = "web" if isinstance(record, WebRecord) else "synth"
    clean = WebRecord("clean") if form == "web" else SynthRecord("clean", "so", "yes")
    plan = CorpusPlan(small, form, row_length=128, rows_per_shard=8, validation_share=0.0)
    checks = DocumentChecks(ContaminationIndex([HeldOutQuestion("b", "1", PLANTED)]))

    def trained_on(name, checks):
        corpus = write_tokens(
            lambda skip: iter([clean, record]), plan, tmp_path / name / "work", tmp_path / name, silent, checks=checks
        )
        (entry,) = corpus.index.shards
        ids = Shard(tmp_path / name / entry.file, entry, corpus.index).tokens
        return PLANTED in tokenizer.decode([int(token) for token in ids]), corpus.rejected.get("contaminated", 0)

    is_trained_on, _ = trained_on("unscreened", None)
    assert trained_on("screened", checks) == (False, int(is_trained_on)), where


def test_two_passages_to_one_question_are_two_documents(make_tokens):
    """The hash that finds copies, and that splits off the validation set, is of the passage too."""
    records = [
        SynthRecord("Sum it up.", "so", "yes", exercise="rag", constraints=text) for text in ("one", "two", "one")
    ]
    assert make_tokens(records, validation_share=0.0)[1].rejected == {"duplicate": 1}
