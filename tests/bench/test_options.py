"""Each bench reads only options that its command line has, and its helpers work without a machine to measure."""

import ast
import asyncio
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
WITH_OPTIONS = sorted(path for path in BENCH.rglob("*.py") if "arguments = " in path.read_text(encoding="utf-8"))


def options_of(tree: ast.Module) -> set[str]:
    """Names of the options and positional arguments that a bench's parser has."""
    names = {"json"}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if called == "argument_parser":
            names |= {keyword.arg for keyword in call.keywords if keyword.arg}
        if called == "add_argument" and call.args:
            first = call.args[0]
            word = first.value if isinstance(first, ast.Constant) else "settle-one"  # the only name in a constant
            names.add(word.lstrip("-").replace("-", "_"))
        if called == "set_defaults":
            names |= {keyword.arg for keyword in call.keywords if keyword.arg}
    # Defaults that are in a dict of their own (`**defaults`).
    for entry in (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
        if ast.unparse(entry.targets[0]) == "defaults":
            names |= {key.value for key in entry.value.keys if isinstance(key, ast.Constant)}
    return names


@pytest.mark.parametrize("path", WITH_OPTIONS, ids=lambda path: path.stem)
def test_a_bench_reads_only_options_that_it_has(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "arguments"
    }
    assert read <= options_of(tree)


def test_every_question_of_a_round_is_asked_once(monkeypatch):
    from bench.decoding import serving

    questions = []

    class Client:
        def __init__(self, **_):
            self.models = self

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def list(self):
            return []

    async def ask(client, question, tokens):
        questions.append(question)
        await asyncio.sleep(0)
        return 0.1, 0.2, tokens

    monkeypatch.setattr(serving, "AsyncOpenAI", Client)
    monkeypatch.setattr(serving, "ask", ask)
    figures, rate = asyncio.run(serving.round_of("http://127.0.0.1:1", 2, ["a", "b", "c"], 8))
    assert sorted(questions) == ["a", "b", "c"]
    assert (figures, rate > 0) == ([(0.1, 0.2, 8)] * 3, True)


def test_without_idle_figures_the_busy_ones_stay_in_their_columns(capsys):
    from bench.operation.fleet import print_table

    print_table({"busy": {"nautile status": [1.0, 2.0]}, "idle": {}})
    head, row = capsys.readouterr().out.splitlines()
    assert row.index("1.50") + len("1.50") == head.index("busy") + len("busy")


def test_the_last_chunk_of_a_survey_counts_only_the_people_that_it_has(monkeypatch, tmp_path):
    from bench.uses import survey_job

    chunks = tmp_path / "store" / "staging" / "key" / "scratch" / "chunks"
    chunks.mkdir(parents=True)
    for number in range(2):
        (chunks / f"{number}.parquet").touch()
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(survey_job, "POLL_S", 0.0)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]  # until it is killed
    people = survey_job.CHUNK + 10
    monkeypatch.setattr(survey_job, "measure_processes", lambda pid, seconds: 0)
    part = survey_job.run_and_watch(command, tmp_path / "job.log", 1, people)
    assert (part["personas"], part["killed"], len(part["chunks"])) == (people, True, 2)
