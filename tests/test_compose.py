"""compose.yaml and the Dockerfile: what they promise, their commands, and (heavy) both carried out without a daemon.

The services run as processes with their environment, commands and health checks, beside a real PostgreSQL; the image's
steps run in a scratch folder, all but those that need root.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import click
import jsonschema
import pytest
import typer
import yaml

from nautile.common.processes import free_port
from nautile.flows.cli.main import app
from tests.support.servers.postgres import DATABASE, PASSWORD, binary, postgres
from tests.support.servers.prefect_calls import LOGINS, fetch
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
OURS = ("server", "worker", "dashboard")
SECRET = re.compile(r"PASSWORD|AUTH_STRING|_KEY|TOKEN")

STRING, STRINGS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
# The fields of the Compose specification that are used, each with the form that is used.
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "restart", "environment", "secrets", "volumes", "healthcheck"],
    "properties": {
        "image": STRING,
        "build": STRING,
        "command": STRINGS,
        "init": {"type": "boolean"},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "cap_drop": STRINGS,
        "security_opt": STRINGS,
        "environment": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "secrets": STRINGS,
        "volumes": STRINGS,
        "ports": STRINGS,
        "stop_grace_period": {"type": "string", "pattern": r"^(\d+[hms])+$"},
        "depends_on": {
            "type": "object",
            "additionalProperties": {"type": "object", "properties": {"condition": {"const": "service_healthy"}}},
        },
        "healthcheck": {
            "type": "object",
            "required": ["test", "interval", "timeout", "retries"],
            "properties": {"test": {"type": "array", "items": STRING, "minItems": 2}, "retries": {"type": "integer"}},
        },
    },
}
COMPOSE = {
    "type": "object",
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
        "secrets": {
            "type": "object",
            "additionalProperties": {"type": "object", "required": ["file"], "properties": {"file": STRING}},
        },
    },
}


def parsed(text: str = TEXT) -> dict:
    """The file with the default of each variable that it takes from the environment."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def test_the_file_has_the_specifications_form_and_everything_it_names():
    compose = parsed()
    jsonschema.validate(compose, COMPOSE)
    for name, service in compose["services"].items():
        assert set(service["secrets"]) <= compose["secrets"].keys()
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= compose["volumes"].keys()
        assert set(service.get("depends_on", ())) <= compose["services"].keys() - {name}
        assert service["restart"] == "unless-stopped"


def test_only_the_pages_are_published_on_loopback_alone():
    ports = {name: service["ports"] for name, service in parsed()["services"].items() if "ports" in service}
    assert ports == {"server": ["127.0.0.1:4200:4200"], "dashboard": ["127.0.0.1:8501:8501"]}


def test_secrets_come_from_files_or_from_names_and_the_database_s_reaches_its_clients_alone():
    compose = parsed()
    for name, service in compose["services"].items():
        for variable, value in service["environment"].items():
            if SECRET.search(variable):
                mounted = [f"/run/secrets/{secret}" for secret in service["secrets"]]
                assert value is None or (variable.endswith("_FILE") and value in mounted), (name, variable)
    having = {name for name, service in compose["services"].items() if "database_password" in service["secrets"]}
    assert having == {"database", "server"}


@pytest.mark.parametrize("name", OURS)
def test_each_command_is_one_of_the_command_line(name):
    command, *arguments = parsed()["services"][name]["command"]
    group = typer.main.get_command(app)
    parser = group.get_command(click.Context(group), command)
    assert parser
    parser.make_context(command, list(arguments))  # parses, and refuses what it does not know


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def test_the_image_is_slim_its_packages_are_pinned_by_digest_and_its_user_is_not_root():
    steps = instructions()
    names = [name for name, _ in steps]
    assert re.fullmatch(r"python:3\.1[123]-slim", dict(steps)["FROM"])
    for text in (text for name, text in steps if name == "RUN" and "pip install" in text):
        assert "--require-hashes" in text or "--no-build-isolation --editable ." in text
        assert "--no-cache" in text
    assert dict(steps)["USER"] == "nautile"
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    assert json.loads(dict(steps)["ENTRYPOINT"]) == ["nautile"]
    assert not [text for name, text in steps if name in ("ADD", "ARG") or SECRET.search(text)]


def copied(sources: list[str]) -> set[Path]:
    """The files of a COPY, as .dockerignore lets them through."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    assert "**/__pycache__" in lines
    if sources != ["."]:
        assert set(sources) <= kept
        return {ROOT / source for source in sources}
    paths = [path for name in kept for path in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])]
    return {path for path in paths if (path.is_symlink() or path.is_file()) and "__pycache__" not in path.parts}


def test_the_image_has_all_code_and_no_tests_history_or_secrets():
    files = {str(path.relative_to(ROOT)) for path in copied(["."])}
    for link in (path for path in (ROOT / "src" / "nautile").iterdir() if path.is_symlink()):
        assert {f"src/nautile/{link.name}", f"{link.name}/__init__.py"} <= files
    assert {"prefect.yaml", "configs/local.toml", "flows/operate/logging.yml", "requirements/production.lock"} <= files
    assert not [name for name in files if fnmatch(name, "tests/*") or name.startswith((".git", "secrets"))]


@pytest.mark.heavy
@pytest.mark.timeout(1800)  # it fetches and compiles all packages
def test_the_steps_of_the_image_leave_a_working_command_line(tmp_path):
    """All RUN steps but the two that need root (packages of Debian's, the user)."""
    image, ran = tmp_path / "opt" / "nautile", []
    image.mkdir(parents=True)
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{image}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
    for name, text in instructions():
        if name == "COPY":
            *sources, target = text.split()
            assert target == "requirements/" or text == ". ."
            for path in copied(sources):
                (image / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, image / path.relative_to(ROOT), follow_symlinks=False)
        elif name == "RUN" and not text.startswith(("apt-get", "useradd")):
            ran.append(text)
            done = subprocess.run(
                ["sh", "-c", text], cwd=image, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, text + done.stdout + done.stderr
    assert len(ran) == 5
    done = subprocess.run(
        [image / ".venv" / "bin" / "nautile", "plan", "--help"],
        cwd="/",
        env=environment,
        capture_output=True,
        check=True,
    )
    assert b"Usage: nautile plan" in done.stdout


def test_the_servers_health_is_that_of_its_database_too():
    """Prefect's /health answers as long as the process lives."""
    check = parsed(TEXT)["services"]["server"]["healthcheck"]["test"]
    assert "/api/ready" in check[-1]


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """The services as processes, each as its container would run it: service -> process, the API, the login."""
    folder = tmp_path_factory.mktemp("compose")
    ports = {number: str(free_port()) for number in ("4200", "8501", "8080")}
    secrets = {"login": "nautile:planted-2236067977499789", "database_password": PASSWORD}
    (folder / "secrets").mkdir()
    for name, value in secrets.items():
        (folder / "secrets" / name).write_text(f"{value}\n", encoding="utf-8")
    config = folder / "asks.toml"
    config.write_text(f'extends = "{TOY}"\n[operation.held_out]\napprove = true\n', encoding="utf-8")
    text = TEXT.replace("${NAUTILE_CONFIG:-local}", str(config)).replace("/run/secrets", str(folder / "secrets"))
    for number, port in ports.items():
        text = text.replace(number, port)
    compose = parsed(text.replace(f"http://server:{ports['4200']}", f"http://127.0.0.1:{ports['4200']}"))
    own = {name: value for name, value in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
    own |= {"NAUTILE_STORE": str(folder / "store"), "PYTHONPATH": str(ROOT), **TOY_DAG}
    extra = {  # what a container has by itself
        "server": {"PREFECT_SERVER_API_PORT": ports["4200"]},
        "worker": {"PREFECT_RUNNER_SERVER_PORT": ports["8080"]},
        "dashboard": {},
    }
    port_option = {"server": ["--port", ports["4200"]], "worker": [], "dashboard": ["--port", ports["8501"]]}
    started, healthy = {}, set()
    with postgres() as settings:
        extra["server"] |= {name: settings[name] for name in settings if name.endswith(("_HOST", "_PORT", "_NAME"))}
        try:
            for name in OURS:
                service = compose["services"][name]
                assert set(service["depends_on"]) <= healthy | {"database"}
                given = {key: value for key, value in service["environment"].items() if value is not None}
                command = [sys.executable, "-m", "nautile.flows.cli.main", *service["command"], *port_option[name]]
                with (folder / f"{name}.log").open("wb") as log:
                    started[name] = subprocess.Popen(
                        command, env=own | given | extra[name], stdout=log, stderr=log, start_new_session=True
                    )
                _, program, *arguments = service["healthcheck"]["test"]
                assert program == "python"
                check = [sys.executable, *arguments]
                until(
                    lambda check=check: not subprocess.run(check, capture_output=True, check=False).returncode, started
                )
                healthy.add(name)
            yield started, f"http://127.0.0.1:{ports['4200']}/api", secrets, folder
        finally:
            for process in started.values():
                process.terminate()
            for process in started.values():
                process.wait(60)


def until(condition, processes):
    deadline = time.monotonic() + 240
    while not (value := condition()):
        assert time.monotonic() < deadline
        assert [process.poll() for process in processes.values()] == [None] * len(processes)
        time.sleep(0.5)
    return value


@pytest.mark.heavy
@pytest.mark.skipif(binary("initdb") is None, reason="no PostgreSQL here: its program initdb is not installed")
def test_the_services_work_together_with_the_login(services, monkeypatch):
    started, api, secrets, folder = services
    with pytest.raises(Exception, match="401"):
        fetch(f"{api}/deployments/filter", {})
    monkeypatch.setitem(LOGINS, api, secrets["login"])
    until(lambda: len(fetch(f"{api}/deployments/filter", {})) >= 13, started)
    entry = fetch(f"{api}/deployments/name/pipeline/held_out-toy")
    run = fetch(f"{api}/deployments/{entry['id']}/create_flow_run", {})["id"]
    until(lambda: fetch(f"{api}/flow_runs/{run}")["state"]["type"] == "PAUSED", started)
    # As `docker compose exec worker nautile approve` does, in the worker's environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_API_URL": api, "NAUTILE_STORE": str(folder / "store"), "PYTHONPATH": str(ROOT)}
    environment |= {"PREFECT_API_AUTH_STRING_FILE": str(folder / "secrets" / "login")}
    approve = shlex.split(f"{sys.executable} -m nautile.flows.cli.main approve {run[:8]}")
    done = subprocess.run(approve, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ended = until(
        lambda: (
            (state := fetch(f"{api}/flow_runs/{run}")["state"]["type"])
            not in ("PAUSED", "SCHEDULED", "PENDING", "RUNNING")
            and state
        ),
        started,
    )
    assert ended == "COMPLETED"
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != "secrets"]
    assert not [secret for secret in secrets.values() if any(secret.encode() in content for content in written)]
    for name in ("worker", "dashboard"):
        environ = Path(f"/proc/{started[name].pid}/environ").read_bytes()
        assert PASSWORD.encode() not in environ
        assert DATABASE.encode() not in environ
