"""The two ONNX graphs of a model: one reads prompts, one a further token. `signature` lists inputs and outputs.

The layers compute the same as `model.layers`, in float32, with two differences. The axes H and M of the mixing are
swapped, [K, M, H], so that operators broadcast over the long one. And the sums of a prompt are two products with decay
weights, inside chunks of 32 columns and between chunks, whose exponents are never positive: nothing overflows.

Prompts are padded on the right, where padding cannot affect earlier columns, since all layers are causal.
Letters as in `model.layers`; N chunks, C columns of a chunk, J = M·H.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import onnx

from nautile.configs.model import ModelConfig
from nautile.model.exports.onnx.graph import CONTRIB, Graph, WeightFile
from nautile.model.exports.onnx.signature import (
    CHUNK,
    HIDDEN,
    PAST,
    SUMS,
    cache_names,
    hidden_shape,
    history_names,
    logits_shape,
    sca_shapes,
    state_shapes,
    token_shapes,
)
from nautile.model.layers.common import MASKED, Params
from nautile.model.layers.mixing.chunked import TINY
from nautile.model.layers.sca import WINDOW_CEILING, WINDOW_FLOOR, spectrum

# The table (embedding and head) and the readouts lose most accuracy at 4 bits, so they keep 8.
TABLE_BITS = READOUT_BITS = 8
# Inputs that share a scale, by bits. Large blocks are faster, and lose nothing at 8 bits. At 4 bits the input
# projections, which contain the queries, lose most, so their blocks are finer.
BLOCKS = {32: 0, 8: 256, 4: 128}
FINE_BLOCK = 64
UNUSED = "unused"  # name of the mask of ids that no token has; absent where every id has one
LEAST_TAP = 1e-12  # replaces a last tap of 0, by which other taps are divided


def heads_at_once(heads: int) -> int:
    """Number of heads whose readouts share a quantised matrix: a product reads it once for up to four rows."""
    return math.gcd(heads, 4)


def write_weights(file: WeightFile, params: Params, config: ModelConfig) -> None:
    """Write all parameters as the graphs need them: unstacked, rearranged, spectra computed, quantised.

    Without the rows of the table that only pad the vocabulary.
    """
    table_VD = np.asarray(params["embedding"], np.float32)[: config.vocabulary]
    if file.bits == 32:
        file.add("embedding", table_VD)
    else:
        file.add_matrix("embedding", table_VD.T, TABLE_BITS, BLOCKS[TABLE_BITS])
        rows, inputs, _, block = file.matrices["embedding"]
        file.add_view("embedding.rows", "embedding.levels", (rows, -(-inputs // block) * block))
    if config.unused_ids:
        is_unused_V = np.zeros(config.vocabulary, bool)
        for first, end in config.unused_ids:
            is_unused_V[first:end] = True
        file.add(UNUSED, is_unused_V)
    if "A" in config.pattern:
        _rope_tables(file, config)
        file.add("ones", np.ones(config.attention_head_dim, np.float32))
    for block in range(config.blocks):
        layers = jax.tree.map(lambda leaf, block=block: np.asarray(leaf[block], np.float32), params["blocks"])
        for letter, name in config.layers:
            if letter == "S":
                _sca(file, f"block_{block}.{name}", layers[name], config)
            else:
                _attention(file, f"block_{block}.{name}", layers[name])


def _rope_tables(file: WeightFile, config: ModelConfig) -> None:
    """Write cosine and sine of the RoPE angles of all positions, from float64, up to the longest padded prompt."""
    half = config.attention_head_dim // 2
    angles_SH = np.arange(-(-config.context // CHUNK) * CHUNK)[:, None] * config.rope_base ** (-np.arange(half) / half)
    file.add("rope.cosine", np.cos(angles_SH).astype(np.float32))
    file.add("rope.sine", np.sin(angles_SH).astype(np.float32))


def _sca(file: WeightFile, name: str, layer: Params, config: ModelConfig) -> None:
    heads, head_dim, samples = config.memory_heads, config.head_dim, config.spectral_samples
    # Permute the query columns from [2, Q, H, M], real and imaginary, to [Q, 2, M, H].
    fixed, query = heads * (head_dim + 1), config.query_heads * head_dim * samples
    order = np.arange(2 * query).reshape(2, config.query_heads, head_dim, samples).transpose(1, 0, 3, 2).ravel()
    columns = np.concatenate([np.arange(fixed), fixed + order])
    file.add(f"{name}.norm", layer["norm"])
    # Scale the input projection so that the convolution's last tap is 1, which saves an operator.
    *earlier_TC, last_C = layer["conv"][:, columns]
    last_C = np.where(np.abs(last_C) < LEAST_TAP, np.float32(LEAST_TAP), last_C)
    in_proj_DC = layer["in_proj"][:, columns] * last_C
    file.add_matrix(f"{name}.in_proj", in_proj_DC, file.bits, FINE_BLOCK if file.bits == 4 else BLOCKS[file.bits])
    for tap, earlier_C in enumerate(earlier_TC):
        file.add(f"{name}.conv.{tap}", earlier_C / last_C)
    # From here on in float64: the exponents of the decay are multiplied by up to 32 columns before they are rounded.
    decay_K, grid_KHM, weights_KHM = (np.asarray(part, np.float64) for part in spectrum(layer, config))
    file.add(f"{name}.grid", _single(grid_KHM.swapaxes(1, 2)))
    file.add(f"{name}.shares", _single(weights_KHM.swapaxes(1, 2) * head_dim**-0.5))
    file.add(f"{name}.phase_scale", layer["phase_scale"][:, None, None])
    file.add(f"{name}.score_scale", layer["score_scale"])
    file.add(f"{name}.score_bias", layer["score_bias"])
    if config.decay == "window":
        # The decay is in the gates, and the sums do not decay.
        file.add(f"{name}.window", _single(-decay_K))
        decay_K = np.zeros_like(decay_K)
    # Decay weights: of a step (retention), inside a chunk (within), of the state before it (carry), between chunks
    # (rate, an exponent: how many chunks are between depends on the prompt).
    column_C = np.arange(CHUNK)
    distance_CS = column_C[:, None] - column_C
    within_KCS = np.where(distance_CS >= 0, np.exp(-decay_K[:, None, None] * np.maximum(distance_CS, 0)), 0)
    file.add(f"{name}.retention", _single(np.exp(-decay_K)[:, None, None]))
    file.add(f"{name}.within", _single(within_KCS[:, None]))
    file.add(f"{name}.carry", _single(np.exp(-decay_K[:, None] * (column_C + 1))[:, None, :, None]))
    file.add(f"{name}.rate", _single(-decay_K[:, None, None] * CHUNK))
    file.add_matrix(f"{name}.gate_proj", layer["gate_proj"], file.bits, BLOCKS[file.bits])
    file.add(f"{name}.gated_norm", layer["gated_norm"])
    if file.bits == 32:
        file.add(f"{name}.readout", layer["readout"])
    else:
        count = heads_at_once(heads)
        for index in range(heads // count):
            group_IO = np.concatenate(list(layer["readout"][index * count : (index + 1) * count]), axis=1)
            file.add_matrix(f"{name}.readout.{index}", group_IO, READOUT_BITS, BLOCKS[READOUT_BITS])
    file.add_matrix(f"{name}.out_proj", layer["out_proj"], file.bits, BLOCKS[file.bits])


def _attention(file: WeightFile, name: str, layer: Params) -> None:
    file.add_matrix(
        f"{name}.qkv_proj", np.concatenate([layer[part] for part in ("q_proj", "k_proj", "v_proj")], axis=1),
        file.bits, BLOCKS[file.bits],
    )  # fmt: skip
    for part in ("out_proj", "ff_in", "ff_out"):
        file.add_matrix(f"{name}.{part}", layer[part], file.bits, BLOCKS[file.bits])
    for part in ("norm1", "norm2", "ff_in_bias", "ff_out_bias"):
        file.add(f"{name}.{part}", layer[part])


def _single(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)


class SCAValues(NamedTuple):
    """The state of one SCA layer after a prompt, as in `signature` with a single layer: [1, B, …]."""

    sums: str
    z: str
    history: list[str]


class StepPast(NamedTuple):
    """What one SCA layer of a step needs of the previous tokens."""

    sums: str  # decayed, real and imaginary, [1, B, K, 1, 2, M, H]
    z: str  # decayed, [1, B, K, 1, 1, 1, 1]
    convolved: str  # their part of the convolution, [1, B, 1, C]; "" if it has a single tap


class StepValues(NamedTuple):
    """The state of one SCA layer after a step: sums and Z in the shapes of `StepPast`, and its inputs [B, 1, C]."""

    sums: str
    z: str
    inputs: str


class Stream(NamedTuple):
    """The residual stream [B, L, D]: x, and a branch that the next norm will add to it."""

    x: str
    branch: str = ""


class ChunkValues(NamedTuple):
    """Values shared by all SCA layers of the prompt graph."""

    positions: str  # of the columns, float32 [1, L]
    recent: str  # the last T-1 columns of each row, in the padded inputs of the convolution, int64 [B, T-1, 1]
    last: str  # 1 at the last token of each row, else 0, [B, 1, 1, L]
    distance: str  # chunks between the end of a chunk and the beginning of another, at least 0, [N, N]
    before: str  # 1 where a chunk precedes another, else 0, [N, N]


@dataclass(frozen=True)
class Layers:
    """Appends the layers of `config` to a graph.

    accuracy: `accuracy_level` of products with quantised matrices; 1: float32, 4: activations are quantised to int8.
    """

    graph: Graph
    config: ModelConfig
    accuracy: int

    def linear(self, x: str, name: str) -> str:
        """x · W, with a quantised W if the weights are quantised."""
        graph = self.graph
        if graph.weights.bits == 32:
            return graph.op("MatMul", x, graph.weight(name))
        outputs, inputs, bits, block = graph.weights.matrices[name]
        parts = ("levels", "scales") if bits == 8 else ("levels", "scales", "zero_points")
        return graph.op(
            "MatMulNBits", x, *(graph.weight(f"{name}.{part}") for part in parts), domain=CONTRIB, bits=bits,
            block_size=block, N=outputs, K=inputs, accuracy_level=self.accuracy,
        )  # fmt: skip

    def norm(self, x: str, name: str, epsilon: float) -> str:
        """RMS norm with a learned scale, in the operator pattern that onnxruntime fuses."""
        graph = self.graph
        square = graph.op("ReduceMean", graph.op("Pow", x, graph.constant(2.0)), graph.indices(-1), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", square, graph.constant(epsilon)))
        return graph.op("Mul", graph.op("Div", x, root), graph.weight(name))

    def norm_of(self, stream: Stream, name: str, epsilon: float) -> tuple[str, str]:
        """Add the branch to the stream, and return the sum and its norm."""
        if not stream.branch:
            return stream.x, self.norm(stream.x, name, epsilon)
        normed, _, _, x = self.graph.ops(
            "SkipSimplifiedLayerNormalization", stream.x, stream.branch, self.graph.weight(name),
            into=(f"{name}.normed", "", "", f"{name}.stream"), domain=CONTRIB, epsilon=epsilon,
        )  # fmt: skip
        return x, normed

    def embed(self, tokens: str) -> str:
        """Look up ids in the table, which the head shares: [B, L] to [B, L, D]."""
        graph = self.graph
        if graph.weights.bits == 32:
            return graph.op("Gather", graph.weight("embedding"), tokens, axis=0)
        _, inputs, bits, block = graph.weights.matrices["embedding"]
        wide = graph.op(
            "GatherBlockQuantized", graph.weight("embedding.rows"), tokens, graph.weight("embedding.scales"),
            domain=CONTRIB, bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        # Rows are stored in whole blocks: what pads the last one is cut off.
        return graph.cut(wide, 0, inputs, -1) if inputs % block else wide

    def logits(self, x: str, into: str) -> str:
        """x · tableᵀ over the vocabulary: [B, P, D] to [B, P, V]. Ids that no token has get -1e30."""
        graph, unmasked = self.graph, None if self.config.unused_ids else into
        if graph.weights.bits != 32:
            logits = graph.op("Identity", self.linear(x, "embedding"), into=unmasked)
        else:
            product = graph.op("Gemm", graph.reshape(x, -1, self.config.width), graph.weight("embedding"), transB=1)
            shape = graph.op("Concat", graph.op("Shape", x, end=2), graph.indices(self.config.vocabulary), axis=0)
            logits = graph.op("Reshape", product, shape, into=unmasked)
        if unmasked:
            return logits
        return graph.op("Where", graph.weight(UNUSED), graph.constant(MASKED), logits, into=into)

    def attention(
        self, stream: Stream, name: str, past: tuple[str, str], lengths: tuple[str, str], into: tuple[str, str]
    ) -> Stream:
        """One Transformer layer, [B, L, D]; `past` and `into` name keys and values before and after, [B, G, S, H].

        lengths: positions of each row's last token, int32 [B], and the number of columns. The norm of queries and keys
        has no weights, so it commutes with the rotation inside the attention operator.
        """
        graph, config = self.graph, self.config
        x, normed = self.norm_of(stream, f"{name}.norm1", config.norm_epsilon)
        kv_width = config.kv_heads * config.attention_head_dim
        both, v = graph.split(self.linear(normed, f"{name}.qkv_proj"), [config.width + kv_width, kv_width])
        if config.qk_norm:  # an RMS norm of each head, without a scale
            by_head = graph.reshape(both, 0, 0, -1, config.attention_head_dim)
            both = graph.reshape(self.norm(by_head, "ones", config.norm_epsilon), 0, 0, -1)
        q, k = graph.split(both, [config.width, kv_width])
        mixed, _, _ = graph.ops(
            "GroupQueryAttention", q, k, v, *past, *lengths, graph.weight("rope.cosine"), graph.weight("rope.sine"),
            into=(f"{name}.mixed", *into), domain=CONTRIB, num_heads=config.attention_heads,
            kv_num_heads=config.kv_heads, do_rotary=1, rotary_interleaved=0,
        )  # fmt: skip
        x, normed = self.norm_of(
            Stream(x, self.linear(mixed, f"{name}.out_proj")), f"{name}.norm2", config.norm_epsilon
        )
        inner = graph.op("Add", self.linear(normed, f"{name}.ff_in"), graph.weight(f"{name}.ff_in_bias"))
        value, gate = graph.split(inner, [config.feed_forward, config.feed_forward])
        out = self.linear(graph.op("Mul", value, graph.silu(gate)), f"{name}.ff_out")
        return Stream(x, graph.op("Add", out, graph.weight(f"{name}.ff_out_bias")))

    def sca_prompt(self, stream: Stream, name: str, chunks: "ChunkValues") -> tuple[Stream, SCAValues]:
        """One SCA layer over padded prompts, [B, L, D] with L a multiple of 32, and the state after each last token."""
        graph, config = self.graph, self.config
        heads, head_dim, samples = config.memory_heads, config.head_dim, config.spectral_samples
        joined = head_dim * samples  # J
        x, normed = self.norm_of(stream, f"{name}.norm", config.sca_norm_epsilon)
        inputs = self.linear(normed, f"{name}.in_proj")
        reach = config.convolution - 1
        padded = graph.op("Pad", inputs, graph.indices(0, reach, 0, 0, 0, 0)) if reach else inputs
        # Step 1: the convolution. The last tap is 1 (see `weights`).
        summed = inputs
        for tap in range(reach):
            product = graph.op("Mul", graph.cut(padded, tap, tap - reach, 1), graph.weight(f"{name}.conv.{tap}"))
            summed = graph.op("Add", summed, product)
        recent = graph.op("GatherND", padded, chunks.recent, batch_dims=1) if reach else ""
        history = graph.split(recent, [1] * reach, axis=1) if reach else ()
        keys, gates, queries = self._operands(graph.silu(summed), name, chunks.positions)
        q_re, q_im = (graph.op("Squeeze", q, graph.indices(3)) for q in graph.split(queries, [1, 1], axis=3))
        # Heads before columns: [B, L, K, ...] to [B, K, L, ...].
        keys = graph.op("Unsqueeze", graph.op("Transpose", keys, perm=[0, 2, 1, 3]), graph.indices(3))
        gates = graph.op("Transpose", gates, perm=[0, 2, 1])
        q_re, q_im = (self._repeat_queries(graph.op("Transpose", q, perm=[0, 2, 1, 3, 4]), 1) for q in (q_re, q_im))
        # Step 3: the encoding.
        scaled = graph.op("Mul", keys, self._with_column_axis(f"{name}.phase_scale"))
        phase = graph.op("Mul", graph.op("Softsign", scaled), self._with_column_axis(f"{name}.grid"))
        sine, cosine = graph.op("Sin", phase), graph.op("Cos", phase)
        gated = graph.op("Mul", keys, graph.op("Unsqueeze", gates, graph.indices(3, 4)))
        columns = [
            graph.reshape(graph.op("Mul", gated, wave), 0, heads, -1, CHUNK, joined) for wave in (cosine, sine)
        ]  # [B, K, N, C, J]
        values = graph.op("Concat", *columns, graph.reshape(gates, 0, heads, -1, CHUNK, 1), axis=-1)
        # Step 4: sums inside each chunk, then the totals of earlier chunks, decayed to each position.
        inside = graph.op("MatMul", graph.weight(f"{name}.within"), values)
        totals = graph.op("Squeeze", graph.cut(inside, CHUNK - 1, CHUNK, 3), graph.indices(3))
        rate = graph.weight(f"{name}.rate")  # -λ·C, [K, 1, 1]
        between = graph.op("Mul", graph.op("Exp", graph.op("Mul", chunks.distance, rate)), chunks.before)
        before = graph.op("Unsqueeze", graph.op("MatMul", between, totals), graph.indices(3))
        sums = graph.op("Add", inside, graph.op("Mul", before, graph.weight(f"{name}.carry")))
        sums = graph.reshape(sums, 0, heads, -1, 2 * joined + 1)
        # The weights are 1 at the last token and 0 elsewhere, so this selects its sums exactly.
        last = graph.op("MatMul", chunks.last, sums)
        parts = [2 * joined, 1]
        last_sums, last_z = graph.split(last, parts)
        state = SCAValues(
            graph.reshape(last_sums, 1, -1, heads, 1, 2, samples, head_dim),
            graph.reshape(last_z, 1, -1, heads, 1, 1, 1, 1),
            [graph.op("Transpose", part, perm=[1, 0, 2]) for part in history],
        )
        # Steps 5 and 6.
        all_sums, z = graph.split(sums, parts)
        re, im = (
            graph.reshape(part, 0, heads, -1, samples, head_dim) for part in graph.split(all_sums, [joined, joined])
        )
        out_re, out_im = self._readout(re, im, z, name, (q_re, q_im))
        both = graph.op("Transpose", graph.op("Concat", out_re, out_im, axis=-1), perm=[0, 2, 1, 3])
        fused = self._gated_norm(normed, graph.reshape(both, 0, 0, -1), name)
        by_head = graph.op("Transpose", graph.reshape(fused, 0, 0, heads, 2 * head_dim), perm=[0, 2, 1, 3])
        read = graph.op("Transpose", graph.op("MatMul", by_head, self._readout_weights(name)), perm=[0, 2, 1, 3])
        hidden = config.readout_expand * head_dim
        return Stream(x, self._project_heads(graph.split(read, [hidden, hidden]), 0, name)), state

    def step_past(self, names: list[str], past: list[str], history: list[str]) -> list[StepPast]:
        """What each SCA layer of `names` needs of the past state, computed for all layers at once.

        past: the names of `sums` and `sums_z`. An operator takes about as long on one layer's few numbers as on those
        of all layers.
        """
        graph, config = self.graph, self.config
        count, heads = len(names), config.memory_heads
        sums, z = past

        def stacked(part: str, *shape: int) -> str:
            """The weights of one kind of all layers, stacked; computed when the graph is loaded."""
            weights = graph.op("Concat", *(graph.weight(f"{name}.{part}") for name in names), axis=0)
            return graph.reshape(weights, count, *shape)

        retention = stacked("retention", 1, heads, 1, 1, 1, 1)
        sums = graph.op("Mul", sums, retention)
        # TINY avoids a division by 0: where no gate was open, the sums are 0, and so is the readout.
        z = graph.op("Add", graph.op("Mul", z, retention), graph.constant(TINY))
        parts = [graph.split(value, [1] * count, axis=0) for value in (sums, z)]
        if not history:
            return [StepPast(layer_sums, layer_z, "") for layer_sums, layer_z in zip(*parts, strict=True)]
        convolved = ""
        for tap, inputs in enumerate(history):
            product = graph.op("Mul", inputs, stacked(f"conv.{tap}", 1, config.projection_width))
            convolved = graph.op("Add", convolved, product) if convolved else product
        parts.append(graph.split(graph.op("Unsqueeze", convolved, graph.indices(2)), [1] * count, axis=0))
        return [StepPast(*values) for values in zip(*parts, strict=True)]

    def step_state(self, values: list[StepValues], history: list[str], past_history: list[str]) -> None:
        """Write the state after a step from that of each SCA layer; the convolution inputs shift by one."""
        graph = self.graph
        for name, parts in zip(SUMS, ([v.sums for v in values], [v.z for v in values]), strict=True):
            graph.op("Concat", *parts, into=name, axis=0)
        for name, later in zip(history[:-1], past_history[1:], strict=True):
            graph.op("Identity", later, into=name)
        if history:
            graph.op("Transpose", graph.op("Concat", *(v.inputs for v in values), axis=1), perm=[1, 0, 2],
                     into=history[-1])  # fmt: skip

    def sca_step(self, stream: Stream, name: str, past: StepPast, positions: str) -> tuple[Stream, StepValues]:
        """One SCA layer for one token, [B, 1, D], and the state after it.

        With so few numbers an operator costs the time of its call, so real and imaginary parts share operators.
        """
        graph, config = self.graph, self.config
        heads, head_dim, samples = config.memory_heads, config.head_dim, config.spectral_samples
        x, normed = self.norm_of(stream, f"{name}.norm", config.sca_norm_epsilon)
        inputs = self.linear(normed, f"{name}.in_proj")
        summed = graph.op("Add", past.convolved, inputs) if past.convolved else inputs
        keys, scores, queries = graph.split(graph.silu(summed), self._columns)
        keys = graph.reshape(keys, -1, heads, 1, 1, 1, head_dim)
        gates = graph.reshape(self._gates(scores, name, positions), -1, heads, 1, 1, 1, 1)
        # Step 3, the encoding, with cos x = sin(x + π/2).
        scaled = graph.op("Mul", keys, graph.reshape(graph.weight(f"{name}.phase_scale"), heads, 1, 1, 1, 1))
        grid = graph.reshape(graph.weight(f"{name}.grid"), heads, 1, 1, samples, head_dim)
        quarter = graph.constant([[[math.pi / 2]], [[0.0]]])
        waves = graph.op("Sin", graph.op("Add", graph.op("Mul", graph.op("Softsign", scaled), grid), quarter))
        # Step 4.
        sums = graph.op("Add", past.sums, graph.op("Mul", graph.op("Mul", keys, gates), waves))
        z = graph.op("Add", past.z, gates)
        # Step 5: re·q_re + im·q_im and im·q_re - re·q_im, as products of (re, im) with (q_re, q_im) and (-q_im, q_re).
        queries = self._repeat_queries(graph.reshape(queries, -1, config.query_heads, 2, samples, head_dim), 1)
        ordered = graph.op("Gather", queries, graph.constant([[0, 1], [1, 0]], np.int64), axis=2)
        shares = graph.reshape(graph.weight(f"{name}.shares"), heads, 1, 1, samples, head_dim)
        signed = graph.op("Mul", shares, graph.constant(np.reshape([1.0, 1.0, -1.0, 1.0], (2, 2, 1, 1))))
        products = graph.op("Mul", sums, graph.op("Mul", ordered, signed))
        read = graph.op("ReduceSum", products, graph.indices(-3, -2), keepdims=1)
        both = graph.op("Div", read, z)
        fused = self._gated_norm(normed, graph.reshape(both, -1, 1, 2 * head_dim * heads), name)
        readout = self._readout_token(graph.reshape(fused, 0, heads, 2 * head_dim), name)
        return Stream(x, self._project_heads(readout, 1, name)), StepValues(sums, z, inputs)

    @property
    def _columns(self) -> list[int]:
        """Numbers of columns of the input projection: keys, scores, queries."""
        config = self.config
        fixed = config.memory_heads * config.head_dim
        return [fixed, config.memory_heads, config.projection_width - fixed - config.memory_heads]

    def _operands(self, branches: str, name: str, positions: str) -> tuple[str, str, str]:
        """Keys [B, L, K, H], gates [B, L, K] and queries [B, L, Q, 2, M, H], real and imaginary."""
        graph, config = self.graph, self.config
        keys, scores, queries = graph.split(branches, self._columns)
        keys = graph.reshape(keys, 0, 0, config.memory_heads, config.head_dim)
        queries = graph.reshape(queries, 0, 0, config.query_heads, 2, config.spectral_samples, config.head_dim)
        return keys, self._gates(scores, name, positions), queries

    def _gates(self, scores: str, name: str, positions: str) -> str:
        """The gates of each memory head, in the shape of the scores, [..., B, L, K]."""
        graph, config = self.graph, self.config
        scores = graph.op("Add", graph.op("Mul", scores, graph.weight(f"{name}.score_scale")),
                          graph.weight(f"{name}.score_bias"))  # fmt: skip
        gates = graph.op("Softplus", scores)
        if config.decay == "window":
            distance = graph.op("Max", graph.op("Sub", graph.constant(config.context - 1), positions),
                                graph.constant(0.0))  # fmt: skip
            exponent = graph.op(
                "Mul", graph.op("Unsqueeze", distance, graph.indices(-1)), graph.weight(f"{name}.window")
            )
            gates = graph.op("Clip", graph.op("Mul", gates, graph.op("Exp", exponent)),
                             graph.constant(WINDOW_FLOOR), graph.constant(WINDOW_CEILING))  # fmt: skip
        return gates

    def _repeat_queries(self, queries: str, axis: int) -> str:
        """Repeat queries for the memory heads that share them."""
        share = self.config.memory_heads // self.config.query_heads
        if share == 1:
            return queries
        order = np.repeat(np.arange(self.config.query_heads), share)
        return self.graph.op("Gather", queries, self.graph.indices(*order.tolist()), axis=axis)

    def _with_column_axis(self, name: str) -> str:
        """A weight [K, M, H] as [K, 1, M, H], to broadcast over columns."""
        return self.graph.op("Unsqueeze", self.graph.weight(name), self.graph.indices(1))

    def _readout(self, re: str, im: str, z: str, name: str, queries: tuple[str, str]) -> tuple[str, str]:
        """Step 5 of whole rows: S, re and im [B, K, L, M, H], and Z [B, K, L, 1] to re and im [B, K, L, H]."""
        graph = self.graph
        tiny = graph.constant(TINY)
        # 1 / Z, and 0 where Z is 0.
        inverse = graph.op("Where", graph.op("GreaterOrEqual", z, tiny),
                           graph.op("Reciprocal", graph.op("Max", z, tiny)), graph.constant(0.0))  # fmt: skip
        shares = self._with_column_axis(f"{name}.shares")  # ω / √H
        q_re, q_im = (graph.op("Mul", q, shares) for q in queries)
        sums = (
            graph.op("Add", graph.op("Mul", re, q_re), graph.op("Mul", im, q_im)),
            graph.op("Sub", graph.op("Mul", im, q_re), graph.op("Mul", re, q_im)),
        )
        out_re, out_im = (
            graph.op("Mul", graph.op("ReduceSum", part, graph.indices(-2), keepdims=0), inverse) for part in sums
        )
        return out_re, out_im

    def _gated_norm(self, normed: str, both: str, name: str) -> str:
        """The gated RMS norm of step 6: [B, L, K·2H]."""
        gated = self.graph.op("Mul", both, self.graph.silu(self.linear(normed, f"{name}.gate_proj")))
        return self.norm(gated, f"{name}.gated_norm", self.config.norm_epsilon)

    def _project_heads(self, read: tuple[str, ...], length: int, name: str) -> str:
        """The end of step 6: value and gate of each head, [B, L, K, hidden] or [B, K, hidden], to [B, L, D].

        length: L; 0: that of the inputs.
        """
        graph, (value, gate) = self.graph, read
        inner = graph.reshape(graph.op("Mul", value, graph.op("Sigmoid", gate)), 0, length, -1)
        return self.linear(inner, f"{name}.out_proj")

    def _readout_token(self, by_head: str, name: str) -> tuple[str, ...]:
        """Each head times its readout, for one token: [B, K, 2H] to value and gate [B, K, hidden].

        A product with quantised weights costs the time to read them, and a call. So some heads share a product, which
        multiplies each of them by the readouts of all; each head's own results are then selected.
        """
        graph, heads = self.graph, self.config.memory_heads
        hidden = self.config.readout_expand * self.config.head_dim
        if graph.weights.bits == 32:
            read = graph.op("MatMul", graph.op("Unsqueeze", by_head, graph.indices(2)), self._readout_weights(name))
            return graph.split(read, [hidden, hidden])
        count = heads_at_once(heads)
        groups = graph.split(by_head, [count] * (heads // count), axis=1)
        products = [self.linear(group, f"{name}.readout.{index}") for index, group in enumerate(groups)]
        results = graph.reshape(graph.op("Concat", *products, axis=1), 0, -1, hidden)
        # Row h of the products has the results of all heads of its group, value and gate of each. Its own are number h
        # modulo the size of the group.
        places = 2 * (np.arange(heads) * count + np.arange(heads) % count)
        return tuple(graph.op("Gather", results, graph.indices(*(places + part).tolist()), axis=1) for part in (0, 1))

    def _readout_weights(self, name: str) -> str:
        """The readouts [K, 2H, 2·hidden] in float32; quantised ones are expanded once, when the graph is loaded."""
        graph, heads = self.graph, self.config.memory_heads
        if graph.weights.bits == 32:
            return graph.weight(f"{name}.readout")
        count = heads_at_once(heads)
        parts = []
        for index in range(heads // count):
            stored = f"{name}.readout.{index}"
            outputs, inputs, _, _ = graph.weights.matrices[stored]
            centred = graph.op("Sub", graph.op("Cast", graph.weight(f"{stored}.levels"), to=1), graph.constant(128.0))
            scales = graph.reshape(graph.weight(f"{stored}.scales"), outputs, -1, 1)
            wide = graph.cut(graph.reshape(graph.op("Mul", centred, scales), outputs, -1), 0, inputs, 1)
            parts.append(graph.reshape(wide, count, -1, inputs))
        return graph.op("Transpose", graph.op("Concat", *parts, axis=0), perm=[0, 2, 1])


def prompt_graph(weights: WeightFile, config: ModelConfig, accuracy: int, with_hidden: bool = False) -> onnx.ModelProto:
    """The graph that reads whole prompts. `with_hidden`: also output the residual stream after the last block."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens, lengths, logit_columns = (
        graph.input(name, np.int64, shape) for name, shape in token_shapes("prompt").items()
    )
    # Pad the columns to whole chunks: -L mod CHUNK columns are missing (the result of Mod has the divisor's sign).
    missing = graph.op("Mod", graph.op("Neg", graph.op("Shape", tokens, start=1)), graph.indices(CHUNK))
    tokens = graph.op("Pad", tokens, graph.op("Concat", graph.indices(0, 0, 0), missing, axis=0))
    columns = graph.op("Shape", tokens, start=1)
    last = graph.op("Sub", lengths, graph.indices(1))
    attended = (graph.op("Cast", last, to=onnx.TensorProto.INT32), graph.op("Cast", columns, to=onnx.TensorProto.INT32))
    chunks = _chunk_values(graph, config, columns, lengths)
    stream = Stream(layers.embed(tokens))
    states: list[SCAValues] = []
    for index, (letter, name) in enumerate(_layers(config)):
        if letter == "S":
            stream, state = layers.sca_prompt(stream, name, chunks)
            states.append(state)
        else:
            stream = layers.attention(stream, name, ("", ""), attended, cache_names(index - len(states)))
    x = graph.op("Add", *stream)
    rows = graph.op("GatherND", x, graph.op("Unsqueeze", logit_columns, graph.indices(-1)), batch_dims=1)
    layers.logits(rows, "logits")
    if with_hidden:
        graph.output(HIDDEN, hidden_shape(config))
        graph.op("Identity", x, into=HIDDEN)
    parts = [(state.sums, state.z, *state.history) for state in states]
    for index, name in enumerate(sca_shapes(config)):
        graph.op("Concat", *(part[index] for part in parts), into=name, axis=0)
    return _build(graph, config, "prompt")


def step_graph(weights: WeightFile, config: ModelConfig, accuracy: int) -> onnx.ModelProto:
    """The graph that reads one more token of every row."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens, positions = (graph.input(name, np.int64, shape) for name, shape in token_shapes("step").items())
    for name, shape in state_shapes(config).items():
        graph.input(PAST + name, np.float32, shape)
    names = [name for letter, name in _layers(config) if letter == "S"]
    history = history_names(config)
    past_history = [PAST + name for name in history]
    past = layers.step_past(names, [PAST + name for name in SUMS], past_history) if names else []
    # The attention operator takes each row's position and the number of columns.
    longest = graph.op("Add", graph.op("ReduceMax", positions, keepdims=1), graph.indices(1))
    attended = (
        graph.op("Cast", positions, to=onnx.TensorProto.INT32),
        graph.op("Cast", longest, to=onnx.TensorProto.INT32),
    )
    float_positions = graph.op("Unsqueeze", graph.op("Cast", positions, to=onnx.TensorProto.FLOAT), graph.indices(1))
    stream = Stream(layers.embed(tokens))
    states: list[StepValues] = []
    for index, (letter, name) in enumerate(_layers(config)):
        if letter == "S":
            stream, state = layers.sca_step(stream, name, past[len(states)], float_positions)
            states.append(state)
        else:
            keys, values = cache_names(index - len(states))
            stream = layers.attention(stream, name, (PAST + keys, PAST + values), attended, (keys, values))
    layers.logits(graph.op("Add", *stream), "logits")
    if states:
        layers.step_state(states, history, past_history)
    return _build(graph, config, "step")


def _layers(config: ModelConfig) -> list[tuple[str, str]]:
    """The letter of each layer of all blocks, and the prefix of its weights' names, in order."""
    return [(letter, f"block_{block}.{name}") for block in range(config.blocks) for letter, name in config.layers]


def _chunk_values(graph: Graph, config: ModelConfig, columns: str, lengths: str) -> ChunkValues:
    """The values that depend only on the number of columns and the prompts' lengths."""
    zero, single = graph.constant(0, np.int64), graph.constant(1, np.int64)
    count = graph.op("Squeeze", columns)
    column_L = graph.op("Range", zero, count, single)
    reach = config.convolution - 1
    # Row b's inputs t = 0 … T-2 before its end are at columns lengths[b] + t of the inputs padded by T-1 on the left.
    recent = graph.op("Add", graph.op("Unsqueeze", lengths, graph.indices(1)), graph.indices(*range(reach)))
    last_BL = graph.op("Equal", column_L, graph.op("Unsqueeze", graph.op("Sub", lengths, single), graph.indices(1)))
    chunk_N = graph.op("Range", zero, graph.op("Div", count, graph.constant(CHUNK, np.int64)), single)
    to_N1, from_1N = (graph.op("Unsqueeze", chunk_N, graph.indices(axis)) for axis in (1, 0))
    distance_NN = graph.op("Sub", graph.op("Sub", to_N1, single), from_1N)
    before_NN = graph.op("GreaterOrEqual", distance_NN, zero)

    def to_float(value: str) -> str:
        return graph.op("Cast", value, to=onnx.TensorProto.FLOAT)

    return ChunkValues(
        positions=graph.op("Unsqueeze", to_float(column_L), graph.indices(0)),
        recent=graph.op("Unsqueeze", recent, graph.indices(-1)),
        last=graph.op("Unsqueeze", to_float(last_BL), graph.indices(1, 2)),
        distance=to_float(graph.op("Max", distance_NN, zero)),
        before=to_float(before_NN),
    )


def _build(graph: Graph, config: ModelConfig, name: str) -> onnx.ModelProto:
    """Declare the outputs and build the model."""
    graph.output("logits", logits_shape(config, name))
    for part, shape in state_shapes(config).items():
        graph.output(part, shape)
    return graph.model(name)
