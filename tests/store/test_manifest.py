"""Keys never change and depend on their parts alone; a changed manifest is noticed."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.base import canonical
from nautile.store.manifest import read_manifest, stage_key
from tests.support.samples.stage_store import filled, flip_byte, manifest_of

SECTION = {"seed": 7, "reason": {"steps": 3, "rates": [1e-05, 0.1, 1.0], "name": "Ωμέγα", "none": None, "on": True}}
INPUTS = {"checkpoint": f"checkpoint/{'0123456789abcdef' * 4}"}
# If this digest changes, no artifact that exists is ever reused.
GOLDEN = "1a8a648b2f8ce34ed8ee158a9875cee45ba88905e7b27f6a6fa63ced5373d8ee"
HASHED = (
    r'{"inputs":{"checkpoint":"checkpoint/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"},'
    r'"section":{"reason":{"name":"\u03a9\u03bc\u03ad\u03b3\u03b1","none":null,"on":true,"rates":[1e-05,0.1,1.0],'
    r'"steps":3},"seed":7},"stage":"reason","version":2}'
)

json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_the_key_of_a_known_section_never_changes():
    assert stage_key("reason", 2, SECTION, INPUTS) == hashlib.sha256(HASHED.encode("ascii")).hexdigest() == GOLDEN


def test_keys_are_the_same_in_every_process():
    code = "import json,sys; from nautile.store.manifest import stage_key; print(stage_key(*json.load(sys.stdin)))"
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "LC_ALL": "C", "TZ": "Asia/Kathmandu"}
    arguments = json.dumps(["reason", 2, SECTION, INPUTS])
    done = subprocess.run(
        [sys.executable, "-c", code], input=arguments, capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == stage_key("reason", 2, SECTION, INPUTS)


@given(st.dictionaries(st.text(), json_data, max_size=6), st.randoms())
def test_keys_do_not_depend_on_the_order_of_a_section(section, random):
    names = list(section)
    random.shuffle(names)
    assert stage_key("s", 1, {name: section[name] for name in names}, {}) == stage_key("s", 1, section, {})


@given(json_data)
def test_canonical_json_is_ascii_and_a_fixed_point(value):
    text = canonical(value)
    assert text.isascii()
    assert canonical(json.loads(text)) == text


@given(json_data, json_data)
def test_different_sections_have_different_keys(first, second):
    keys = {stage_key("s", 1, {"x": value}, {}) for value in (first, second)}
    assert len(keys) == len({canonical(first), canonical(second)})


def test_every_part_is_in_the_key():
    base = stage_key("reason", 2, SECTION, INPUTS)
    others = [
        stage_key("align", 2, SECTION, INPUTS),
        stage_key("reason", 3, SECTION, INPUTS),
        stage_key("reason", 2, {**SECTION, "seed": 8}, INPUTS),
        stage_key("reason", 2, SECTION, {"checkpoint": f"checkpoint/{'f' * 64}"}),
        stage_key("reason", 2, SECTION, {"start": INPUTS["checkpoint"]}),
    ]
    assert len({base, *others}) == 6


def test_a_short_id_is_refused_as_an_input():
    with pytest.raises(ConfigError, match="input 'tokens' is 'tokens/0123456789ab'"):
        stage_key("pretrain", 1, {}, {"tokens": "tokens/0123456789ab"})


def test_any_flipped_byte_of_a_manifest_breaks_its_seal(tmp_path):
    manifest = manifest_of()
    path = filled(tmp_path, {"manifest.json": json.dumps(manifest)}) / "manifest.json"
    assert read_manifest(tmp_path) == manifest
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip_byte(path, position)
        read = read_manifest(tmp_path)
        assert read is None or read == manifest, position  # white space may turn into other white space
        path.write_bytes(whole)
