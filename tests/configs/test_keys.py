"""Which fields are in keys: the list of both sets, what changing them does to keys, and local files by content."""

import json
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.keys import FILES, classified_fields, key_fields, recipe, table, with_local_files
from nautile.configs.load import load

HERE = Path(__file__).parent


def by_section(names: list[str]) -> dict[str, str]:
    """The names of the fields of each section, as fields.json has them."""
    sections: dict[str, list[str]] = {}
    for name in names:
        section, _, field = name.rpartition(".")
        sections.setdefault(section, []).append(field)
    return {section: " ".join(fields) for section, fields in sections.items()}


def test_every_field_is_classified_as_it_was():
    """A new field fails this test: decide whether it changes what a stage writes, then add it to fields.json."""
    semantic, operational = map(by_section, classified_fields())
    known = json.loads((HERE / "fields.json").read_text(encoding="utf-8"))
    assert {"semantic": semantic, "operational": operational} == known


def test_the_document_shows_the_table_that_the_code_writes():
    document = (HERE.parents[1] / "docs" / "store.md").read_text(encoding="utf-8")
    assert table() in document, "copy the output of `python -m nautile.configs.keys` into docs/store.md"


def test_operational_fields_unset_fields_and_unknown_fields_are_left_out():
    pretrain = load("nautile_370m").pretrain.model_dump(mode="json")
    section = {"seed": 3, "pretrain": {**pretrain, "a_removed_option": 7, "micro_rows": None}}
    fields = key_fields(section)["pretrain"]
    assert fields.keys() == pretrain.keys() - {
        "start", "micro_rows", "fsdp", "save_every", "keep", "log_every", "validate_every",
        "validation_rows", "sample_every",
    }  # fmt: skip
    assert fields["optimizer"] == {name: value for name, value in pretrain["optimizer"].items() if value is not None}
    assert key_fields({"distill": {"prompts": 3, "probe": None}}) == {"distill": {"prompts": 3}}


def test_inside_lists_and_tables_too():
    sets = [{"name": "a", "license": "MIT", "weight": 1.0}]
    endpoints = {"teacher": {"model": "m", "url": "http://a", "dollars_per_million_in": 0.1}}
    fields = key_fields({"distill": {"prompt_sets": sets}, "endpoints": endpoints})
    assert fields == {
        "distill": {"prompt_sets": [{"name": "a", "weight": 1.0}]},
        "endpoints": {"teacher": {"model": "m"}},
    }


def source(path: Path, reader: str = "jsonl") -> dict:
    return {"ingest": {"row_length": 64, "source": {"name": "web", "reader": reader, "path": str(path)}}}


def test_a_local_file_is_in_the_key_by_content(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "corpus.jsonl").write_text("ALPHA", encoding="utf-8")
    before = with_local_files(source(first / "*.jsonl"), tmp_path / "memory.json")
    assert before["ingest"] == source(first / "*.jsonl")["ingest"]  # what the stage reads
    assert list(before[FILES]) == [str(first / "*.jsonl")]
    moved = with_local_files(source(second / "*.jsonl"))
    assert key_fields(before) == key_fields(moved)
    (first / "corpus.jsonl").write_text("OMEGA", encoding="utf-8")
    after = with_local_files(source(first / "*.jsonl"), tmp_path / "memory.json")
    assert key_fields(after) != key_fields(before)
    (first / "more.jsonl").write_text("x", encoding="utf-8")
    assert key_fields(with_local_files(source(first / "*.jsonl"))) != key_fields(after)


@pytest.mark.parametrize(
    "section",
    [
        {"distill": {"prompt_sets": [{"name": "own", "source": "jsonl", "path": "PATH"}]}},
        {"reason": {"problems": {"source": "jsonl", "path": "PATH"}}},
        {"evaluate": {"held_out": {"source": "jsonl", "path": "PATH"}}},
        {"evaluate": {"benchmarks": [{"name": "gsm8k", "path": "PATH"}]}},
        {"held_out": {"benchmarks": [{"name": "gsm8k", "path": "PATH"}]}},
    ],
)
def test_files_of_prompts_problems_and_benchmarks(tmp_path, section):
    path = tmp_path / "rows.jsonl"
    path.write_text("a", encoding="utf-8")
    section = json.loads(json.dumps(section).replace("PATH", str(path)))
    before = key_fields(with_local_files(section))
    path.write_text("b", encoding="utf-8")
    assert key_fields(with_local_files(section)) != before


def test_a_path_at_the_hub_is_no_file_and_a_missing_file_is_refused(tmp_path):
    hub = source(Path("HuggingFaceFW/fineweb-edu"), "hub")
    assert with_local_files(hub) == hub
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        with_local_files(source(tmp_path / "gone.jsonl"))


def test_a_recipe_is_digested_whatever_an_older_version_recorded():
    damaged = {"seed": 1, "seeds": [3], "reason": "was a name", "ingest": {"sources": [{"path": ["a"]}]}, "gone": [1]}
    assert recipe(damaged) == recipe({**damaged, "seed": 2, "gone": []})
    assert len({recipe({**damaged, **other}) for other in ({}, {"reason": "another"}, {"ingest": "was a path"})}) == 3
