"""Loading configurations: the shipped files, `extends`, error messages, canonical JSON."""

import subprocess
import sys
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import canonical, fingerprint
from nautile.configs.load import load

SHIPPED = ("local", "spark", "nautile_100m", "nautile_370m")
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_files_validate(name):
    assert load(name).name == name


def test_the_papers_values_are_in_its_configuration():
    config = load("nautile_370m")
    assert config.model.head_dim == 64
    assert config.model.padded_vocabulary == 100_352
    assert [phase.tokens for phase in config.pretrain.phases] == [350_000_000_000, 250_000_000_000]
    assert (config.align.policy.steps, config.align.rollout.group) == (1200, 4)
    assert len(config.evaluate.benchmarks) == 11


@pytest.mark.parametrize("name", ["nautile_370m", "nautile_100m"])
def test_every_value_of_the_model_names_its_source(name):
    text = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8")
    in_model = text.partition("[model]")[2].partition("\n\n")[0]
    lines = in_model.strip().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):  # a long comment stands above its value
        commented = before + line if before.startswith("#") else line
        assert line.startswith("#") or any(s in commented for s in ("[paper", "[author]", "[ours]", "[measured]")), line
    assert all(section in text for section in ("[endpoints", "[[ingest", "[evaluate]"))


def test_extends_merges_a_table_into_its_parent():
    spark, paper = load("spark"), load("nautile_370m")
    assert spark.model == paper.model
    assert spark.pretrain.batch_rows == 128
    assert spark.pretrain.optimizer == paper.pretrain.optimizer
    assert spark.align.policy == paper.align.policy


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends = 'local'\n[reason]\nobjektive = 'plain'", r"unknown key `reason\.objektive`"),
        ("extends = 'local'\n[reason]\nbalance_over = 'all'", r"`reason\.balance_over`: Input should be 'step'"),
        ("extends = 'local'\n[model]\nwidth = 130", r"`model`: model: width\*expand"),
        ("extends = 'local'\n[model]\npattern = ''", r"`model\.pattern`: '' must be letters S .* and A"),
        ("extends = 'local'\n[model]\npattern = 'SSX'", r"`model\.pattern`: 'SSX' must be letters S .* and A"),
        ("extends = 'local'\n[model]\npattern = 'ssa'", r"`model\.pattern`: 'ssa' must be letters S .* and A"),
        (
            f"extends = 'local'\n[model]\npattern = '{'S' * 129}'",
            r"`model\.pattern`: has 129 letters, .* raise `blocks`",
        ),
        ("extends = 'local'\n[model]\npattern = 2", r"`model\.pattern`: Input should be a valid string"),
        ("extends = 'local'\n[model]\ngrid = 'loose'", r"`model\.grid`: Input should be 'ordered', 'free' or 'fixed'"),
        ("extends = 'local'\n[tokenizer]\nranks = 9000", "model.vocabulary 2053 is smaller than the tokenizer's 9005"),
        ("extends = 'local'\n[align.judge]\nendpoint = 'unknown'", "no endpoint 'unknown'"),
        ("extends = 'local'\n[align.rollout]\ngroup = 1", r"`align\.rollout\.group`: Input should be greater"),
        ("extends = 'local'\n[align.rollout]\ntop_k = 50", r"`align`: rollout\.top_k is 50: top-k and top-p leave"),
        (
            "extends = 'local'\n[reason.rollout]\ntop_p = 0.9",
            r"`reason`: rollout\.top_p is 0\.9.*rollout\.top_p = 1\.0",
        ),
        (
            "extends = 'local'\ningest.sources = [{ name = 'web', reader = 'jsonl', path = 'a', form = 'web', "
            "train_on = 'replies' }]",
            "source 'web': train_on 'replies' needs prompts, and form 'web' has none",
        ),
        (
            "extends = 'local'\n[distill]\naccepted = 33",
            r"`distill`: distill\.accepted is 33, and 32 prompts give at most as many documents",
        ),
        ("extends = 'local'\n[distill]\ntrain_on = 'prompts'", r"`distill\.train_on`"),
        ("name = 'few'", r'Field required \(and \d+ more\)\. .* begin with `extends = "local"`$'),
        ("extends = 'nowhere'", "no configuration 'nowhere'"),
        ("extends = 'run.toml'", "is circular"),
        ("a = = 1", "is not TOML"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_binary_or_missing(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)
    with pytest.raises(ConfigError, match="no configuration"):
        load(tmp_path / "absent.toml")


def test_fingerprints_do_not_depend_on_the_process():
    code = (
        "from nautile.configs.base import fingerprint; from nautile.configs.load import load\n"
        "print(fingerprint(load('local')))"
    )
    command, other = [sys.executable, "-c", code], {"PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=other, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(load("local"))


def test_canonical_json_is_sorted_and_ascii():
    assert canonical({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"\\u00e9"],"b":1}'


def test_settings_replace_values_of_the_file():
    config = load("local", ["reason.policy.steps=3", "ingest.sources.0.records=9", "name=trial", "seed = 7"])
    assert (config.reason.policy.steps, config.ingest.sources[0].records) == (3, 9)
    assert (config.name, config.seed) == ("trial", 7)
    assert config.reason.policy.micro_rows == load("local").reason.policy.micro_rows
    assert load("local").seed == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("reason.policy.stepz=3", "unknown key `reason.policy.stepz`"),
        ("reason.policy.steps=-5", "`reason.policy.steps`: "),
        ("reason.policy.steps", "write it as FIELD=VALUE"),
        ("seed=1\nname='lost'", "sets several values"),
        ("=3", "write it as FIELD=VALUE"),
        ("reason..steps=3", "write it as FIELD=VALUE"),
        ("ingest.sources.9.records=1", "'9' is not an index of a list of 3"),
        ("ingest.sources.first.records=1", "'first' is not an index of a list of 3"),
        ("seed.x=1", "'x' is inside a value that is neither a table nor a list"),
    ],
)
def test_a_setting_that_fits_nothing_is_refused(setting, message):
    with pytest.raises(ConfigError) as refusal:
        load("local", [setting])
    assert message in str(refusal.value)
