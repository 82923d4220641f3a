"""Folders whose digests are right and whose graphs are not: each is refused by one message."""

import json
import random
import resource
import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from nautile.common.errors import ConfigError
from nautile.model.runtimes.onnx_runtime import OPERATORS, OnnxRuntime
from nautile.model.weights.files import DIGESTS, write_digests
from tests.model.exports.onnx.conftest import exports, weights  # noqa: F401 - fixtures

FLIPS, CUTS = 24, 6


@pytest.fixture
def folder(exports, tmp_path):  # noqa: F811
    """A copy to write into."""
    return shutil.copytree(exports[8], tmp_path / "export")


def load(folder):
    """Load an export after writing the digests of what it holds now."""
    (folder / DIGESTS).unlink()
    write_digests(folder)
    return OnnxRuntime(folder)


def renamed_input(graph):
    graph.input[0].name = "ids"
    for node in graph.node:
        node.input[:] = ["ids" if name == "tokens" else name for name in node.input]


def lacking_output(graph):
    del graph.output[-1]


def other_type(graph):
    graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT


def other_vocabulary(graph):
    """Declared rightly, and computed otherwise."""
    [node] = [node for node in graph.node if "logits" in node.output]
    node.output[:] = ["wide"]
    graph.node.append(helper.make_node("Concat", ["wide", "wide"], ["logits"], axis=2))


def further_input(graph):
    graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))


def unknown_value(graph):
    graph.node[3].input[0] = "nothing"


def unknown_operator(graph):
    graph.node[3].op_type = "Loop"


def foreign_domain(graph):
    graph.node[3].domain = "com.example"


def inner_graph(graph):
    graph.node[3].attribute.append(helper.make_attribute("body", helper.make_graph([], "body", [], [])))


def outside(location):
    def change(graph):
        entry = next(entry for array in graph.initializer for entry in array.external_data if entry.key == "location")
        entry.value = location

    return change


def beyond_the_file(graph):
    entry = next(entry for array in graph.initializer for entry in array.external_data if entry.key == "offset")
    entry.value = str(10**15)


def large_range(count):
    """Adds 0 to the logits by way of `count` numbers of 8 bytes."""

    def change(graph):
        [node] = [node for node in graph.node if "logits" in node.output]
        node.output[:] = ["plain"]
        for name, value in (("from", 0), ("to", count), ("by", 1), ("zero", 0)):
            graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
        graph.node.extend(
            [
                helper.make_node("Range", ["from", "to", "by"], ["many"]),
                helper.make_node("Mul", ["many", "zero"], ["zeros"]),
                helper.make_node("ReduceMax", ["zeros"], ["none"], keepdims=0),
                helper.make_node("Cast", ["none"], ["single"], to=TensorProto.FLOAT),
                helper.make_node("Add", ["plain", "single"], ["logits"]),
            ]
        )

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed_input, "input 'ids' of the .* graph is .*, and the model in config.json has none"),
        (lacking_output, "outputs, not those of 2 blocks"),
        (other_type, "cannot run it"),
        (other_vocabulary, "cannot run it"),
        (further_input, "input 'more'"),
        (unknown_value, "cannot run it"),
        (unknown_operator, "the operator 'Loop', which no export has"),
        (foreign_domain, "operators of 'com.example'"),
        (inner_graph, "an attribute is a graph"),
        (outside("../weights.bin"), "an array is in the file '../weights.bin', not in weights.bin"),
        (outside("/dev/zero"), "an array is in the file '/dev/zero'"),
        (beyond_the_file, "cannot run it"),
        (large_range(2**30), "cannot run it"),  # 8 GiB, which many machines have
        (large_range(2**50), "cannot run it"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_graph_that_is_not_the_models_is_refused(folder, change, message):
    """Of the two graphs, in turn: both are checked alike."""
    path = folder / ("prompt.onnx" if len(message) % 2 else "step.onnx")
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString())
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ConfigError, match=message) as refused:
        load(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.slow
def test_changed_bytes_and_cut_files_load_or_are_refused(folder):
    """Whatever the bytes are: no other error than ours. Most changes are refused, some are in a name or a number."""
    rng = random.Random(0)
    contents = {name: (folder / name).read_bytes() for name in ("prompt.onnx", "step.onnx", "weights.bin")}
    refused = 0
    for number in range(FLIPS + CUTS):
        name = rng.choice(("prompt.onnx", "step.onnx")) if number < FLIPS else rng.choice(list(contents))
        changed = bytearray(contents[name])
        if number < FLIPS:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        else:
            del changed[rng.randrange(len(changed)) :]
        (folder / name).write_bytes(changed)
        try:
            load(folder)
        except ConfigError:
            refused += 1
        (folder / name).write_bytes(contents[name])
    assert refused >= CUTS
    load(folder)


@pytest.mark.parametrize("changes", [{"blocks": 2**24}, {"context": 512}, {"vocabulary": 500}, {"kv_heads": 4}])
def test_a_config_of_another_model_is_refused(folder, changes):
    settings = json.loads((folder / "config.json").read_text())
    settings["model"] |= changes
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"cannot run it|config\.json"):
        load(folder)


def test_a_graph_of_any_size_is_not_read(folder):
    with (folder / "step.onnx").open("ab") as file:
        file.truncate(2**27)
    with pytest.raises(ConfigError, match="134,217,728 bytes, more than any exported graph"):
        load(folder)


def test_the_operators_of_all_exports_are_known(exports):  # noqa: F811
    used = set()
    for bits in (32, 8, 4):
        for name in ("prompt", "step"):
            graph = onnx.load(exports[bits] / f"{name}.onnx", load_external_data=False).graph
            used |= {node.op_type for node in graph.node}
    # Those of 4-bit tables, which older exports have, and of the decay "window".
    assert OPERATORS - {"BitShift", "BitwiseAnd", "Clip"} >= used
    assert OPERATORS - used <= {"BitShift", "BitwiseAnd", "Clip", "Gemm"}
