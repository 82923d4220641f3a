"""The architecture's rules, checked on the source: layers, import cycles, declared packages, printing."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from nautile.common import extras
from nautile.common.extras import WITHOUT_DEPENDENCIES, packages_by_extra

ROOT = Path(__file__).resolve().parents[1]
# A package imports only from packages to its left. `store` stands beside them: see `allowed`.
LAYERS = ("common", "configs", "data", "model", "evals", "rl", "tasks", "flows", "uses")
PACKAGES = (*LAYERS, "store")
STORE_READERS = ("tasks", "flows", "uses")
OPERATORS_ONLY = ("prefect", "duckdb", "streamlit")
# Private names of Prefect that are used, each with its reason.
PRIVATE_NAMES_OF_PREFECT = {
    # Its watch for cancelled runs. No public method of a runner ends one run, and the subscription that the watch lives
    # on misses what happens while the server restarts (tests/flows/operate/test_serving.py).
    ("flows/operate/deployments.py", "_cancelling_observer"),
}
# Modules that may be imported inside a function: the first two load an extra, the third Prefect, which reads its
# settings at import, the last two all graders and all sections, for which a list of runs should not wait.
LATE = {
    "nautile.model.exports.onnx.graph", "nautile.model.runtimes.onnx_runtime", "nautile.flows.operate.automations",
    "nautile.evals.benchmarks.catalogue", "nautile.configs.keys",
}  # fmt: skip
# The modules that an extra is for. The core's are those of `nautile chat`, `params`, `export` and `import`.
MODULES_OF_EXTRAS = {
    "": (
        "nautile.common.processes", "nautile.flows.cli.main", "nautile.flows.cli.chat", "nautile.flows.cli.tables",
        "nautile.flows.named", "nautile.flows.render", "nautile.model.decoding", "nautile.model.exports.formats",
        "nautile.model.runtimes.load", "nautile.model.weights", "nautile.store.artifacts", "nautile.store.mirror",
    ),
    "serve": ("nautile.flows.serve", "nautile.flows.cli.serve"),
    "edge": ("nautile.model.runtimes.onnx_runtime", "nautile.model.exports.onnx"),
    "uses": ("nautile.uses",),
    "pipeline": (),
}  # fmt: skip
# Copied into an export, where they import each other and what the project itself never does.
SHIPPED = {f"{name}_nautile.py" for name in ("configuration", "modeling", "tokenization")}

LAYOUT = ROOT / "store" / "layout.py"
JOINING = ("joinpath", "with_name", "glob", "rglob")
# The same names in folders that are no store's.
OTHER_FOLDERS = {
    ("bench/corpus/endpoints.py", "replies"),
    ("bench/training/pretraining.py", "checkpoints"),
    ("tasks/engine/remote_child.py", "items"),
    ("tasks/engine/job.py", "replies"),
    ("tasks/engine/telemetry.py", "events"),
}


@cache
def sources(*packages: str) -> tuple[Path, ...]:
    return tuple(sorted(path for package in packages for path in (ROOT / package).rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    return ".".join(("nautile", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def package_of(name: str) -> str:
    """`data` of `nautile.data.shuffle`, `numpy` of `numpy.random`."""
    return name.removeprefix("nautile.").partition(".")[0]


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
        wrong = ({package_of(name) for _, name in imports_of(path)} & packages) - allowed(package)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", [name for name in LAYERS if name not in STORE_READERS])
def test_plain_packages_import_no_orchestrator_and_no_database(package):
    for path in sources(package):
        wrong = {name.split(".")[0] for _, name in imports_of(path)} & set(OPERATORS_ONLY)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_package_is_checked():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    assert packages | {"uses"} == set(PACKAGES)  # the one that may be left out


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


def test_only_the_command_line_imports_the_command_line():
    """And commands of the uses, which take their arguments and print as the others do: by `flows.cli.terminal`."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in sources("flows", "uses")
        if not path.is_relative_to(ROOT / "flows" / "cli")
        for node, name in imports_of(path)
        if name.startswith("nautile.flows.cli")
        and (package_of(module_of(path)) != "uses" or name != "nautile.flows.cli.terminal")
    ]
    assert not found, f"move what they share out of `flows.cli`: {found}"


def test_the_engine_reaches_no_stage_no_evaluation_and_no_reader_of_data():
    graph = import_graph()
    engine = {name for name in graph if name.startswith("nautile.tasks.engine")}
    reached = set().union(*(reachable(graph, name) for name in engine)) - engine
    known = {"nautile.data.endpoints.reply_source", "nautile.model.compile_cache", "nautile.model.processes"}
    known |= {"nautile.model.capacity.topology"}  # the table of chips, with their prices
    wrong = {name for name in reached if package_of(name) not in ("common", "configs", "store")} - known
    assert not wrong, sorted(wrong)


def test_only_jax_sdks_and_commands_are_imported_late():
    """Inside a function: what loads JAX or a vendor's SDK, and what a command of the CLI loads for itself.

    So `nautile --help` and the pipeline's own process start quickly.
    """
    graph = import_graph()
    loads_jax = {name for name, path in modules().items() if any(t.split(".")[0] == "jax" for _, t in imports_of(path))}
    late: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if name.startswith("nautile.flows.cli.") or name.endswith(".command"):
            continue
        at_once = set(map(id, tree_of(path).body))
        for block in tree_of(path).body:  # what only a type checker imports is not imported late
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                at_once.update(map(id, block.body))
        for node, target in imports_of(path):
            if id(node) in at_once or target not in graph:
                continue
            heavy = {target, *reachable(graph, target)} & loads_jax
            if not heavy and target not in LATE:
                late[name].append(target)
    assert not late, dict(late)


def own_names(path: Path) -> set[str]:
    """The names that a file defines or assigns, also as attributes of `self`."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def private_names_of_prefect(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of each underscore module, attribute and text of `getattr` that can only be Prefect's."""
    for node, name in imports_of(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        parts = [*name.split("."), *names]
        if parts[0] == "prefect":
            yield from ((node.lineno, part) for part in parts if part.startswith("_"))
    if not any(name.split(".")[0] == "prefect" for _, name in imports_of(path)):
        return
    own = own_names(path)
    for node in nodes_of(path):
        found = ""
        if isinstance(node, ast.Attribute):
            found = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            found = str(getattr(node.args[1], "value", ""))
        if re.match(r"_(?!_)", found) and found not in own:
            yield node.lineno, found


def test_no_private_name_of_prefect_is_used():
    """Another version of Prefect may lack it without a word. What has no public form is listed with its reason."""
    found = {
        (path.relative_to(ROOT).as_posix(), name): line
        for path in sources(*STORE_READERS, "bench")
        for line, name in private_names_of_prefect(path)
    }
    wrong = [f"{path}:{line}: {name}" for (path, name), line in found.items()]
    assert set(found) == PRIVATE_NAMES_OF_PREFECT, f"public forms instead, or a reason: {wrong}"


def is_foreign(name: str) -> bool:
    return name.split(".")[0] not in {"nautile", *sys.stdlib_module_names}


def test_every_package_that_is_imported_is_declared():
    declared = set(WITHOUT_DEPENDENCIES).union(*packages_by_extra().values())
    distributions = packages_distributions()
    for path in sources(*PACKAGES):
        for node, name in imports_of(path):
            if is_foreign(name):
                package, where = extras.package_of(name), f"{path.relative_to(ROOT)}:{node.lineno}"
                assert package in declared, f"{where}: {package} is not in pyproject.toml"
                # The name is right. A namespace has several packages, one that is not installed has none.
                providers = distributions.get(name.split(".")[0], [package])
                assert package in map(extras.canonical, providers), f"{where}: {name} is in {providers}"


@pytest.mark.parametrize("extra", MODULES_OF_EXTRAS)
def test_modules_are_loaded_with_the_core_s_packages_and_those_of_their_extra(extra):
    """By the imports at the top of each file. What no other extra is for is the pipeline's."""

    def own(*prefixes: str) -> set[str]:
        return {name for name in modules() if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)}

    others = set().union(*(own(*prefixes) for prefixes in MODULES_OF_EXTRAS.values()))
    loaded = own(*MODULES_OF_EXTRAS[extra]) or set(modules()) - others
    at_the_top = {
        name: {target for node, target in imports_of(path) if node in tree_of(path).body}
        for name, path in modules().items()
    }
    graph = {name: targets & set(modules()) for name, targets in at_the_top.items()}
    loaded = loaded.union(*(reachable(graph, name) for name in loaded))
    imported = {(name, extras.package_of(to)) for name in loaded for to in at_the_top[name] if is_foreign(to)}
    packages = packages_by_extra()
    allowed_packages = packages[""] | packages.get(extra, set())
    if extra == "":  # they take seconds to import; flax itself imports optax
        allowed_packages -= {"optax", "orbax-checkpoint"}
    wrong = sorted((name, package) for name, package in imported if package not in allowed_packages)
    assert not wrong, wrong


def test_packages_without_their_requirements_are_pinned_as_in_the_locks():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    assert groups["stand-ins"] == [f"{name}=={version}" for name, version in WITHOUT_DEPENDENCIES.items()]


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert not shared, shared


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


def names_of_the_layout() -> set[str]:
    """The names of folders and files that `store/layout.py` spells."""
    texts = {node.value for node in nodes_of(LAYOUT) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if re.fullmatch(r"[a-z_]+(\.[a-z]+)?", text)}


def joined_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of each literal that a file joins to a path: `folder / "name"`, `folder.glob("name/*")`."""
    for node in nodes_of(path):
        joined: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            joined = [node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in JOINING:
            joined = node.args
        for part in joined:
            first = part.values[0] if isinstance(part, ast.JoinedStr) and part.values else part
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield from ((node.lineno, name) for name in first.value.split("/"))


def test_only_the_layout_names_folders_and_files_of_the_store():
    names = names_of_the_layout()
    assert {"artifacts", "staging", "events", "done.json", "fan_outs", "scratch"} <= names
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources("store", *STORE_READERS, "bench")
        if path != LAYOUT
        for line, name in joined_names(path)
        if name in names and (path.relative_to(ROOT).as_posix(), name) not in OTHER_FOLDERS
    ]
    assert not found, f"ask `store.layout` for these paths: {found}"


def test_the_longest_test_files_are_named_right():
    names = (ROOT / "tests" / "support" / "longest_first.txt").read_text(encoding="utf-8").split()
    assert not [name for name in names if not (ROOT / name).is_file() and (ROOT / "uses").is_dir()]


def pins(name: str) -> set[str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {line.removesuffix("\\").strip() for line in lines if line and line[0].isalnum()}


def test_production_has_the_versions_of_development_without_its_tools():
    development, production = pins("dev.lock"), pins("production.lock")
    assert production < development
    left_out = {pin.partition("==")[0] for pin in development - production}
    assert {"pytest", "playwright", "moto", "mypy", "ruff", "hypothesis", "schemathesis"} <= left_out


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("dev.lock", 100),
        ("production.lock", 100),
        ("ahead.lock", 3),
        ("harness.lock", 20),
        ("trackers.lock", 2),
        ("installer.lock", 1),
        ("audit.lock", 10),
    ],
)
def test_the_locks_name_no_address_and_pin_by_digest(name, least):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if "://" in line]
    pinned = [i for i, line in enumerate(lines) if line and line[0].isalnum()]
    assert len(pinned) > least
    assert all("==" in lines[i] and lines[i + 1].lstrip().startswith("--hash=sha256:") for i in pinned)
