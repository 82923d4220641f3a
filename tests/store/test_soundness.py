"""Hostile manifests, events and folders are refused, and overwrite nothing."""

import json
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.files import read_json
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter, read_events
from nautile.store.manifest import LARGEST_EVENT, describe_files, is_safe_name, read_manifest
from tests.support.samples.stage_store import filled, key_of, manifest_of, published

FILE = {"bytes": 1, "sha256": key_of("x")}


def nested(depth):
    return "[" * depth + "]" * depth


@given(st.text(alphabet=st.sampled_from("ab./\\\0\n~"), max_size=12))
def test_a_safe_name_stays_inside_its_folder(tmp_path_factory, name):
    if is_safe_name(name):
        folder = tmp_path_factory.getbasetemp() / "inside"
        path = folder / name
        assert folder in path.parents
        assert path.resolve().is_relative_to(folder.resolve())
        assert path.relative_to(folder).as_posix() == name


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "", "a//b", "./a", "a\nb", "manifest.json", "x" * 256]
)
def test_a_name_that_leads_outside_is_not_safe(name):
    assert not is_safe_name(name)
    assert is_safe_name("deep/.hidden/b c.txt")


@pytest.mark.parametrize(
    "fields",
    [
        {"files": {"../../outside": FILE}},
        {"files": {"/etc/passwd": FILE}},
        {"files": {"a": {"bytes": -1, "sha256": key_of("x")}}},
        {"files": {"a": {"bytes": "1", "sha256": key_of("x")}}},
        {"files": {"a": {"bytes": 1, "sha256": "../x"}}},
        {"files": ["a"]},
        {"kind": "../tokens"},
        {"execution": "../../e"},
        {"inputs": {"web": "tokens/../x"}},
        {"inputs": {"web": f"tokens/{key_of('w')}"}},
        {"created": "yesterday"},
        {"label": None},
        {"created": "2026-01-02T03:04:05"},
        {"created": "2200-01-01T00:00:00+00:00"},
        {"inputs": {"a": f"tokens/{key_of('x')}"}, "input_executions": {"a": "e"}},
        {"facts": json.loads(nested(70))},
        {"config": {"a": json.loads(nested(70))}},
    ],
)
def test_a_manifest_with_a_valid_seal_and_invalid_fields_is_refused(tmp_path, fields, caplog):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_of(**fields)))
    assert read_manifest(tmp_path) is None
    assert "manifest.json is refused" in caplog.text


def test_a_deeply_nested_manifest_or_one_that_is_no_plain_file_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    for text in (nested(10**6), '{"format":1,"facts":' * 10**5, '{"format": 1, "facts": 1' + "0" * 10**5 + "}"):
        path.write_text(text)
        assert read_manifest(tmp_path) is None
    path.unlink()
    path.symlink_to(filled(tmp_path / "else", {"m.json": json.dumps(manifest_of())}) / "m.json")
    assert read_manifest(tmp_path) is None
    path.unlink()
    path.mkdir()
    assert read_manifest(tmp_path) is None


def test_ten_gigabytes_of_json_are_not_read(tmp_path, store):
    """The files are sparse: they take no disk, but whoever read one whole would need 10 GiB of memory."""
    live = published(store, "tokens", "one")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in (live.folder / "manifest.json", store.root / "events" / "hostile.jsonl"):
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(10 * 2**30)
    assert read_manifest(live.folder) is None
    assert read_json(store.root / "events" / "hostile.jsonl", limit=2**20) is None
    events, reached = read_events(store.root / "events" / "hostile.jsonl")
    assert events == []
    assert LARGEST_EVENT < reached < 2 * LARGEST_EVENT
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 512 * 2**20


def test_a_line_too_long_or_too_deep_is_skipped_and_the_next_is_read(store, caplog):
    path = store.root / "events" / "child.jsonl"
    emit = EventWriter(path, "e1", stage="toy")
    emit("metric", name="a", step=1, value=1.0)
    head = b'{"id":"x","kind":"sample","execution":"e1","time":1,"fields":{"index":1,"deep":'
    with path.open("ab") as file:
        file.write(head + nested(500).encode() + b"}}\n")
        file.write(head + nested(10**5).encode() + b"}}\n")
        file.write(head + b'"' + b"x" * (LARGEST_EVENT + 2**20) + b'"}}\n')
    emit("metric", name="b", step=1, value=1.0)
    assert Catalog(store).ingest() == 2
    assert Catalog(store).query("SELECT name FROM metrics ORDER BY 1") == [{"name": "a"}, {"name": "b"}]
    assert caplog.text.count("too long or too deep") == 3
    with pytest.raises(ValueError, match="an event 'sample' of toy has"):
        emit("sample", index=2, text="x" * (LARGEST_EVENT + 1))


def test_links_in_an_artifact_are_damage_wherever_they_lead(store, tmp_path):
    artifact = published(store, "tokens", "one", {"a.txt": "same", "deep/b.txt": "same"})
    outside = filled(tmp_path / "outside", {"a.txt": "same", "b.txt": "same"})
    (artifact.folder / "a.txt").unlink()
    (artifact.folder / "a.txt").symlink_to(outside / "a.txt")
    (artifact.folder / "deep/b.txt").unlink()
    (artifact.folder / "deep").rmdir()
    (artifact.folder / "deep").symlink_to(outside)
    assert store.verify(artifact)[-2:] == ["a.txt (reached by a link)", "deep/b.txt (reached by a link)"]


def test_an_artifact_under_another_name_is_damaged(store):
    artifact = published(store, "tokens", "one")
    artifact.folder.rename(artifact.folder.with_name(key_of("other")))
    assert store.list() == []
    assert Catalog(store).ingest() == 0


def test_a_file_name_that_readers_refuse_cannot_be_published(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be called '\.absent'"):
        describe_files(filled(tmp_path, {".absent": ""}))
