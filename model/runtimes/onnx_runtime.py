"""The onnxruntime runtime, for ONNX exports, on CPU. Tokens are sampled by the same code as with JAX.

Letters as in `model.exports.onnx.graphs`; R rows of prompts, P their columns.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from scipy.special import log_softmax

from nautile.common.errors import ConfigError
from nautile.common.processes import bounded_memory
from nautile.common.text import first_line
from nautile.configs.model import ModelConfig
from nautile.model.decoding.generate import Sampled, refuse_over_context
from nautile.model.decoding.sampling import Sampling, likeliest, only_allowed
from nautile.model.decoding.scoring import Group, Pooling, refuse_unreadable, refuse_unscorable
from nautile.model.decoding.slots import (
    MAX_PROMPT_ALTERNATIVES,
    DecodeRequest,
    PrefilledPrompts,
    PrefillScores,
    SlotOutput,
    SlotSettings,
    draw_tokens,
    fill_slots,
    slot_settings,
    slots_without_caches,
)
from nautile.model.exports.onnx.folder import PROMPT, STEP, WEIGHTS, check_digests
from nautile.model.exports.onnx.signature import (
    CHUNK,
    HIDDEN,
    PAST,
    Shape,
    attention_layers,
    hidden_shape,
    logits_shape,
    sca_shapes,
    state_shapes,
    token_shapes,
)
from nautile.model.weights.files import CONFIG, read_config

STREAM_STRIDE = 4  # tokens per part of a streamed reply

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class PromptState:
    """The result of the prompt graph for some prompts: last logits [R, V], state, and lengths."""

    logits_RV: np.ndarray
    state: State
    lengths_R: np.ndarray


class OnnxRuntime:
    """The runtime for the export in `folder`.

    threads: of onnxruntime; 0: one per core. Raises ConfigError if the folder is no ONNX export, if a file is missing
    or changed, or if the graphs do not fit the configuration.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        facts = check_digests(folder)
        self.config, self.tokenizer = read_config(folder / CONFIG)
        self.name = f"onnx {facts['bits']} bits {facts['weights_sha256'][:12]}"
        self.prompt, self.step = load_sessions(folder, self.config, threads)

    def sampler(self, sampling: Sampling, rows: int, prompt_length: int) -> "OnnxSampler":
        refuse_over_context(self.config, sampling, prompt_length)
        return OnnxSampler(self, sampling, rows, prompt_length)

    def slots(self, stops: tuple[int, ...], think_end: int, count: int, longest: int | None = None) -> "OnnxSlots":
        return OnnxSlots(self, stops, think_end, count)

    def scorer(self, rows: int) -> "OnnxScorer":
        return OnnxScorer(self, rows)

    def read_prompts(self, tokens_RP: np.ndarray, lengths_R: np.ndarray, columns_RW: np.ndarray) -> tuple[Any, State]:
        """Run prompts padded on the right: logits [R, W, V] of the columns `columns_RW`, and the state."""
        inputs = {"tokens": tokens_RP, "lengths": lengths_R, "logit_columns": columns_RW}
        names = [output.name for output in self.prompt.get_outputs() if output.name != HIDDEN]
        arrays = self.prompt.run(names, {name: array.astype(np.int64) for name, array in inputs.items()})
        state = dict(zip(names, arrays, strict=True))
        return state.pop("logits"), state

    def pooled_states(self, texts: Sequence[Sequence[int]], rows: int, pooling: Pooling) -> np.ndarray:
        """As `model.decoding.scoring.pooled_states`: features for a head, float32 [texts, D], and the errors."""
        states = self.token_states(texts, rows)
        return np.stack([state_SD.mean(axis=0) if pooling == "mean" else state_SD[-1] for state_SD in states])

    def token_states(self, texts: Sequence[Sequence[int]], rows: int) -> list[np.ndarray]:
        """As `model.decoding.scoring.token_states`: the hidden states of each text, float32 [tokens, D].

        One text at a time, whatever `rows`: the matrix products of its tokens already keep the cores busy. Raises
        ConfigError for a text that is empty or over the context, and if the graphs have no output of hidden states.
        """
        if not any(output.name == HIDDEN for output in self.prompt.get_outputs()):
            raise ConfigError(f"{self.name}: gives no hidden states for a head; export the tuned checkpoint again")
        states = []
        for number, ids in enumerate(texts, 1):
            refuse_unreadable(number, len(ids), self.config)
            inputs = {"tokens": [ids], "lengths": [len(ids)], "logit_columns": [[len(ids) - 1]]}
            feeds = {name: np.array(values, np.int64) for name, values in inputs.items()}
            [[hidden_SD]] = self.prompt.run([HIDDEN], feeds)
            states.append(hidden_SD[: len(ids)])
        return states


class OnnxSlots:
    """`model.decoding.slots.SlotPrograms` with the two graphs.

    Only the slots up to the last one in use are computed. No state is copied between steps: keys and values are written
    in place, and the sums alternate between two sets of arrays (double buffering).
    """

    def __init__(self, runtime: OnnxRuntime, stops: tuple[int, ...], think_end: int, count: int) -> None:
        self.config, self.count, self.stops = runtime.config, count, stops
        self.lengths: tuple[int, ...] = ()
        self._runtime, self._think_end = runtime, think_end
        self._draw = jax.jit(draw_tokens, static_argnames=("config", "stops", "think_end"))

    def start(self) -> None:
        self._slots = slots_without_caches(self.config, self.count)
        self._logits_BV = np.zeros((self.count, self.config.vocabulary), np.float32)
        shapes = {
            part.name.removeprefix(PAST): part.shape
            for part in self._runtime.step.get_inputs()
            if part.name.startswith(PAST)
        }
        self._sums_shapes = {name: shape for name, shape in shapes.items() if name in sca_shapes(self.config)}
        self._caches: State = {}
        # Keys and values for the whole context; the sums are allocated by `_bind_rows`.
        for name in shapes.keys() - self._sums_shapes:
            self._caches[name] = np.zeros(
                _concrete_shape(shapes[name], B=self.count, S=self.config.context), np.float32
            )
        self._rows = 0
        self._bound_steps: list[_BoundStep] = []
        self._bind_rows(1)

    def _bind_rows(self, rows: int) -> None:
        """Allocate contiguous sums for the first `rows` slots, copy the present ones, and bind both steps to them.

        Binding and copying inputs and outputs at every step took 0.8 ms per token.
        """
        earlier, count = self._bound_steps[0].past if self._bound_steps else {}, min(rows, self._rows)
        sets = [
            {name: np.zeros(_concrete_shape(shape, B=rows), np.float32) for name, shape in self._sums_shapes.items()}
            for _ in range(2)
        ]
        for name, array in earlier.items():
            sets[0][name][:, :count] = array[:, :count]
        self._rows = rows
        self._tokens_B1, self._positions_B = np.zeros((rows, 1), np.int64), np.zeros(rows, np.int64)
        self._bound_steps = [self._bind_step(*pair) for pair in (sets, sets[::-1])]

    def _bind_step(self, past: State, after: State) -> "_BoundStep":
        """Bind a step that reads the sums `past` and writes the sums `after`."""
        binding = self._runtime.step.io_binding()

        def bind(bound: Callable[..., None], name: str, array: np.ndarray, shape: tuple[int, ...] = ()) -> None:
            bound(name, "cpu", 0, array.dtype.type, shape or array.shape, array.ctypes.data)

        bind(binding.bind_input, "tokens", self._tokens_B1)
        bind(binding.bind_input, "positions", self._positions_B)
        bind(binding.bind_output, "logits", self._logits_BV, (self._rows, 1, self.config.vocabulary))
        for name in past:
            bind(binding.bind_input, PAST + name, past[name])
            bind(binding.bind_output, name, after[name])
        for name, array in self._caches.items():
            bind(binding.bind_input, PAST + name, array[: self._rows])
            bind(binding.bind_output, name, array[: self._rows])
        return _BoundStep(past, binding)

    def prepare(self, rows: Sequence[int]) -> Iterator[Any]:
        return iter(())  # nothing is compiled

    def prefill(
        self, tokens_BP: np.ndarray, lengths_B: np.ndarray, score: bool
    ) -> tuple[PromptState, PrefillScores | None]:
        lengths_B = np.asarray(lengths_B)
        # The engine aligns prompts on the right, the graph takes them on the left.
        # Rotated by its own length, a right-aligned row begins with its prompt.
        padded_BP = np.stack([np.roll(row, length) for row, length in zip(tokens_BP, lengths_B, strict=True)])
        columns_BW = lengths_B[:, None] - 1
        if score:
            columns_P = np.arange(padded_BP.shape[1])
            columns_BW = np.minimum(columns_P, columns_BW)
        logits_BWV, state = self._runtime.read_prompts(padded_BP, lengths_B, columns_BW)
        scores = _scores(logits_BWV, padded_BP, lengths_B) if score else None
        return PromptState(logits_BWV[:, -1], state, lengths_B), scores

    def fill(self, prefilled: PromptState, source_R: np.ndarray, slots_R: np.ndarray, settings: SlotSettings) -> None:
        real_R = slots_R < self.count
        self.place(prefilled, source_R[real_R], slots_R[real_R])
        rows = PrefilledPrompts((), jnp.zeros((len(prefilled.lengths_R), 0)), jnp.asarray(prefilled.lengths_R))
        self._slots = fill_slots(self._slots, rows, source_R, slots_R, settings)

    def place(self, prefilled: PromptState, source: np.ndarray, slots: np.ndarray) -> None:
        """Copy the logits and the state of prompt `source[r]` to slot `slots[r]`."""
        if not len(slots):
            return
        # The arrays grow to the last slot in use, and shrink with the next step that needs fewer.
        if slots.max() >= self._rows:
            self._bind_rows(int(slots.max()) + 1)
        self._logits_BV[slots] = prefilled.logits_RV[source]
        for name, array in prefilled.state.items():
            if name in self._caches:
                columns = min(array.shape[2], self.config.context)
                self._caches[name][slots, :, :columns] = array[source, :, :columns]
            else:
                self._bound_steps[0].past[name][:, slots] = array[:, source]

    def advance(self, occupied_B: np.ndarray, stride: int, allowed_BW: np.ndarray | None = None) -> SlotOutput:
        slots = self._slots._replace(active_B=self._slots.active_B & occupied_B)
        steps: list[tuple[np.ndarray, ...]] = []
        counts = np.zeros(self.count, np.int32)
        while len(steps) < stride and (active_B := np.asarray(slots.active_B)).any():
            positions_B = np.asarray(slots.positions_B)
            logits_BV = self._logits_BV if allowed_BW is None else only_allowed(self._logits_BV, allowed_BW)
            sampled, slots = self._draw(slots, logits_BV, self.config, self.stops, self._think_end)
            steps.append(tuple(map(np.asarray, sampled)))
            counts += active_B
            if np.asarray(slots.active_B).any():
                self.run(steps[-1][0], positions_B, int(active_B.nonzero()[0][-1]) + 1)
        self._slots = slots
        if not steps:
            return SlotOutput._make(
                (counts, np.zeros(self.count, bool), *(np.zeros((0, self.count)) for _ in range(4)))
            )
        stacked = (np.stack(part) for part in zip(*steps, strict=True))
        return SlotOutput._make((counts, np.asarray(slots.active_B), *stacked))

    def run(self, ids_B: np.ndarray, positions_B: np.ndarray, rows: int) -> np.ndarray:
        """Run one token of each of the first `rows` slots; return the logits after it, float32 [slots, V]."""
        if rows != self._rows:
            self._bind_rows(rows)
        self._tokens_B1[:, 0] = ids_B[:rows]
        # The position of an idle slot may be past the last column; what it writes there is overwritten on refill.
        self._positions_B[:] = np.minimum(positions_B[:rows], self.config.context - 1)
        self._runtime.step.run_with_iobinding(self._bound_steps[0].binding)
        # What this step wrote is what the next one reads.
        self._bound_steps.reverse()
        return self._logits_BV


@dataclass(frozen=True)
class _BoundStep:
    """A step bound to read one set of sums, `past`, and write the other."""

    past: State
    binding: Any


def _concrete_shape(shape: Shape, **sizes: int) -> tuple[int, ...]:
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


class OnnxScorer:
    """`model.decoding.scoring.SharedPrefixScorer` for onnxruntime, `rows` continuations at a time.

    Each context is read once and its state copied to its continuations, which are run token by token.
    """

    def __init__(self, runtime: OnnxRuntime, rows: int) -> None:
        self._slots, self._rows = runtime.slots((), 0, rows), rows
        self._slots.start()

    def logprobs(self, beginning: Sequence[int], groups: Sequence[Group]) -> list[np.ndarray]:
        """Σ log p(continuation | beginning + context) in nats, float64 [continuations] for each group.

        Raises ConfigError for a group over the model's context.
        """
        return [self._group([*beginning, *context], continuations) for context, continuations in groups]

    def _group(self, prompt: list[int], continuations: Sequence[Sequence[int]]) -> np.ndarray:
        refuse_unscorable("a context", len(prompt) + max(map(len, continuations)), len(prompt), self._slots.config)
        prefilled, _ = self._slots.prefill(np.array([prompt]), np.array([len(prompt)]), score=False)
        first_V = log_softmax(prefilled.logits_RV[0].astype(np.float64))
        sums = np.array([first_V[ids[0]] if ids else 0.0 for ids in continuations], np.float64)
        # The first tokens are scored from the prompt's logits; only longer continuations are run.
        longer = [place for place, ids in enumerate(continuations) if len(ids) > 1]
        for start in range(0, len(longer), self._rows):
            batch = longer[start : start + self._rows]
            self._slots.place(prefilled, np.zeros(len(batch), int), np.arange(len(batch)))
            for step in range(max(len(continuations[place]) for place in batch) - 1):
                # A continuation that has ended repeats its last token; its logits are not used.
                columns = [min(step, len(continuations[place]) - 2) for place in batch]
                ids_B = np.array([continuations[place][column] for place, column in zip(batch, columns, strict=True)])
                positions_B = len(prompt) + np.array(columns)
                logprobs_BV = log_softmax(self._slots.run(ids_B, positions_B, len(batch))[: len(batch)], axis=-1)
                for row, place in enumerate(batch):
                    if step + 1 < len(continuations[place]):
                        sums[place] += logprobs_BV[row, continuations[place][step + 1]]
        return sums


class OnnxSampler:
    """Samples with fixed settings, with slots: a slot whose sample has ended takes the next prompt."""

    def __init__(self, runtime: OnnxRuntime, sampling: Sampling, rows: int, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self._runtime, self._sampling, self._rows = runtime, sampling, rows

    def __call__(self, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]) -> list[Sampled]:
        samples = dict(self._decode(prompts, seeds))  # later, longer versions of a sample replace earlier ones
        return [samples[index] for index in range(len(prompts))]

    def stream(self, prompt: Sequence[int], seed: tuple[int, ...]) -> Iterator[Sampled]:
        for _, sample in self._decode([prompt], [seed]):
            yield sample

    def _decode(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[int, Sampled]]:
        """Yield (index of the prompt, sample so far) each time a sample has grown."""
        sampling, count = self._sampling, min(self._rows, len(prompts))
        if not prompts:
            return
        slots = self._runtime.slots(sampling.stop_ids, sampling.think_end or 0, count)
        slots.start()
        waiting = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index), reverse=True)
        members: list[int | None] = [None] * count
        samples: dict[int, Sampled] = {}
        while waiting or any(member is not None for member in members):
            # Fill free slots, the shortest prompts first.
            for slot in [slot for slot, member in enumerate(members) if member is None][: len(waiting)]:
                members[slot] = chosen = waiting.pop()
                self._fill(slots, slot, prompts[chosen], seeds[chosen])
            output = slots.advance(np.array([member is not None for member in members]), STREAM_STRIDE)
            for slot, index in enumerate(members):
                if index is None:
                    continue
                written = output.count_B[slot]
                ids, logprobs = (
                    np.asarray(output.ids_TB[:written, slot]),
                    np.asarray(output.logprobs_TB[:written, slot]),
                )
                if index in samples:
                    ids = np.concatenate([samples[index].ids, ids])
                    logprobs = np.concatenate([samples[index].logprobs, logprobs])
                samples[index] = Sampled(ids, logprobs, int(ids[-1]) not in sampling.stop_ids)
                if not output.active_B[slot]:
                    members[slot] = None
                yield index, samples[index]

    def _fill(self, slots: OnnxSlots, slot: int, prompt: Sequence[int], seed: tuple[int, ...]) -> None:
        """Prefill one prompt: the matrix products of its tokens already keep the cores busy."""
        sampling = self._sampling
        request = DecodeRequest(
            tuple(prompt), sampling.max_tokens, seed, sampling.temperature, sampling.top_k, sampling.top_p,
            sampling.thinking_budget,
        )  # fmt: skip
        prefilled, _ = slots.prefill(np.array([prompt]), np.array([len(prompt)]), score=False)
        slots.fill(prefilled, np.zeros(1, np.int32), np.full(1, slot, np.int32), slot_settings([request], 0))


def _scores(logits_BPV: np.ndarray, tokens_BP: np.ndarray, lengths_B: np.ndarray) -> PrefillScores:
    """log p of each token after the first, aligned on the right, from logits of prompts padded on the right."""
    logits = jnp.asarray(logits_BPV[:, :-1])
    total_BP = jax.nn.logsumexp(logits, axis=-1)
    chosen_BP = jnp.take_along_axis(logits, jnp.asarray(tokens_BP[:, 1:, None]), axis=-1)[..., 0]
    values, ids = likeliest(logits, min(MAX_PROMPT_ALTERNATIVES, logits.shape[-1]))
    parts = (chosen_BP - total_BP, ids, values - total_BP[..., None])
    shifts_B = tokens_BP.shape[1] - lengths_B

    def align_right(part: jax.Array) -> np.ndarray:
        return np.stack([np.roll(row, shift, 0) for row, shift in zip(np.asarray(part), shifts_B, strict=True)])

    return PrefillScores(*map(align_right, parts))


FREE_BYTES, THREAD_BYTES = 2**30, 2**27  # memory allowed for loading, besides the weights: in total, and per core
_SILENT = 4  # log level: onnxruntime raises its errors, and would also log them


def load_sessions(
    folder: Path, config: ModelConfig, threads: int
) -> tuple[onnxruntime.InferenceSession, onnxruntime.InferenceSession]:
    """Load the graphs of the export in `folder`, after checking that they are those of the model: prompt and step.

    Digests show that a folder is unchanged, not who wrote it. So the graphs are scanned before loading, compared with
    the configuration, and run for one token in limited memory: a graph could allocate any amount. threads: of
    onnxruntime; 0: one per core. Raises ConfigError if the graphs do not fit the configuration.
    """
    for name in (PROMPT, STEP):
        check_graph(folder / name, WEIGHTS)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _SILENT
    # Each session holds its own packed copy of the weights.
    limit = 4 * (folder / WEIGHTS).stat().st_size + FREE_BYTES + (os.cpu_count() or 1) * THREAD_BYTES
    try:
        with bounded_memory(limit):
            prompt, step = (
                onnxruntime.InferenceSession(
                    folder / name, options, providers=["CPUExecutionProvider"], enable_fallback=0
                )
                for name in (PROMPT, STEP)
            )
            for name, session in (("prompt", prompt), ("step", step)):
                _check_signature(session, config, name)
                _check_token(session, config, name)
    except Exception as error:  # onnxruntime's own errors have no common type
        cause = "not enough memory" if isinstance(error, MemoryError) else first_line(error)
        raise ConfigError(f"{folder}: onnxruntime cannot run it ({cause}); export the checkpoint again") from None
    return prompt, step


def _check_signature(session: onnxruntime.InferenceSession, config: ModelConfig, graph: str) -> None:
    """Raise ValueError unless names, types and shapes are those of this model."""
    graph_inputs, graph_outputs = session.get_inputs(), session.get_outputs()
    has_hidden = graph == "prompt" and any(output.name == HIDDEN for output in graph_outputs)
    # Checked first, because a configuration may name any number of blocks.
    if len(graph_outputs) != 1 + has_hidden + 2 * attention_layers(config) + len(sca_shapes(config)):
        raise ValueError(f"the {graph} graph has {len(graph_outputs)} outputs, not those of {config.blocks} blocks")
    state = state_shapes(config)
    inputs = {name: ("tensor(int64)", shape) for name, shape in token_shapes(graph).items()}
    if graph == "step":
        inputs |= {PAST + name: ("tensor(float)", shape) for name, shape in state.items()}
    outputs = {
        name: ("tensor(float)", shape) for name, shape in {"logits": logits_shape(config, graph), **state}.items()
    }
    if has_hidden:
        outputs[HIDDEN] = ("tensor(float)", hidden_shape(config))
    for kind, values, expected in (("input", graph_inputs, inputs), ("output", graph_outputs, outputs)):
        actual = {value.name: (value.type, tuple(value.shape)) for value in values}
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise ValueError(
                    f"{kind} {name[:40]!r} of the {graph} graph is {_describe(actual.get(name))}, and the model in "
                    f"config.json has {_describe(expected.get(name))}"
                )


def _check_token(session: onnxruntime.InferenceSession, config: ModelConfig, graph: str) -> None:
    """Run a graph for the last token of a context; raise ValueError if an output lacks the declared shape."""
    sizes = {"B": 1, "L": 1, "P": 1, "S": CHUNK if graph == "prompt" else config.context}
    feeds: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        dtype = np.int64 if value.type == "tensor(int64)" else np.float32
        feeds[value.name] = np.zeros(_concrete_shape(value.shape, **sizes), dtype)
    # One token: of a prompt the first, and of a step the last of the context, whose state has all columns.
    if graph == "prompt":
        feeds["lengths"] += 1
    else:
        feeds["positions"] += config.context - 1
    outputs = session.get_outputs()
    for value, array in zip(outputs, session.run([value.name for value in outputs], feeds), strict=True):
        if array.shape != _concrete_shape(value.shape, **sizes):
            raise ValueError(
                f"output {value.name[:40]!r} of the {graph} graph has the shape {array.shape}, not {value.shape}"
            )


def _describe(value: tuple[str, Shape] | None) -> str:
    return "none" if value is None else f"{value[0]} {list(value[1])}"


LARGEST_GRAPH = 2**26  # bytes; the graphs of the published model have 0.3 MB
OPERATORS = {
    "Add", "BitShift", "BitwiseAnd", "Cast", "Clip", "Concat", "Cos", "Div", "Equal", "Exp", "Gather",
    "GatherBlockQuantized", "GatherND", "Gemm", "GreaterOrEqual", "GroupQueryAttention", "Identity", "MatMul",
    "MatMulNBits", "Max", "Mod", "Mul", "Neg", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean",
    "ReduceSum", "Reshape", "Shape", "Sigmoid", "Sin", "SkipSimplifiedLayerNormalization", "Slice", "Softplus",
    "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
_DOMAINS = {"", "ai.onnx", "com.microsoft"}
_GRAPH, _TRAINING, _FUNCTION = 7, 20, 25  # of ModelProto
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15  # of GraphProto
_OPERATOR, _ATTRIBUTE, _DOMAIN = 4, 5, 7  # of NodeProto
_PLAIN_ATTRIBUTE = {1, 2, 3, 4, 7, 8, 9, 13, 20}  # of AttributeProto: names, numbers and texts
_EXTERNAL = 13  # of TensorProto


def check_graph(path: Path, weights: str) -> None:
    """Raise ConfigError unless `path` has only the operators of an export, and external arrays only in `weights`.

    Checked before onnxruntime opens the file: an untrusted folder may hold any graph. An exported one has no subgraph
    (so no loops). The format is protobuf; the numbers above are the field numbers of onnx.proto.
    """
    size = path.stat().st_size
    if size > LARGEST_GRAPH:
        raise ConfigError(f"{path}: has {size:,} bytes, more than any exported graph; export the checkpoint again")
    try:
        _check_model(memoryview(path.read_bytes()), weights)
    except ValueError as error:
        raise ConfigError(f"{path}: is not a graph of an export ({error}); export the checkpoint again") from None


def _check_model(model: memoryview, weights: str) -> None:
    graphs = 0
    for field, value in _fields(model):
        if field in (_TRAINING, _FUNCTION):
            raise ValueError("it defines functions of its own")
        if field == _GRAPH:
            graphs += 1
            for inner, part in _fields(_message(value)):
                if inner == _NODE:
                    _check_node(_message(part))
                elif inner == _INITIALIZER:
                    _check_array(_message(part), weights)
                elif inner == _SPARSE:
                    raise ValueError("it has sparse arrays")
    if graphs != 1:
        raise ValueError(f"it has {graphs} graphs")


def _check_node(node: memoryview) -> None:
    for field, value in _fields(node):
        if field == _OPERATOR and (name := _text(value)) not in OPERATORS:
            raise ValueError(f"it has the operator {name[:40]!r}, which no export has")
        if field == _DOMAIN and (domain := _text(value)) not in _DOMAINS:
            raise ValueError(f"it has operators of {domain[:40]!r}")
        if field == _ATTRIBUTE and not {inner for inner, _ in _fields(_message(value))} <= _PLAIN_ATTRIBUTE:
            raise ValueError("an attribute is a graph or an array")


def _check_array(array: memoryview, weights: str) -> None:
    for field, value in _fields(array):
        if field != _EXTERNAL:
            continue
        entry = {inner: _text(text) for inner, text in _fields(_message(value))}
        if entry.get(1) == "location" and entry.get(2) != weights:
            raise ValueError(f"an array is in the file {entry.get(2, '')[:80]!r}, not in {weights}")


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The field numbers and values of a protobuf message. Raises ValueError if it is truncated or no message."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield key >> 3, value
            continue
        # Wire types: 0 varint, 1 fixed 64 bits, 2 length-delimited, 5 fixed 32 bits.
        if kind not in (1, 2, 5):
            raise ValueError("it is no protobuf message")
        size, position = _varint(message, position) if kind == 2 else (8 if kind == 1 else 4, position)
        if position + size > len(message):
            raise ValueError("it is cut off")
        yield key >> 3, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    # Ten bytes of seven bits each hold any number of 64 bits.
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("it is cut off")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is no protobuf message of a model")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode("utf-8")
