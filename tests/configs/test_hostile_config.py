"""Configurations that want to be read for ever, to fill the memory, or to carry a key into what is written."""

import os
import resource

import pytest

from common.errors import ConfigError
from common.files import read_bounded_json
from configs.load import load

ENDPOINT = "extends = 'local'\n[endpoints.paid]\nkind = 'openai'\nmodel = 'm'\nurl = 'https://api.example.com/v1'\n"


def sparse(path, size):
    """A file that says it is large and takes no disk."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def refused(call, *arguments):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "KiB more than before"
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 100_000, "a = " + "{ b = " * 50_000, "a." * 2_000 + "a = 1", "[" + "a." * 2_000 + "a]"]
)
def test_nesting_without_end_is_refused(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert str(path) in refused(load, path)


def test_what_is_no_small_plain_file_is_refused(tmp_path):
    assert "over" in refused(load, sparse(tmp_path / "huge.toml", 10 * 2**30))
    os.mkfifo(tmp_path / "pipe.toml")
    assert "no configuration" in refused(load, tmp_path / "pipe.toml")
    assert "no configuration" in refused(load, "/dev/zero")
    (tmp_path / "run.toml").write_text("extends = '/dev/zero'")
    assert "no configuration" in refused(load, tmp_path / "run.toml")


def test_a_chain_of_files_has_an_end(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.toml").write_text(f"extends = '{number + 1}.toml'")
    (tmp_path / "40.toml").write_text("extends = 'local'")
    assert "more than 20 files" in refused(load, tmp_path / "0.toml")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("key_variable = 'sk-ant-314159'", "is the NAME of an environment variable"),
        ("url = 'https://user:sk-314159@api.example.com/v1'", "may hold no password"),
        ("url = 'https://api.example.com/v1?api-key=sk-314159'", "may hold no password and no query"),
    ],
)
def test_a_key_has_no_way_into_a_section(tmp_path, line, said):
    path = tmp_path / "run.toml"
    kept = "\n".join(old for old in ENDPOINT.splitlines() if not old.startswith(line.split()[0] + " "))
    path.write_text(f"{kept}\n{line}\n")
    told = refused(load, path)
    assert said in told
    assert "314159" not in told, "a message goes to the log"


@pytest.mark.parametrize("content", ["[" * 10_000_000, '{"a":' * 1_000_000, "{", "\x00"])
def test_json_from_outside(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert str(path) in refused(read_bounded_json, path)
