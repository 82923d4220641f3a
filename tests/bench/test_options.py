"""Each bench reads only options that its command line has, and its helpers work without a machine to measure."""

import ast
import asyncio
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
            assert isinstance(first, ast.Constant)
            names.add(first.value.lstrip("-").replace("-", "_"))
    # Defaults that are in a dict of their own (`**defaults`).
    for entry in (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
        if ast.unparse(entry.targets[0]) in ("defaults", "paths"):
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
