"""Records to shards: counts that add up, the split by hash, and a kill at any shard that leaves no trace."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from configs.section import ConfigError
from data.corpus import CorpusPlan, write_tokens
from data.deduplicate import content_hash, in_validation
from data.records import Rejected, WebRecord
from data.shards import Shard, read_index


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


def test_validation_is_chosen_by_content_not_by_place(make_tokens, web_records, tokenizer):
    def held_out(records, share=0.1):
        folder, _ = make_tokens(records, validation_share=share)
        index = read_index(folder)
        ids = [
            int(one)
            for entry in index.shards
            if entry.split == "validation"
            for one in Shard(folder / entry.file, entry, index).tokens
        ]
        return set(tokenizer.decode(ids).split("<|endoftext|>")) - {""}

    expected = {r.text for r in web_records if in_validation(content_hash(r), 0.1)}
    assert 0 < len(expected) < len(web_records) / 4
    assert held_out(web_records) == held_out(web_records[::-1]) == expected
    assert held_out(web_records, share=0.0) == set()


def test_progress_is_told_and_ends_full(make_tokens, web_records):
    told = []
    make_tokens(web_records, emit=lambda kind, **fields: told.append((kind, fields)), records=120)
    assert {kind for kind, _ in told} == {"progress"}
    assert told[-1][1]["done"] == told[-1][1]["total"] == 120


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
@pytest.mark.parametrize("stop_after", [1, 17, 60, 88])
def test_any_interruption_resumes_to_the_same_bytes(
    make_tokens, web_records, synth_records, small, tmp_path, form, stop_after
):
    records = [*(web_records if form == "web" else synth_records)]
    records.insert(70, records[2])  # a duplicate whose first copy may be in an earlier process
    expected, whole = make_tokens(records, exemplars=6)
    plan = CorpusPlan(small, form, 64, 8, 0.1, exemplars=6)

    def scan(skip, until=None):
        for number in range(skip, len(records)):
            if number == until:
                raise Stop
            yield records[number]

    args = (plan, tmp_path / "work", tmp_path / "out", lambda kind, **fields: None)
    with pytest.raises(Stop):
        write_tokens(lambda skip: scan(skip, stop_after), *args)
    resumed = write_tokens(scan, *args)
    assert digests(tmp_path / "out") == digests(expected)
    assert resumed.facts() == whole.facts()
    assert resumed.exemplars == whole.exemplars
    again = write_tokens(lambda skip: pytest.fail("nothing is left to read"), *args)
    assert again.facts() == whole.facts()
    assert again.tokens_per_second is None


CHILD = """
import json, sys, time
from pathlib import Path
from configs.model import TokenizerConfig
from data.corpus import CorpusPlan, write_tokens
from data import corpus
from data.records import WebRecord
corpus.BATCH = 5
root, slow = Path(sys.argv[1]), float(sys.argv[2])
def scan(skip):
    for n in range(skip, 400):
        time.sleep(slow)
        yield WebRecord(f"document {n} " + "tide and foam " * (n * 37 % 19))
plan = CorpusPlan(TokenizerConfig(ranks=300), "web", 32, 6, 0.1)
write_tokens(scan, plan, root / "work", root / "out", lambda kind, **f: None)
"""


@pytest.mark.slow
def test_kill_9_and_rerun_gives_the_same_bytes(tmp_path):
    def command(name, slow):
        return [sys.executable, "-c", CHILD, str(tmp_path / name), str(slow)]

    subprocess.run(command("whole", 0), check=True, timeout=60)
    marks = tmp_path / "killed" / "work"
    for wanted in (1, 4):  # two kills, each after some more finished parts
        child = subprocess.Popen(command("killed", 0.004))
        while len(list(marks.glob("part-*.json"))) < wanted:
            assert child.poll() is None
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    finished = {path: path.stat().st_mtime_ns for path in marks.glob("part-*.json")}
    subprocess.run(command("killed", 0), check=True, timeout=60)
    assert digests(tmp_path / "killed" / "out") == digests(tmp_path / "whole" / "out")
    assert all(path.stat().st_mtime_ns == then for path, then in finished.items())  # none was done again


def test_a_part_that_lost_its_shard_is_done_again(make_tokens, web_records, small, tmp_path):
    expected, _ = make_tokens(web_records)
    plan = CorpusPlan(small, "web", 64, 8, 0.1)
    args = (lambda skip: iter(web_records[skip:]), plan, tmp_path / "work", tmp_path / "out", lambda k, **f: None)
    write_tokens(*args)
    (tmp_path / "work" / "shards" / "train-00001.bin").unlink()
    write_tokens(*args)
    assert digests(tmp_path / "out") == digests(expected)
