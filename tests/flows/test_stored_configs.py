"""References to configurations in the store: they mean what `nautile run` was started with, and nothing else."""

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.forms import WORKER, ServedConfig
from nautile.configs.load import load, load_base, shipped_files
from nautile.flows.stored_configs import follow, store_config
from tests.support.stages.toy_stages import TOY


@pytest.mark.parametrize("name", [*(path.stem for path in shipped_files()), TOY], ids=str)
def test_a_reference_means_the_configuration_as_it_was(store, name):
    config, base = load(name), load_base(name)
    reference = store_config(store, config, base, str(name))
    assert reference.rpartition("@")[0] == config.name
    followed, its_base, words = follow(store, reference, ())
    assert (followed, its_base, words) == (config, base, str(name))
    assert followed.model_fields_set == config.model_fields_set


def test_a_reference_outlives_its_file_and_takes_further_overrides(store, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "local"\nname = "mine"\nseed = 3\n')
    reference = store_config(store, load(path, ["seed=4"]), load_base(path), f"{path} --set seed=4")
    path.unlink()
    config, base, words = follow(store, reference, ["reason.policy.steps=2"])
    assert (config.seed, config.reason.policy.steps, base) == (4, 2, load("local"))
    assert words == f"{path} --set seed=4 --set reason.policy.steps=2"
    with pytest.raises(ConfigError, match="a form may not set it"):
        follow(store, reference, ["distill.budget_dollars=9"])


def test_the_gates_of_the_deployed_configuration_hold_for_a_reference(store, monkeypatch):
    reference = store_config(store, load("local"), None, "local")
    served = load("local", ["operation.reason.approve=true"])
    monkeypatch.setenv(WORKER, ServedConfig.of("served.toml", served, served).model_dump_json())
    config, base, _ = follow(store, reference, ())
    assert base == load("local")
    assert config.operation.of("reason").approve


def test_a_reference_to_nothing_and_to_another_file_is_refused(store):
    with pytest.raises(ConfigError, match=r"^config: no configuration 'local@0123456789abcdef'"):
        follow(store, "local@0123456789abcdef", ())
    path = store.stored_config("0123456789abcdef")
    path.parent.mkdir(parents=True)
    path.write_text('{"name": 3}')
    with pytest.raises(ConfigError, match=r"^config: .* is no configuration that `nautile run` has stored"):
        follow(store, "local@0123456789abcdef", ())
