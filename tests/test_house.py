"""The rules of the house, read off the source: which room may import which, how long a file may be, who may print."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "common",
    "configs",
    "data",
    "model",
    "evals",
    "rl",
    "tasks",
    "flows",
)  # a room imports only from rooms to its left
STORE_READERS = ("tasks", "flows")
OPERATORS_ONLY = ("prefect", "duckdb", "streamlit")
LONGEST = 400


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of every import in the file, those inside functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names.add((node.module or "").split(".")[0])
    return names


def allowed(room: str) -> set[str]:
    if room == "store":
        return {"store", "common", "configs"}
    left = set(ROOMS[: ROOMS.index(room) + 1])
    return left | {"store"} if room in STORE_READERS else left


@pytest.mark.parametrize("room", [*ROOMS, "store"])
def test_a_room_imports_only_from_rooms_to_its_left(room):
    rooms = {*ROOMS, "store", "tests", "bench"}
    for path in sources(room):
        wrong = (imported(path) & rooms) - allowed(room)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("room", ["common", "configs", "data", "model", "evals", "rl"])
def test_plain_rooms_know_no_orchestrator_and_no_database(room):
    for path in sources(room):
        wrong = imported(path) & set(OPERATORS_ONLY)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_room_is_walked():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    assert packages == {*ROOMS, "store"}


def test_files_stay_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*ROOMS, "store", "tests")}
    long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LONGEST}
    assert not long, f"over {LONGEST} lines: {long}"


def test_every_file_says_what_it_is_for():
    written = [path for path in sources(*ROOMS, "store") if path.read_text(encoding="utf-8").strip()]
    bare = [str(path.relative_to(ROOT)) for path in written if not ast.get_docstring(ast.parse(path.read_bytes()))]
    assert not bare, f"no module docstring: {bare}"


def test_only_the_command_line_prints():
    for path in sources(*ROOMS, "store"):
        if path == ROOT / "flows" / "cli" / "main.py":
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        printing = [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert not printing, f"{path.relative_to(ROOT)} prints in lines {printing}"


@pytest.mark.parametrize(
    ("name", "least"), [("requirements.lock", 100), ("requirements-ahead.lock", 3), ("requirements-harness.lock", 20)]
)
def test_the_locks_name_no_address_and_pin_by_digest(name, least):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if "://" in line]
    pinned = [i for i, line in enumerate(lines) if line and line[0].isalnum()]
    assert len(pinned) > least
    assert all("==" in lines[i] and lines[i + 1].lstrip().startswith("--hash=sha256:") for i in pinned)
