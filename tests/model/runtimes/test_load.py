"""How the runtimes load a folder."""

from nautile.model.runtimes.load import JaxRuntime
from nautile.model.weights.files import save_weights
from tests.model.exports.onnx.conftest import MODEL, TOKENIZER, weights  # noqa: F401 - a fixture


def test_on_a_cpu_a_checkpoint_of_bfloat16_answers_in_float32(tmp_path, weights):  # noqa: F811
    """Where bfloat16 is emulated: a token takes four times as long."""
    save_weights(tmp_path, weights, MODEL.model_copy(update={"compute_dtype": "bfloat16"}), TOKENIZER)
    assert JaxRuntime(tmp_path).config == MODEL.model_copy(update={"compute_dtype": "float32"})
