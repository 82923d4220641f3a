"""Configurations that are endless, too large, or contain a secret are refused in one line, in little memory."""

import os
import resource

import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import has_long_key, parse_toml, read_bounded_json
from nautile.configs.load import load

ENDPOINT = "extends = 'local'\n[endpoints.paid]\nkind = 'openai'\nmodel = 'm'\nurl = 'https://api.example.com/v1'\n"


def sparse(path, size):
    """A sparse file: `size` bytes long, with no block on disk."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def refused(call, *arguments):
    """The message of the `ConfigError` that the call raises; it must be one line, and cost little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "200 MiB of memory"
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 100_000, "a = " + "{ b = " * 50_000, "a." * 2_000 + "a = 1", "[" + "a." * 2_000 + "a]"]
)
def test_deep_nesting_is_refused(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert str(path) in refused(load, path)


@pytest.mark.parametrize("part", ["a.", "a .\t", "'a b'.", '"a".', "1-2."])
@pytest.mark.parametrize("form", ["{}b = 1", "[{}b]", "[[{}b]]", "c = {{ {}b = 1 }}"])
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path, monkeypatch, form, part):
    """The parser takes a minute for 50,000 parts."""
    monkeypatch.setattr("tomllib.loads", lambda text: pytest.fail("it was parsed"))
    path = tmp_path / "run.toml"
    path.write_text(form.format(part * 50_000))
    assert refused(load, path) == f"{path}: a key in it has over 100 parts"


def test_a_setting_of_many_parts_is_refused():
    assert "has over 100 parts" in refused(load, "local", ["a." * 50_000 + "b=1"])
    assert "has over 100 parts" in refused(load, "local", ["seed={" + "a." * 50_000 + "b=1}"])


@pytest.mark.parametrize("text", ["a" * 4_000_000, "a-" * 2_000_000, ("a . " * 90 + "a\n") * 20_000, '"' * 4_000_000])
def test_looking_for_long_keys_takes_linear_time_on_other_texts(text):
    """A quadratic search would not end."""
    assert not has_long_key(text)
    words = "One is one. Two. " * 1000
    assert parse_toml(f'prompt = """{words}"""', "x") == {"prompt": words}


def test_a_number_too_long_to_be_read_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"extends = 'local'\nseed = {'9' * 5000}")
    assert str(path) in refused(load, path)
    assert "--set seed=999" in refused(load, "local", [f"seed={'9' * 5000}"])
    assert "--set seed=0xff" in refused(load, "local", [f"seed=0x{'f' * 5000}"])
    assert "not an index" in refused(load, "local", [f"ingest.sources.{'1' * 5000}.records=1"])


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    assert "no configuration" in refused(load, "a" * 5000)
    (tmp_path / "run.toml").write_text(f"extends = '{'a' * 5000}'")
    assert "no configuration" in refused(load, tmp_path / "run.toml")


@pytest.mark.parametrize(
    "line",
    [
        *('url = "localhost:8000/v1"', 'url = "file:///etc/passwd"', 'url = "http:///v1"', 'url = "http://h:99999/v1"'),
        *('url = "http://h/v1\\n"', "extra = { a = nan }", "extra = { a = [2020-01-01] }"),
    ],
)
def test_an_endpoint_that_no_request_can_be_sent_to_is_refused(tmp_path, line):
    """Each request to it would fail, or raise an error that nobody expects."""
    url = "" if line.startswith("url") else 'url = "http://h/v1"\n'
    (tmp_path / "run.toml").write_text(f"extends = 'local'\n[endpoints.e]\nkind = 'openai'\nmodel = 'm'\n{url}{line}")
    assert "`endpoints.e`: " in refused(load, tmp_path / "run.toml")


def test_a_file_that_is_huge_or_not_plain_is_refused(tmp_path):
    assert "over" in refused(load, sparse(tmp_path / "huge.toml", 10 * 2**30))
    os.mkfifo(tmp_path / "pipe.toml")
    assert "no configuration" in refused(load, tmp_path / "pipe.toml")
    assert "no configuration" in refused(load, "/dev/zero")
    (tmp_path / "run.toml").write_text("extends = '/dev/zero'")
    assert "no configuration" in refused(load, tmp_path / "run.toml")


def test_a_long_chain_of_extends_is_refused(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.toml").write_text(f"extends = '{number + 1}.toml'")
    (tmp_path / "40.toml").write_text("extends = 'local'")
    assert "more than 20 files" in refused(load, tmp_path / "0.toml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("key_variable = 'sk-ant-314159'", "is the NAME of an environment variable"),
        ("url = 'https://user:sk-314159@api.example.com/v1'", "may not contain a password"),
        ("url = 'https://api.example.com/v1?api-key=sk-314159'", "may not contain a password or a query"),
    ],
)
def test_a_secret_in_a_section_is_refused_and_not_repeated(tmp_path, line, message):
    path = tmp_path / "run.toml"
    others = "\n".join(old for old in ENDPOINT.splitlines() if not old.startswith(line.split()[0] + " "))
    path.write_text(f"{others}\n{line}\n")
    refusal = refused(load, path)
    assert message in refusal
    assert "314159" not in refusal, "messages are logged"


@pytest.mark.parametrize("content", ["[" * 10_000_000, '{"a":' * 1_000_000, "{", "\x00", "9" * 5000])
def test_hostile_json_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert str(path) in refused(read_bounded_json, path)
