"""Our speed beside what a user would take instead, each in processes of its own: cold and warm rounds.

    make peers
    python bench/peers.py [training grpo likelihood generation stream tokens duplicates chats large]
        [--repeats 3] [--warm 3] [--json FILE]

training: a step of 16 rows of 128 tokens (a Llama in PyTorch). grpo: a step of 32 prompts by 8, completions of up to 48
tokens (TRL with that Llama). likelihood and generation: 500 multiple-choice items, 200 answers (lm-eval's `hf` backend
on our own export). stream: 128 tokens after a prompt, one client (transformers' `generate` with that Llama). tokens: a
Parquet file to ids on disk (datatrove with the same vocabulary). duplicates: near copies among 10,000 documents, 14
bands of 8, 5-grams (datatrove's four stages). chats: 2,000 requests, 64 at a time, to a server that takes 50 ms and
fails 7 % (a loop over the `openai` client). The model is that of configs/local.toml with random weights, the Llama has
as many parameters and the same vocabulary. large: 64 tokens, one client, by a model of configs/nautile_370m.toml and by
its export at 8 bits, in bytes of weights (llama.cpp with SmolLM2-135M; a plain read of memory): 2 GB of disk and 6 of
memory.

A repeat starts each side once, in turn: its first round is "cold", from the start of the process, imports included;
`--warm` rounds follow. "ours, programs kept" is started with compiled programs, as a stage finds them in its store. One
thread each, since PyTorch's barriers spin on a shared machine; XLA still runs independent operations on several cores.
Medians; processor seconds are the comparable ones on a busy machine, except for `chats`, which waits.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.measure import argument_parser, write_results

ROOT = Path(__file__).parents[1]
PEERS = Path(sys.prefix) / "peers" / "bin" / "python"
KEPT = ", programs kept"
ROWS, LENGTH = 16, 128
PROMPTS, GROUP, TOKENS = 32, 8, 48
CHOICES, ANSWERS, STREAMED, DOCUMENTS = 500, 200, 128, 1200
ORIGINALS, COPIES, CHATS, LARGE_STREAMED = 8000, 2000, 2000, 64
FAULTS, AT_ONCE = {"500": 0.05, "429": 0.02}, 64
LARGE, SMOLLM2 = 371_901_088, 134_515_008  # parameters; a token takes two operations for each

Rounds = Iterator[None]  # one value for each round that is asked for
Done = Callable[..., None]  # told the work that a round has done, in the unit of its row; more figures by name


# Ours: in this environment. The imports are part of a cold start.


def training_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    import jax
    import numpy as np

    from nautile.configs.load import load
    from nautile.model.sharding import make_mesh
    from nautile.model.training.step import BATCH, Program

    config = load("local")
    # Micro-batches that stay in the cache of a core: tuned for one thread, as configs/local.toml is for two.
    pretrain = config.pretrain.model_copy(update={"batch_rows": ROWS, "micro_rows": 4})
    program = Program(pretrain, config.model, make_mesh(1), 1000, 1, LENGTH, 1)
    state = program.fresh()
    batch = {name: np.ones((ROWS, LENGTH), np.float32 if name == "weights" else np.int32) for name in BATCH}
    batch |= {"positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))}
    batch |= {"source": np.zeros(ROWS, np.int32), "bytes": np.full(ROWS, 4 * LENGTH, np.int32)}
    for number, _ in enumerate(rounds):
        tokens = np.random.default_rng(number).integers(0, config.tokenizer.ranks, (ROWS, LENGTH), np.int32)
        state, metrics = program.step(state, batch | {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)})
        jax.block_until_ready(metrics)
        done(tokens.size)


def grpo_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    import jax

    from nautile.configs.load import load
    from nautile.data.tokenizer import tokenizer_for
    from nautile.model.nautile import initialise
    from nautile.model.sharding import make_mesh
    from nautile.rl import objectives
    from nautile.rl.learner import Learner
    from nautile.rl.problems import load as load_problems
    from nautile.rl.rewards import advantages
    from nautile.rl.rollouts import RolloutEngine

    config, mesh = load("local"), make_mesh(1)
    sizes = {"prompts": PROMPTS, "group": GROUP, "max_tokens": TOKENS}
    rollout = config.reason.rollout.model_copy(update=sizes)
    engine = RolloutEngine(config.model, tokenizer_for(config.tokenizer), rollout, 1, mesh)
    balance, params = objectives.Balance.of(config.reason), initialise(config.model, 1)
    learner = Learner(config.model, config.reason.policy, rollout, params, balance, mesh)
    problems = list(enumerate(load_problems(config.reason.problems.model_copy(update={"count": PROMPTS}), 1)))
    for number, _ in enumerate(rounds):
        groups = engine.sample(learner.params, problems, number)
        for group in groups:
            rewards = [float((r.ids % 2 == 0).mean()) for r in group.rollouts]
            for completion, reward, advantage in zip(group.rollouts, rewards, advantages(rewards), strict=True):
                completion.reward, completion.advantage = reward, advantage
        learner.update(groups)
        jax.block_until_ready(learner.trained)
        done(sum(len(completion.ids) for group in groups for completion in group.rollouts))


def likelihood_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    from nautile.configs.load import load
    from nautile.evals.running.runner import CheckpointScorer

    items = choice_items()
    scorer = CheckpointScorer(folder / "checkpoint", load("local").evaluate)
    for _ in rounds:
        scored = [
            row for first in range(0, CHOICES, scorer.batch) for row in scorer.weigh(items[first:][: scorer.batch])
        ]
        done(sum(row is not None for row in scored))


def generation_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    from nautile.configs.load import load
    from nautile.evals.running.answerers import Answer, CheckpointAnswerer

    settings = load("local").evaluate.model_copy(update={"max_tokens": TOKENS, "prompt_length": 200})
    answerer = CheckpointAnswerer(folder / "checkpoint", settings)
    questions = [item.question for item in choice_items()[:ANSWERS]]
    for _ in rounds:
        answers = answerer.answer(questions, [(number,) for number in range(ANSWERS)])
        done(sum(isinstance(answer, Answer) for answer in answers))


def stream_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    from nautile.model.decoding.generate import Generator
    from nautile.model.decoding.sampling import Sampling
    from nautile.model.weights.files import load_weights
    from nautile.rl.rollouts import on_device

    params, model, _ = load_weights(folder / "checkpoint")
    sampling = Sampling(max_tokens=STREAMED, temperature=0.0)
    generator, params = Generator(model, sampling, 1, 64), on_device(params)
    for _ in rounds:
        *_, last = generator.stream(params, list(range(60)), (0,))
        done(len(last.ids))


def tokens_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    from bench.corpus.ingest import ingest
    from nautile.configs.load import load
    from nautile.data.tokens.build import CorpusPlan, DocumentChecks

    plan = CorpusPlan(load("local").tokenizer, "web", 1024, 4096, 0.01)
    for number, _ in enumerate(rounds):
        done(ingest(folder / "web.parquet", plan, DocumentChecks(), folder / f"tokens-{os.getpid()}-{number}")[0])


def duplicates_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    import numpy as np
    import pyarrow.parquet as pq

    from nautile.common.events import silent
    from nautile.data.screening.corpus_copies import HASHES, band_file, find_copies
    from nautile.data.screening.duplicates import minhash_bands, text_hash

    for _ in rounds:
        out = Path(tempfile.mkdtemp(dir=folder))
        texts = pq.read_table(folder / "copies" / "documents.parquet", columns=["text"])["text"].to_pylist()
        np.array([text_hash(text) for text in texts], "<u8").tofile(out / HASHES)
        for band, values in enumerate(minhash_bands(texts).T):
            values.astype("<u8").tofile(out / band_file(band))
        report = find_copies([out], (), out / "settling", silent)
        done(len(texts), dropped=sum(report.dropped.values()))


def chats_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    from bench.corpus.endpoints import ask_pool
    from tests.support.servers.fake_openai import OwnProcess

    server = OwnProcess((folder / "server").read_text(encoding="utf-8"))
    for _ in rounds:
        # A folder of its own: nothing is answered from the replies of an earlier round.
        result = ask_pool(server, CHATS, Path(tempfile.mkdtemp(dir=folder)), concurrency=AT_ONCE, timeout_s=60)
        done(CHATS, answered=result["answered"])


def large_ours(folder: Path, rounds: Rounds, done: Done) -> None:
    from nautile.model.runtimes.load import JaxRuntime
    from nautile.rl.rollouts import on_device

    runtime = JaxRuntime(folder / "large" / "checkpoint")
    runtime.params = on_device(runtime.params)
    large_stream(runtime, folder / "large" / "checkpoint" / "weights.safetensors", rounds, done)


def large_eight_bits(folder: Path, rounds: Rounds, done: Done) -> None:
    from nautile.model.runtimes.onnx_runtime import OnnxRuntime

    export = folder / "large" / "export"
    large_stream(OnnxRuntime(export, threads=1), export / "weights.bin", rounds, done)


def large_stream(runtime: Any, weights: Path, rounds: Rounds, done: Done) -> None:
    """One slot, as `nautile chat` and `serve` have them: weights are arranged once, at the start."""
    import numpy as np

    from nautile.model.decoding.slots import DecodeRequest, slot_settings

    slots, request = runtime.slots((), 0, 1), DecodeRequest((0,), LARGE_STREAMED, temperature=0.0)
    prompt, length = np.arange(32, dtype=np.int32)[None], np.full(1, 32, np.int32)
    slots.start()
    for _ in rounds:
        prefilled, _ = slots.prefill(prompt, length, score=False)
        slots.fill(prefilled, np.zeros(1, np.int32), np.zeros(1, np.int32), slot_settings([request], 0))
        tokens = 0
        while tokens < LARGE_STREAMED:
            tokens += int(slots.advance(np.array([True]), 4).count_B[0])
        done(tokens * weights.stat().st_size / 1e9, tokens=tokens, gflop=tokens * 2 * LARGE / 1e9)


def choice_items() -> list[Any]:
    from nautile.evals.benchmarks.stand_ins import wiki_choice

    return [item for item in wiki_choice(0, 4 * CHOICES) if len(item.question) < 300][:CHOICES]


# Peers that are packages of this environment.


def chats_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    from bench.corpus.endpoints import ask_in_plain_loop
    from tests.support.servers.fake_openai import OwnProcess

    server = OwnProcess((folder / "server").read_text(encoding="utf-8"))
    for _ in rounds:
        done(CHATS, answered=ask_in_plain_loop(server, CHATS, at_once=AT_ONCE, timeout_s=60)["answered"])


def large_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    import httpx
    import xllamacpp

    from nautile.data.endpoints.embedded import model_file

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel = str(model_file()), 512, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.hostnames, parameters.port, parameters.ui, parameters.verbosity = ["127.0.0.1"], 0, False, 1
    server = xllamacpp.Server(parameters)  # in this process: its processor time counts
    request = {"prompt": "The sea is " * 10, "n_predict": LARGE_STREAMED, "ignore_eos": True, "cache_prompt": False}
    for _ in rounds:
        answer = httpx.post(f"{server.listening_address}/completion", json=request, timeout=600, trust_env=False)
        tokens = answer.json()["tokens_predicted"]
        done(tokens * model_file().stat().st_size / 1e9, tokens=tokens, gflop=tokens * 2 * SMOLLM2 / 1e9)


def large_read(folder: Path, rounds: Rounds, done: Done) -> None:
    import numpy as np

    memory = np.ones(2**27, np.uint64)
    for _ in rounds:
        np.bitwise_or.reduce(memory)
        done(memory.nbytes / 1e9)


# The other peers: in the environment of `make peers`, which has none of our packages.


def llama() -> Any:
    """A Llama of as many parameters as configs/local.toml has, and its vocabulary: 0.88 M."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 410, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends = {"bos_token_id": 2048, "eos_token_id": 2050, "pad_token_id": 2048}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2053, max_position_embeddings=256, **shape, **heads, **ends))


def training_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    import torch

    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in rounds:
        tokens = torch.randint(0, 2048, (ROWS, LENGTH))
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done(tokens.numel())


def grpo_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    file, end = str(folder / "export" / "tokenizer.json"), "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token=end, pad_token=end, padding_side="left")
    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    class Ask(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if next(rounds, 0) == 0:
                os._exit(0)  # no further round: nothing of the trainer is to be kept

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done(sum(lengths))

    settings = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=TOKENS, max_steps=1000, beta=0.0, loss_type="dr_grpo", scale_rewards=False, use_cpu=True,
        bf16=False, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, steps_per_generation=1, learning_rate=1e-5,
    )  # fmt: skip
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    data = Dataset.from_dict({"prompt": prompts * 100})
    GRPOTrainer(llama(), reward, settings, data, processing_class=tokenizer, callbacks=[Ask()]).train()


def lm_eval_model(folder: Path) -> Any:
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)
    options = {"trust_remote_code": True, "device": "cpu", "dtype": "float32", "batch_size": 32}
    return HFLM(pretrained=str(folder / "export"), **options)


def likelihood_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    from lm_eval.api.instance import Instance

    model = lm_eval_model(folder)
    rows = json.loads((folder / "choices.json").read_text(encoding="utf-8"))
    requests = [
        Instance("loglikelihood", {}, (question, f" {option}"), number)
        for number, (question, options) in enumerate(rows)
        for option in options
    ]
    for _ in rounds:
        model.loglikelihood(requests, disable_tqdm=True)
        done(len(rows))


def generation_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    from lm_eval.api.instance import Instance

    model = lm_eval_model(folder)
    rows = json.loads((folder / "choices.json").read_text(encoding="utf-8"))[:ANSWERS]
    settings = {"until": ["<|im_end|>"], "max_gen_toks": TOKENS, "do_sample": False}
    requests = [Instance("generate_until", {}, (chat(text), settings), number) for number, (text, _) in enumerate(rows)]
    for _ in rounds:
        model.generate_until(requests, disable_tqdm=True)
        done(len(rows))


def stream_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    import torch

    model = llama().eval()
    prompt = torch.arange(60)[None]
    for _ in rounds:
        with torch.inference_mode():
            whole = model.generate(prompt, max_new_tokens=STREAMED, min_new_tokens=STREAMED, do_sample=False)
        done(whole.shape[1] - prompt.shape[1])


def tokens_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    """datatrove's own pipeline: reader, tokenizer, shuffled ids on disk; the tokenizer is our export's."""
    import logging

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from loguru import logger

    logger.remove()
    logging.disable()
    for number, _ in enumerate(rounds):
        out = folder / f"datatrove-{os.getpid()}-{number}"
        steps = [
            ParquetReader(str(folder), glob_pattern="web.parquet"),
            DocumentTokenizer(
                str(out), tokenizer_name_or_path=str(folder / "export" / "tokenizer.json"), eos_token=None
            ),
        ]
        LocalPipelineExecutor(pipeline=steps, tasks=1, logging_dir=str(out / "log")).run()
        done(sum(file.stat().st_size for file in out.glob("*.ds")) / 2)


def duplicates_peer(folder: Path, rounds: Rounds, done: Done) -> None:
    """datatrove's four stages, each after the one before; nothing writes the documents that are kept."""
    import logging

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.dedup import MinhashDedupSignature as Signature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.utils.hashing import HashConfig
    from loguru import logger

    logger.remove()
    logging.disable()
    # Its default, xxHash of a str, fails with xxhash 4.
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(hash_fc="sha1"))
    for _ in rounds:
        out = tempfile.mkdtemp(dir=folder)
        signatures, pairs, removed = (f"{out}/{name}" for name in ("signatures", "pairs", "removed"))
        reader = ParquetReader(str(folder / "copies"))
        stages: list[tuple[list[Any], int]] = [
            ([reader, Signature(signatures, config)], 1),
            ([MinhashDedupBuckets(signatures, pairs, config=config, only_dedup_in_index=False)], config.num_buckets),
            ([MinhashDedupCluster(pairs, removed, config=config)], 1),
            ([reader, MinhashDedupFilter(removed)], 1),
        ]
        for number, (steps, tasks) in enumerate(stages):
            LocalPipelineExecutor(pipeline=steps, tasks=tasks, workers=1, logging_dir=f"{out}/log-{number}").run()
        dropped = sum(file.stat().st_size // 4 for file in Path(removed).glob("*.remove"))
        done(ORIGINALS + COPIES, dropped=dropped)


def chat(question: str) -> str:
    """The prompt of a question in our chat template."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<|think_start|>"


# unit, our side, peers by name
TABLE: dict[str, tuple[str, Callable[..., None], dict[str, Callable[..., None]]]] = {
    "training": ("tokens", training_ours, {"PyTorch, Llama": training_peer}),
    "grpo": ("tokens", grpo_ours, {"TRL, Llama": grpo_peer}),
    "likelihood": ("items", likelihood_ours, {"lm-eval hf": likelihood_peer}),
    "generation": ("answers", generation_ours, {"lm-eval hf": generation_peer}),
    "stream": ("tokens", stream_ours, {"transformers, Llama": stream_peer}),
    "tokens": ("ids", tokens_ours, {"datatrove": tokens_peer}),
    "duplicates": ("documents", duplicates_ours, {"datatrove": duplicates_peer}),
    "chats": ("chats", chats_ours, {"openai loop": chats_peer}),
    "large": (
        "GB of weights",
        large_ours,
        {"ours, 8 bits": large_eight_bits, "llama.cpp, SmolLM2 Q4_1": large_peer, "plain read": large_read},
    ),
}
UNCOMPILED = ("tokens", "duplicates", "chats")
HERE = ("ours", "openai", "llama.cpp", "plain read")  # how the sides begin that run in this environment


def serve(row: str, side: str, folder: Path) -> None:
    """The worker: a round for each line of standard input; prints its work, seconds, processor seconds and more."""
    _, ours, peers = TABLE[row]
    # What the work prints goes to standard error: standard output is the answers'.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The first round counts from the start of the process.
    begun = [time.perf_counter() - (time.time() - float(os.environ["BEGUN"])), 0.0]

    def rounds() -> Rounds:
        for number, _ in enumerate(sys.stdin):
            if number:
                begun[:] = time.perf_counter(), time.process_time()
            yield None

    def done(work: float, **more: float) -> None:
        figures = work, time.perf_counter() - begun[0], time.process_time() - begun[1], more
        print(json.dumps(figures), file=answers, flush=True)

    (ours if side == "ours" else peers[side])(folder, rounds(), done)


def measure(row: str, side: str, folder: Path, warm: int) -> list[tuple[float, float, float, dict[str, float]]]:
    """Start a side and run its cold round and `warm` others: (work, seconds, processor seconds, more) of each."""
    is_ours = side.startswith("ours")
    single = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "TRANSFORMERS_VERBOSITY": "error"}
    environment = {**os.environ, **single, **offline, "BEGUN": str(time.time()), "PYTHONWARNINGS": "ignore"}
    if is_ours:
        from nautile.tasks.engine.child_process import ALLOCATOR

        kept = folder / f"compiled-{row}" if side.endswith(KEPT) else Path(tempfile.mkdtemp(dir=folder))
        environment |= ALLOCATOR | {
            "JAX_COMPILATION_CACHE_DIR": str(kept),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
    command = [
        str(sys.executable if side.startswith(HERE) else PEERS),
        __file__,
        "--serve",
        row,
        side.removesuffix(KEPT),
        str(folder),
    ]
    log = folder / "errors.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        figures = []
        for _ in range(1 + warm):
            process.stdin.write("\n")
            process.stdin.flush()
            if not (line := process.stdout.readline()):
                raise SystemExit(f"{row}, {side}, has ended: {log.read_text()[-3000:]}")
            figures.append(tuple(json.loads(line)))
        process.kill()
        process.wait()
    return figures


def write_copies(path: Path, originals: int, copies: int) -> None:
    """A Parquet file of documents of 200 words, the last of them copies in which one to five words are others.

    A copy shares 90 to 64 % of all 5-grams with its original (Jaccard), and none with any other document.
    """
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(1)
    syllables = ["ba", "ko", "ti", "mer", "lan", "sto", "vi", "der", "na", "ck"]
    words = [a + b + c for a in syllables for b in syllables for c in syllables]
    texts = [draw.choices(words, k=200) for _ in range(originals)]
    for number in range(copies):
        texts.append(list(texts[number]))
        for place in draw.sample(range(200), 1 + number % 5):
            texts[-1][place] = "another"
    rows = {"id": [str(number) for number in range(len(texts))], "text": [" ".join(text) for text in texts]}
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table(rows), path)


def prepare(folder: Path, rows: Collection[str], servers: ExitStack) -> None:
    """A checkpoint with random weights, its export, texts and servers, which both sides read and ask."""
    if "duplicates" in rows:
        write_copies(folder / "copies" / "documents.parquet", ORIGINALS, COPIES)
    if "chats" in rows:
        from tests.support.servers.fake_openai import own_process

        server = servers.enter_context(own_process(faults=FAULTS, delay_s=0.05))
        (folder / "server").write_text(server.url, encoding="utf-8")
    if "large" in rows:  # in processes of their own, so that this one keeps nothing of it in memory
        checkpoint, export = folder / "large" / "checkpoint", folder / "large" / "export"
        writer = [str(ROOT / "bench" / "decoding" / "serving.py"), str(checkpoint), "--shape", "nautile_370m"]
        exporter = ["-m", "nautile.flows.cli.main", "export", str(checkpoint), str(export)]
        for arguments in (writer, [*exporter, "--format", "onnx", "--bits", "8"]):
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    if set(rows) <= {"duplicates", "chats", "large"}:
        return
    import jax

    from bench.corpus.ingest import documents, write_web
    from nautile.configs.load import load
    from nautile.data.sources.wikipedia import articles
    from nautile.model.exports.transformers.export import export_transformers
    from nautile.model.nautile import initialise
    from nautile.model.weights.files import save_weights
    from nautile.rl.problems import load as load_problems

    config = load("local")
    params = jax.jit(initialise, static_argnums=0)(config.model, 0)
    save_weights(folder / "checkpoint", params, config.model, config.tokenizer)
    export_transformers(folder / "checkpoint", folder / "export")
    items = [(item.question, list(item.options)) for item in choice_items()]
    (folder / "choices.json").write_text(json.dumps(items), encoding="utf-8")
    problems = load_problems(config.reason.problems.model_copy(update={"count": PROMPTS}), 1)
    (folder / "prompts.json").write_text(json.dumps([chat(problem.question) for problem in problems]), encoding="utf-8")
    assert len(articles(0)) >= DOCUMENTS
    write_web(folder / "web.parquet", documents(DOCUMENTS, 1))


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    parser = argument_parser(__doc__, repeats=3, warm=3)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(TABLE))
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(TABLE):
        parser.error(f"no row {', '.join(sorted(unknown))}: the rows are {', '.join(TABLE)}")
    rows = arguments.rows or list(TABLE)
    if min(arguments.repeats, arguments.warm) < 1:
        parser.error("--repeats and --warm are 1 or more")
    if not PEERS.exists() and any(not side.startswith(HERE) for row in rows for side in TABLE[row][2]):
        parser.error(f"there is no {PEERS}: `make peers` makes it")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder = Path(name)
        prepare(folder, rows, servers)
        for row in rows:
            unit, _, peers = TABLE[row]
            sides = ["ours", *(["ours" + KEPT] if row not in UNCOMPILED else []), *peers]
            if row not in UNCOMPILED:
                measure(row, "ours" + KEPT, folder, 0)  # compiles what the others find
            figures: dict[str, list[Any]] = {side: [] for side in sides}
            for _ in range(arguments.repeats):
                for side in sides:
                    figures[side].append(measure(row, side, folder, arguments.warm))
            for side, runs in figures.items():
                cold = [statistics.median(run[0][place] for run in runs) for place in (1, 2)]
                later = [one for run in runs for one in run[1:]]
                warm = [statistics.median(one[place] for one in later) for place in (1, 2)]
                rates = [one[0] / one[2] for one in later]
                more = {name: statistics.median(one[3][name] for run in runs for one in run) for name in runs[0][0][3]}
                results.append(
                    {"row": row, "side": side, "cold_s": round(cold[0], 2), "cold_processor_s": round(cold[1], 2),
                     "warm_s": round(warm[0], 3), "warm_processor_s": round(warm[1], 3), "unit": unit,
                     "per_processor_s": round(statistics.median(rates), 1),
                     "range": [round(min(rates), 1), round(max(rates), 1)], **more}
                )  # fmt: skip
                print(*(f"{key} {value}" for key, value in results[-1].items()), sep="  ", flush=True)
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
