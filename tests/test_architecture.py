"""The architecture's rules, checked on the source: layers, import cycles, declared packages, names, sizes, printing."""

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A package imports only from packages to its left. `store` stands beside them: see `allowed`.
LAYERS = ("common", "configs", "data", "model", "evals", "rl", "tasks", "flows")
PACKAGES = (*LAYERS, "store")
STORE_READERS = ("tasks", "flows")
OPERATORS_ONLY = ("prefect", "duckdb", "streamlit")
# Modules that may be imported inside a function: each loads a vendor's SDK, which takes most of a second, or an extra.
LATE = {"data.endpoints.openai_client", "data.endpoints.mistral_client", "model.exports.onnx.graph"}
LONGEST_FILE, FULLEST_FOLDER = 600, 20
# Copied into an export, where they import each other and what the project itself never does.
SHIPPED = {f"{name}_nautile.py" for name in ("cache", "configuration", "modeling")}
BANNED_NAMES = {
    *("told", "tell", "said", "found", "heard", "one", "crew", "flight", "purse", "desk", "tally", "effort"),
    *("way_on", "mend", "wishes", "seats"),
}


@cache
def sources(*packages: str) -> tuple[Path, ...]:
    return tuple(sorted(path for package in packages for path in (ROOT / package).rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in sources(*PACKAGES)}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> tuple[tuple[ast.stmt, str], ...]:
    """Every import of a file with the dotted name of its module, also inside functions and under TYPE_CHECKING."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    for node in nodes_of(path) if path.name not in SHIPPED else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node, name if name in modules() else node.module or ""


@cache
def import_graph() -> dict[str, set[str]]:
    """Module -> the project's modules that it imports, wherever in the file."""
    names = modules()
    return {
        name: {target for _, target in imports_of(path) if target in names and target != name}
        for name, path in names.items()
    }


def allowed(package: str) -> set[str]:
    if package == "store":
        return {"store", "common", "configs"}
    left = set(LAYERS[: LAYERS.index(package) + 1])
    return left | {"store"} if package in STORE_READERS else left


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_from_packages_to_its_left(package):
    packages = {*PACKAGES, "tests", "bench"}
    for path in sources(package):
        wrong = ({name.split(".")[0] for _, name in imports_of(path)} & packages) - allowed(package)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", [name for name in LAYERS if name not in STORE_READERS])
def test_plain_packages_import_no_orchestrator_and_no_database(package):
    for path in sources(package):
        wrong = {name.split(".")[0] for _, name in imports_of(path)} & set(OPERATORS_ONLY)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_package_is_checked():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    assert packages == set(PACKAGES)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every module that can be reached from `start` by one or more imports."""
    seen: set[str] = set()
    open_ends = list(graph[start])
    while open_ends:
        module = open_ends.pop()
        if module not in seen:
            seen.add(module)
            open_ends += graph[module]
    return seen


def test_there_are_no_import_cycles():
    graph = import_graph()
    cyclic = sorted(name for name in graph if name in reachable(graph, name))
    assert not cyclic, f"in a cycle: {cyclic}"


def test_only_jax_sdks_and_commands_are_imported_late():
    """Inside a function: what loads JAX or a vendor's SDK, and what a command of the CLI loads for itself.

    So `nautile --help` and the pipeline's own process start quickly.
    """
    graph = import_graph()
    loads_jax = {name for name, path in modules().items() if any(t.split(".")[0] == "jax" for _, t in imports_of(path))}
    late: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if name.startswith("flows.cli."):
            continue
        top = set(map(id, tree_of(path).body))
        for node, target in imports_of(path):
            if id(node) in top or target not in graph:
                continue
            heavy = {target, *reachable(graph, target)} & loads_jax
            if not heavy and target not in LATE:
                late[name].append(target)
    assert not late, dict(late)


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = (re.match(r"[\w.-]+", line) for line in [*project["dependencies"], *extras])
    declared = {canonical(name[0]) for name in names if name}
    distributions = packages_distributions()
    for path in sources(*PACKAGES):
        for node, name in imports_of(path):
            package = name.split(".")[0]
            if package in PACKAGES or package in sys.stdlib_module_names:
                continue
            providers = {canonical(provider) for provider in distributions.get(package, [package])}
            assert providers & declared, f"{path.relative_to(ROOT)}:{node.lineno}: {package} is not in pyproject.toml"


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert not shared, shared


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """What a file calls its variables, parameters, functions and classes."""
    for node in nodes_of(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_names_are_engineers_words():
    for path in sources(*PACKAGES, "tests", "bench"):
        wrong = [(line, name) for line, name in names_in(path) if name.strip("_").lower() in BANNED_NAMES]
        assert not wrong, f"{path.relative_to(ROOT)}: {wrong[:5]}; name the thing (docs/architecture.md has a glossary)"


def test_files_and_folders_stay_readable():
    files = sources(*PACKAGES, "tests", "bench")
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    long = {name: count for name, count in lengths.items() if count > LONGEST_FILE}
    assert not long, f"over {LONGEST_FILE} lines: {long}"
    folders = Counter(path.parent for path in files if path.name != "__init__.py")
    full = {str(path.relative_to(ROOT)): count for path, count in folders.items() if count > FULLEST_FOLDER}
    assert not full, f"over {FULLEST_FOLDER} files: {full}"


def short_helpers(path: Path, longest: int = 3) -> Iterator[str]:
    """The private functions of a file with so few lines besides the docstring and a single use, which is a call.

    A generator, and a function that returns early, could not stand in their caller as they are.
    """
    nodes = nodes_of(path)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    uses: dict[str, list[ast.Name]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Name):
            uses[node.id].append(node)
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_"):
            body = node.body[ast.get_docstring(node) is not None :]
            leaves = [inner for inner in ast.walk(node) if isinstance(inner, ast.Return | ast.Yield)]
            plain = len(leaves) < 2 and not any(isinstance(leaf, ast.Yield) for leaf in leaves)
            short = plain and node.end_lineno - body[0].lineno < longest
            if short and not node.decorator_list and [id(use) in called for use in uses[node.name]] == [True]:
                yield node.name


def test_a_few_lines_with_one_caller_stand_in_the_caller():
    """Unless the function is a value there: a callback, a key function, a thread's target, the body of a loop."""
    short = {str(path.relative_to(ROOT)): names for path in sources(*PACKAGES) if (names := list(short_helpers(path)))}
    assert not short, f"private, one caller, at most three lines: {short}"


def test_every_file_has_a_docstring():
    written = [path for path in sources(*PACKAGES) if path.read_text(encoding="utf-8").strip()]
    bare = [str(path.relative_to(ROOT)) for path in written if not ast.get_docstring(tree_of(path))]
    assert not bare, f"no module docstring: {bare}"


def test_only_the_command_line_prints():
    for path in sources(*PACKAGES):
        if path == ROOT / "flows" / "cli" / "main.py":
            continue
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        lines = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert not lines, f"{path.relative_to(ROOT)} prints in lines {lines}"


def test_every_python_module_is_started_by_one_helper():
    """`module_command`, with which a child imports nothing from its working directory."""
    for path in sources(*PACKAGES):
        attributes = [node for node in nodes_of(path) if isinstance(node, ast.Attribute)]
        lines = [node.lineno for node in attributes if ast.unparse(node) == "sys.executable"]
        known = path == ROOT / "common" / "processes.py"
        assert not lines or known, f"{path.relative_to(ROOT)} names the interpreter in lines {lines}"


def test_the_longest_test_files_are_named_right():
    names = (ROOT / "tests" / "support" / "longest_first.txt").read_text(encoding="utf-8").split()
    assert not [name for name in names if not (ROOT / name).is_file()]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("requirements.lock", 100),
        ("requirements-ahead.lock", 3),
        ("requirements-harness.lock", 20),
        ("requirements-trackers.lock", 2),
        ("requirements-installer.lock", 1),
        ("requirements-audit.lock", 10),
    ],
)
def test_the_locks_name_no_address_and_pin_by_digest(name, least):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if "://" in line]
    pinned = [i for i, line in enumerate(lines) if line and line[0].isalnum()]
    assert len(pinned) > least
    assert all("==" in lines[i] and lines[i + 1].lstrip().startswith("--hash=sha256:") for i in pinned)
