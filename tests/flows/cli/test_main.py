"""The command line without a run: bad input, fast start-up, and the read commands as text and JSON."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.registry import _registry
from pydantic import TypeAdapter
from typer.main import get_command
from typer.testing import CliRunner

from nautile.common.processes import free_port
from nautile.flows.cli import main as cli
from nautile.flows.cli.document import OUTPUTS
from nautile.flows.uses import COMMANDS
from nautile.store.artifacts import Store
from tests.support.samples.stage_store import flip_byte
from tests.support.stages.toy_cli import ROOT, environment
from tests.support.stages.toy_stages import TOY

pytestmark = pytest.mark.usefixtures("toy_stages")


@pytest.fixture
def nautile(made, monkeypatch, command_line):
    """Run a command in the toy chain's store; returns exit code, standard output, standard error."""

    def call(*arguments: str, store=made[0].root):
        monkeypatch.setenv("NAUTILE_STORE", str(store))
        monkeypatch.setenv("COLUMNS", "200")
        return command_line(*arguments)

    return call


# What no reading command needs, each a tenth of a second or more of its start.
HEAVY = {
    "jax", "prefect", "numpy", "scipy", "pandas", "matplotlib", "httpx", "asyncio", "fsspec", "regex", "tiktoken",
    "nautile.configs.schema", "nautile.evals.benchmarks.catalogue", "nautile.flows.dag", "nautile.tasks.engine.stage",
}  # fmt: skip


def loaded_by(store, tmp_path, *commands):
    """The modules that commands import, all of which must succeed."""
    program = (
        "import sys; from nautile.flows.cli import main as cli\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['nautile', *words]\n"
        "    try: cli.main()\n    except SystemExit as e: assert not e.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    variables = environment(tmp_path) | {"NAUTILE_STORE": str(store)}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_nothing_heavy(tmp_path):
    loaded = loaded_by(tmp_path, tmp_path, ["--help"])
    heavy = HEAVY | {"duckdb", "pydantic", "nautile.store", "nautile.tasks"}
    assert "typer" in loaded
    assert not heavy & loaded


@pytest.mark.slow
def test_reading_commands_import_no_stage_no_grader_and_no_arrays(made, tmp_path):
    store, artifacts = made
    newest = next(iter(artifacts["reason"].values()))
    commands = (["runs"], ["status"], ["artifacts"], ["lineage", newest], ["sql", "FROM runs"])
    commands += (["compare", "align", "reason"],)
    loaded = loaded_by(store.root, tmp_path, *commands)
    assert "nautile.store.artifacts" in loaded
    assert not (found := (HEAVY | {"attr"}) & loaded), found
    # By arithmetic alone: the model itself is of JAX, which takes a second.
    assert not (HEAVY - {"nautile.configs.schema"}) & loaded_by(store.root, tmp_path, ["show", newest], ["params"])
    # Its tests are of numpy and over the benchmarks of the catalogue; it asks no questions.
    loaded = loaded_by(store.root, tmp_path, ["compare", *list(artifacts["evaluate:align"].values()) * 2])
    assert not {"jax", "prefect", "scipy", "pandas", "nautile.evals.running.answerers", "httpx"} & loaded


def described(command, path=()):
    """The path of each command, and the texts that describe it and its parameters."""
    yield path, [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    for name, below in getattr(command, "commands", {}).items():
        yield from described(below, (*path, name))


def test_every_command_has_help_and_nothing_of_it_is_lost():
    """The names of tables, such as [launch], were: brackets are markup to what draws the help."""
    checked = 0
    for path, texts in described(get_command(cli.app)):
        shown = CliRunner().invoke(cli.app, [*path, "--help"], env={"COLUMNS": "500"}).output
        assert "Usage" in shown
        for text in texts:
            assert re.sub(r"[`\s]", "", text) in re.sub(r"[`\s│]", "", shown), path
        checked += any("[" in text for text in texts)
    assert checked > 2


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("nautile re", ["rehearse", "report", "rescore", "retry", "reconcile"]),
        ("nautile run --only re", ["reason", "report"]),
        ("nautile run nautile_3", ["nautile_370m"]),
        ("nautile store ver", ["verify"]),
    ],
)
def test_the_shell_completes_commands_stages_and_configurations(words, offered):
    last = len(words.split()) - 1
    environment = {"_NAUTILE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(last)}
    done = CliRunner().invoke(cli.app, [], prog_name="nautile", env=environment)
    assert done.output.split() == offered


def test_help_groups_the_commands_in_the_order_of_their_use():
    lines = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "100"}).output.splitlines()
    words = [line.strip("╭│╰─ ").partition(" ")[0] for line in lines]
    panels = [word for word in words if word in cli.PANELS]
    assert panels == ["Run", "Look", "Model", *(["Use"] if COMMANDS else []), "Operate"]
    listed = [word for word in words if any(word in commands for commands in cli.PANELS.values())]
    assert listed == [name for commands in cli.PANELS.values() for name in commands]


def test_a_dashboard_for_other_machines_says_that_it_has_no_login(monkeypatch):
    monkeypatch.setattr("nautile.flows.dashboard.command.serve", lambda _command: None)
    port = str(free_port())
    messages = {
        host: CliRunner().invoke(cli.app, ["dashboard", "--host", host, "--port", port]).stderr
        for host in ("127.0.0.1", "0.0.0.0")
    }
    assert "anyone who can reach 0.0.0.0 can read the store" in messages["0.0.0.0"]
    assert f"http://127.0.0.1:{port}" in messages["127.0.0.1"]
    assert "login" not in messages["127.0.0.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere"], "no configuration 'nowhere'"),
        (["run", str(TOY), "--only", "dream"], "--only: no stage 'dream'; there are held_out, ingest, index"),
        (["run", str(TOY), "--only", "reason", "--from", "align"], "--only cannot be combined with"),
        (["run", "--bogus"], "No such option"),
        (["show", "checkpoint/fff"], "no artifact 'checkpoint/fff'"),
        (["lineage", "nothing"], "no artifact 'nothing'"),
        (["compare", "nothing", "nothing"], "no artifact 'nothing'"),
        (["artifacts", "dreams"], "no artifacts of kind 'dreams'"),
        (["artifacts", "chekpoint"], "kind 'chekpoint' (did you mean 'checkpoint'?); there are"),
        (["run", "locla"], "no configuration 'locla' (did you mean 'local'?): not a file"),
        (["run", str(TOY), "--only", "resaon"], "no stage 'resaon' (did you mean 'reason'?); there are"),
        (["status", str(TOY), "--set", "pretrain.optimizer.warmup_stepz=3"], "(did you mean 'warmup_steps'?)"),
        (["status", str(TOY), "--set", "ingest.sources.0.recrods=3"], "(did you mean 'records'?)"),
        (["status", str(TOY), "--set", "endpoints.local.concurency=3"], "(did you mean 'concurrency'?)"),
        (["status", "/"], "no configuration '/'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(nautile, arguments, message):
    code, out, err = nautile(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err
    if "Usage" not in err:
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (False, 'needs a package that is not installed: pip install "nautile[s3]"'),
        (True, "NoCredentialsError: Unable to locate credentials): check the bucket, and the credentials and endpoint"),
    ],
)
def test_a_store_at_a_url_without_its_package_or_credentials(nautile, monkeypatch, tmp_path, installed, message):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # Credentials are looked for at home and at an address that only hosts in the cloud have.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NAUTILE_STORE_CACHE", str(tmp_path / "cache"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    if not installed:
        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.delitem(_registry, "s3")
    code, out, err = nautile("status", str(TOY), store="s3://nautile-bucket/run")
    assert code == 2
    assert err.startswith("the store s3://nautile-bucket/run ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ('name = "x"\nseed = -1', "seed"),
        ('extends = "toy.toml"\n[reason]\nstep = 3', "unknown key `reason.step`"),
        ('extends = "toy.toml"\n[reason]\nrollout = { prompts = 2, max_tokens = 8, group = 1 }', "rollout.group"),
    ],
)
def test_a_bad_configuration_is_named_with_its_file_and_field(nautile, tmp_path, text, message):
    (tmp_path / "toy.toml").write_text(TOY.read_text())
    (tmp_path / "bad.toml").write_text(text)
    code, _, err = nautile("run", str(tmp_path / "bad.toml"))
    assert code == 2
    assert "bad.toml" in err
    assert message in err


def test_a_prefect_server_that_does_not_answer_is_one_clear_message(nautile, tmp_path, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setattr("os.environ", os.environ.copy())  # what the run sets for Prefect is not for other tests
    code, _, err = nautile("run", str(TOY), store=tmp_path / "store")
    assert code == 2
    assert err == f"PREFECT_API_URL: {url} does not answer; start that server, or unset the variable\n"


def test_without_a_store_there_is_nothing_to_clean_up(nautile, tmp_path):
    assert nautile("reconcile", store=tmp_path / "none") == (0, "nothing to clean up\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("reads", "columns"), [(True, "0"), (False, "80")])
def test_a_terminal_without_a_size_is_printed_to_and_a_closed_pipe_is_no_failure(tmp_path, reads, columns):
    own = environment(tmp_path / "store") | {"COLUMNS": columns, "PYTHONUNBUFFERED": "1"}
    reader, writer = os.pipe()
    if not reads:
        os.close(reader)
    command = [sys.executable, "-P", "-m", "nautile.flows.cli.main", "runs"]
    ended = subprocess.run(command, env=own, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
    if reads:
        with open(reader, "rb") as shown:
            assert b"no run yet" in shown.read()


def test_read_commands_create_no_store(nautile, tmp_path):
    for arguments in (["status", str(TOY)], ["artifacts"], ["store", "verify"], ["report"], ["sql", "SELECT 1"]):
        code, _, err = nautile(*arguments, store=tmp_path / "store")
        assert code in (0, 2)
        assert "Traceback" not in err
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_every_read_command_prints_json_and_text(nautile, made):
    evaluation = made[1]["evaluate:reason"]["evaluation"]
    for output, arguments in (
        ("status", [str(TOY)]),
        ("status --why", [str(TOY), "--set", "pretrain.batch_rows=4"]),
        ("artifacts", []),
        ("show", [evaluation]),
        ("lineage", [evaluation]),
        ("sql", ["SELECT id, created, facts FROM artifacts"]),
        ("params", [str(TOY)]),
        ("report", []),
        ("store verify", []),
        ("store rebuild", []),
        ("store gc", ["--dry-run"]),
    ):
        arguments = [*output.split(), *arguments]
        code, out, _ = nautile(*arguments, "--json")
        assert code == 0
        TypeAdapter(OUTPUTS.get(output, dict)).validate_json(out, strict=True)
        code, out, _ = nautile(*arguments)
        assert code == 0
        assert out.strip()


def test_damage_found_by_verify_is_exit_code_2(nautile, made, tmp_path):
    shutil.copytree(made[0].root, tmp_path / "store")
    flip_byte(Store(tmp_path / "store").get(made[1]["pretrain"]["checkpoint"]).path / "weights.txt")
    code, out, _ = nautile("store", "verify", store=tmp_path / "store")
    assert code == 2
    assert "weights.txt" in out
    assert "21 artifacts, 1 damaged" in out


def test_the_printed_report_ends_with_the_path_of_its_page(nautile, made):
    _, out, _ = nautile("report")
    assert "After SFT (baseline)" in out
    assert out.strip().splitlines()[-1].endswith(f"{made[0].get(made[1]['report']['report']).path}/report.html")


def test_an_unexpected_failure_is_one_line_and_its_stack_trace_is_saved(nautile, monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ZeroDivisionError("by zero\udcff")

    monkeypatch.setattr("nautile.flows.cli.inspect.artifacts", broken)
    (tmp_path / "logs").mkdir()
    code, out, err = nautile("artifacts", store=tmp_path)
    assert code == 1
    assert "Traceback" not in out + err
    assert "unexpected ZeroDivisionError: by zero" in err
    assert "in broken" in (tmp_path / "logs" / "errors.log").read_text()


def test_a_name_that_no_file_can_have_is_the_users_mistake(nautile):
    code, _, err = nautile("export", "a" * 5000, "out", "--format", "web")
    assert (code, "no file can have a name of this length" in err) == (2, True)


def test_status_watch_runs_until_it_is_stopped(nautile, monkeypatch):
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("nautile.flows.cli.watch.time", SimpleNamespace(sleep=sleep))  # other threads sleep as usual
    code, out, err = nautile("status", str(TOY), "--watch")
    assert (code, err) == (130, "")
    assert out.splitlines().count("pretrain: made") == 1  # without a terminal, only changes are printed
    code, _, err = nautile("status", str(TOY), "--watch", "--json")
    assert (code, "leave out --watch" in err) == (2, True)


def test_a_message_has_no_terminal_escapes(nautile):
    code, _, err = nautile("export", "checkpoint", "out", "--format", "\x1b]0;title\x07")
    assert code == 2
    assert "\x1b" not in err
    assert "\N{REPLACEMENT CHARACTER}" in err
