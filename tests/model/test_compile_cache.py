"""The compilation cache: programs are kept once it is enabled, and an operator's own setting takes precedence."""

import jax
import numpy as np
import pytest
from jax._src import compiler, distributed
from jax.experimental.compilation_cache import compilation_cache

from nautile.model import compile_cache

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def options_restored():
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_are_kept_even_after_others_were_compiled(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile_cache, "MIN_COMPILE_SECONDS", 0.0)
    jax.jit(lambda x: x + 1)(np.float32(1))
    compile_cache.enable_compile_cache(tmp_path)
    assert jax.jit(lambda x: x * 3 - 5)(np.float32(2)) == 1
    [machine] = tmp_path.iterdir()
    assert any(path.name.startswith("jit_") for path in machine.iterdir())


def test_an_operators_cache_wins(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    compile_cache.enable_compile_cache(tmp_path / "ours")
    assert jax.config.jax_compilation_cache_dir == before


def test_a_process_that_is_not_the_first_keeps_its_programs_too(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile_cache, "MIN_COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)  # put back at the end
    compile_cache.enable_compile_cache(tmp_path)

    def kept():
        return [path.name for path in tmp_path.glob("*/jit_*-cache")]

    assert jax.jit(lambda x: x * 7 - 1)(np.float32(1)) == 6
    assert kept() == []
    compile_cache.keep_on_every_process()
    assert jax.jit(lambda x: x * 9 - 1)(np.float32(1)) == 8
    assert len(kept()) == 1
