"""Event files: what is written is read back, whatever was torn or full in between; the file of live values.

Events of another form are left out of the catalog and counted, whoever wrote them, without harm to any other.
"""

import json
import math
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.common.events import flush, silent
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter, read_events, read_live
from tests.support.samples.foreign_events import OF_ANOTHER_FORM, PLAN, event_of, write_events

json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events" / "child.jsonl"


def test_events_are_read_back_as_they_were_written(path):
    emit = EventWriter(path, "e1", stage="reason")
    emit("metric", name="reward", step=3, value=0.5)
    emit("sample", index=7, set="train", prompt="1+1?", id="own", kind_="x", execution_="y")
    emit("call", endpoint="teacher", ok=True)
    emit.close()
    events, reached = read_events(path)
    assert reached == path.stat().st_size
    assert [event["kind"] for event in events] == ["metric", "sample", "call"]
    assert all(event["execution"] == "e1" and event["stage"] == "reason" for event in events)
    assert events[0]["fields"] == {"name": "reward", "step": 3, "value": 0.5}
    assert events[1]["fields"]["id"] == "own"
    assert [event["time"] for event in events] == sorted({event["time"] for event in events})


def test_a_file_that_has_grown_large_is_followed_by_the_next(path, monkeypatch):
    monkeypatch.setattr("nautile.store.events.LARGEST_FILE", 700)
    emit = EventWriter(path, "e1")
    emit.many("call", [{"index": index} for index in range(6)])
    emit.close()
    emit = EventWriter(path, "e1")  # a process that resumes goes on in the last one
    emit("call", index=6)
    emit("sample", index=0, text="x" * 2000)
    emit("call", index=7)
    emit.close()
    files = ["child.jsonl", "child.2.jsonl", "child.3.jsonl", "child.4.jsonl"]
    assert {file.name for file in path.parent.iterdir()} == set(files)
    events = [event for name in files for event in read_events(path.with_name(name))[0]]
    assert [event["fields"]["index"] for event in events] == [0, 1, 2, 3, 4, 5, 6, 0, 7]
    assert len({event["id"] for event in events}) == 9
    assert path.stat().st_size <= 700


def test_ids_are_of_what_was_measured_so_a_resume_doubles_nothing(tmp_path):
    def ids(file, execution):
        emit = EventWriter(tmp_path / file, execution)
        emit("metric", name="loss", step=1, value=0.5)
        emit("metric", name="loss", step=np.int64(1), value=0.5, source="web")
        emit("metric", name="loss", step=2, value=0.5)
        emit("sample", index=0, text="a")
        emit("sample", index=0, text="a", set="guard")
        emit("call", endpoint="t")
        emit("call", endpoint="t")
        return [event["id"] for event in read_events(tmp_path / file)[0]]

    first, resumed, other = ids("1", "e1"), ids("2", "e1"), ids("3", "e2")
    assert len(set(first)) == 7
    assert first[:5] == resumed[:5]
    assert not set(first[5:]) & set(resumed[5:])
    assert not set(first) & set(other)


def test_scalars_of_numpy_and_jax_nan_infinity_and_none(path):
    emit = EventWriter(path, "e1")
    emit("metric", name="loss", step=jnp.int32(4), value=jnp.float32(0.25))
    emit("metric", name="loss", step=5, value=np.float32("nan"))
    emit("metric", name="loss", step=6, value=math.inf)
    emit("metric", name="unknown", step=7, value=None)
    emit("sample", index=0, ids=np.arange(3, dtype=np.int32), rewards=(1.0, math.nan), half="\ud800")
    fields = [event["fields"] for event in read_events(path)[0]]
    assert [f.get("value") for f in fields] == [0.25, "nan", "inf", None]
    assert fields[0]["step"] == 4
    assert fields[3]["ids"] == [0, 1, 2]
    assert fields[3]["rewards"] == [1.0, "nan"]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("metric", {"name": "loss", "value": 1.0}, "'step'"),
        ("metric", {"name": "loss", "step": 1, "value": [1]}, "float"),
        ("sample", {"text": "a"}, "'index'"),
        ("smaple", {"index": 1}, "unknown kind 'smaple'"),
    ],
)
def test_an_event_without_its_required_fields_is_refused_at_once(path, kind, fields, message):
    emit = EventWriter(path, "e1")
    with pytest.raises(ValueError, match=message):
        emit(kind, **fields)
    emit.close()
    with pytest.raises(ValueError, match="is closed"):
        emit("call", endpoint="t")
    assert path.read_bytes() == b""


def test_threads_share_a_writer(path):
    emit = EventWriter(path, "e1")

    def work(name):
        for step in range(200):
            emit("metric", name=name, step=step, value=1.0)
            if step % 50 == 0:
                emit("call", endpoint=name)

    threads = [threading.Thread(target=work, args=(f"t{index}",)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events, _ = read_events(path)
    assert len({event["id"] for event in events}) == len(events) == 6 * 204


@pytest.mark.slow
@settings(max_examples=60)
@given(
    samples=st.lists(st.dictionaries(st.text(), json_data, max_size=3), min_size=1, max_size=5),
    cut=st.integers(min_value=0),
    limit=st.integers(min_value=1, max_value=400),
)
def test_a_file_cut_at_any_byte_gives_its_whole_events_and_can_be_continued(tmp_path_factory, samples, cut, limit):
    path = tmp_path_factory.mktemp("torn") / "x.jsonl"
    emit = EventWriter(path, "e1")
    for index, sample in enumerate(samples):
        emit("sample", index=index, sample=sample)
    emit.close()
    whole, _ = read_events(path)
    assert len(whole) == len(samples)
    data = path.read_bytes()
    cut %= len(data) + 1
    path.write_bytes(data[:cut])
    complete = data[:cut].count(b"\n")
    events, reached = read_events(path)
    assert events == whole[:complete]

    again = EventWriter(path, "e1")  # a writer after the crash
    again("sample", index=99, sample={})
    again.close()
    more, end = read_events(path, reached)
    # The torn line may have lacked only its newline.
    assert [event["fields"]["index"] for event in more][-1] == 99
    assert len(more) <= 2
    assert end == path.stat().st_size

    read, position = [], 0
    while position < end:
        block, position = read_events(path, position, limit)
        read += block
    assert read == events + more


def test_a_line_that_is_no_event_is_skipped(path, caplog):
    emit = EventWriter(path, "e1")
    emit("metric", name="a", step=1, value=1.0)
    with path.open("ab") as file:
        file.write(b'{"id": 3}\n[1]\nnull\n\xff\xfe\n\n{"id": "x", "kind": "met\n')
    emit("metric", name="b", step=1, value=1.0)
    events, _ = read_events(path)
    assert [event["fields"]["name"] for event in events] == ["a", "b"]
    assert caplog.text.count("a torn line") == 5


def test_a_full_disk_raises_an_error():
    emit = EventWriter(Path("/dev/full"), "e1")
    with pytest.raises(OSError, match="No space left"):
        emit("metric", name="a", step=1, value=1.0)


def test_the_live_file_has_the_newest_values(tmp_path, path):
    live = tmp_path / "live.json"
    assert read_live(live) == {}
    emit = EventWriter(path, "e1", live=live)
    for step in range(50):
        emit("metric", name="loss", step=step, value=50.0 - step)
        emit("progress", done=step + 1, total=50, unit="steps", note="phase 1")
        emit("call", endpoint="t")
    emit.close()
    shown = read_live(live)
    assert shown["metrics"] == {"loss": 1.0}
    assert (shown["done"], shown["total"], shown["unit"], shown["note"], shown["calls"]) == (
        50,
        50,
        "steps",
        "phase 1",
        50,
    )
    assert len(read_events(path)[0]) == 100  # progress leaves no rows
    live.write_text("{")
    assert read_live(live) == {}


def test_flush_waits_until_every_event_is_on_disk(path, monkeypatch):
    synced, emit = [], EventWriter(path, "e1")
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(path.stat().st_size))
    emit("metric", name="loss", step=1, value=2.0)
    assert synced == []
    flush(emit)
    assert synced == [path.stat().st_size]
    flush(silent)
    emit.close()
    flush(emit)
    assert len(synced) == 2, "a closed writer has nothing to wait for"


@pytest.fixture
def catalog(store):
    return Catalog(store)


def foreign(events):
    """The events with an id each, as one machine writes them."""
    return [event | {"id": str(number)} for number, event in enumerate(events)]


def test_a_plan_of_another_form_is_left_out_and_counted(store, catalog):
    wrong = foreign(event_of("plan", **PLAN | part) for part in OF_ANOTHER_FORM)
    write_events(store, *wrong, event_of("plan", **PLAN | {"id": "good"}) | {"id": "good"})
    catalog.ingest()
    assert catalog.query("SELECT id FROM plans") == [{"id": "good"}]
    assert catalog.left_out() == {"events/other.jsonl": len(wrong)}


def test_what_a_later_version_adds_to_a_plan_is_dropped(store, catalog):
    step, change = (PLAN[name][0] | {"more": [1]} for name in ("steps", "changes"))
    write_events(store, event_of("plan", **PLAN | {"steps": [step], "changes": [change], "more": {"a": 1}}))
    catalog.ingest()
    (row,) = catalog.query("SELECT steps, changes FROM plans")
    assert {name: json.loads(text) for name, text in row.items()} == {name: PLAN[name] for name in row}
    assert catalog.left_out() == {}


UNEXPECTED = [
    ("run", {"label": "align", "state": "done", "key": "../../etc"}),
    ("run", {"label": "align", "state": "done", "execution": "../x"}),
    ("run", {"label": "align", "state": "done", "seconds": "inf"}),
    ("run", {"label": "align", "state": "done", "seconds": -1.0}),
    ("run", {"label": "align", "state": "done", "outputs": ["checkpoint/x"]}),
    ("run", {"label": "align", "state": "done", "reused": "perhaps"}),
    ("run", {"state": "done"}),
    ("note", {"text": "a", "tags": "low"}),
    ("note", {"text": "a", "tags": {"low": 1}}),
    ("call", {"dollars": "nan"}),
    ("call", {"dollars": -3.0}),
    ("call", {"latency_s": "inf"}),
    ("call", {"cached": "no"}),
    ("call", {"tokens_in": 10**30}),
    ("metric", {"name": "loss", "step": 1, "value": [1]}),
    ("sample", {"index": "first"}),
    ("alert", {"name": "of a later version"}),
]


def test_an_event_with_a_value_that_no_reader_expects_is_left_out(store, catalog):
    wrong = foreign(event_of(kind, **{"id": "r2"} | fields) for kind, fields in UNEXPECTED)
    write_events(store, *wrong, event_of("plan", **PLAN))
    catalog.ingest()
    assert catalog.query("SELECT run FROM plans") == [{"run": "r2"}]
    assert catalog.left_out() == {"events/other.jsonl": len(wrong)}
    for table in ("attempts", "notes", "calls", "metrics", "samples"):
        assert catalog.query(f"FROM {table}") == []


def test_events_that_are_left_out_are_counted_once_and_again_by_a_rebuild(store, catalog):
    bad = event_of("plan", **PLAN | {"state": "paused"})
    write_events(store, bad, bad)
    for _ in range(2):
        catalog.ingest()
        assert catalog.left_out() == {"events/other.jsonl": 2}
    with (store.root / "events" / "other.jsonl").open("a") as file:
        file.write(json.dumps(bad) + "\n")
    catalog.ingest()
    assert catalog.left_out() == {"events/other.jsonl": 3}
    catalog.rebuild()
    assert catalog.left_out() == {"events/other.jsonl": 3}
