"""Secrets that the environment names by a file, and the server that will not listen to others without one."""

import os

import pytest

from nautile.common.errors import ConfigError
from nautile.flows.cli.main import read_secret_files


@pytest.fixture
def file(tmp_path, monkeypatch):
    """`file(NAME, text)`: a file of that content, which the variable NAME_FILE names."""

    def make(name: str, text: str):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
        monkeypatch.setenv(f"{name}_FILE", str(path))
        return path

    return make


@pytest.mark.parametrize("name", ["PREFECT_API_AUTH_STRING", "PREFECT_SERVER_DATABASE_PASSWORD", "TEACHER_API_KEY"])
def test_the_content_takes_the_place_of_the_path(file, name):
    file(name, "nautile:s3cret\n")
    read_secret_files()
    assert os.environ[name] == "nautile:s3cret"
    assert f"{name}_FILE" not in os.environ  # for child processes: both would be refused


def test_variables_of_other_programs_are_left_alone(file):
    file("AWS_WEB_IDENTITY_TOKEN", "token")
    file("PREFECT_API_SSL_CERT", "certificate")
    read_secret_files()
    assert not {"AWS_WEB_IDENTITY_TOKEN", "PREFECT_API_SSL_CERT"} & os.environ.keys()


def test_an_unreadable_or_empty_file_and_a_second_value_are_refused(file, monkeypatch, command_line):
    path = file("PREFECT_API_AUTH_STRING", " \n")
    with pytest.raises(ConfigError, match=r"PREFECT_API_AUTH_STRING_FILE: .* is empty"):
        read_secret_files()
    path.write_text("nautile:s3cret\nnautile:other")
    with pytest.raises(ConfigError, match=r"PREFECT_API_AUTH_STRING_FILE: .* is not one line of text") as error:
        read_secret_files()
    assert "s3cret" not in str(error.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"PREFECT_API_AUTH_STRING_FILE: .* is a FIFO"):
        read_secret_files()
    path.unlink()
    with pytest.raises(ConfigError, match="No such file or directory"):
        read_secret_files()
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "a:b")
    code, _, err = command_line("approve")
    assert code == 2
    assert "PREFECT_API_AUTH_STRING and PREFECT_API_AUTH_STRING_FILE are both set" in err


def test_a_server_for_others_needs_a_login(command_line, tmp_path, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    code, _, err = command_line("server", "--host", "0.0.0.0")
    assert code == 2
    assert "--host 0.0.0.0: anyone who can reach the server can start runs" in err
    assert "PREFECT_API_AUTH_STRING" in err
