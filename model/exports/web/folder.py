"""Export to a web page (`nautile export --format web`): a chat, or the labels of a text by a tuned checkpoint.

It runs offline, with onnxruntime's WebAssembly.

The runtime is downloaded once from the npm registry, at the version and digest below, into the cache folder.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import write_text
from nautile.configs.model import ModelConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.label_set import HEAD, LabelSet, load_head, read_label_set, reading_of
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.exports.onnx.folder import PROMPT, STEP, WEIGHTS, export_onnx
from nautile.model.weights.files import CONFIG, read_config, read_digests, refuse_occupied, write_digests

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # sha512
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
COMMON = ("page.css", "model.mjs", "tokenizer.mjs")
CHAT = {"index.html": "index.html", "page.mjs": "page.mjs"}  # the names in the export, and here
CLASSIFIER = {"index.html": "classifier.html", "classifier.mjs": "classifier.mjs"}
FETCH_S = 300


def export_web(checkpoint: Path, out: Path, bits: int = 32) -> list[Path]:
    """Export a checkpoint folder as static files: the page, the runtime and the model, in the new or empty `out`.

    Raises ConfigError as `export_onnx` does, or if npm is missing or its file has another digest; Retryable if npm
    cannot download it.
    """
    refuse_occupied(out)
    labels = read_label_set(checkpoint)
    if labels is not None and labels.form == "entities" and labels.classes:
        raise ConfigError(
            f"--format web: {checkpoint} labels the tokens of a text, for which there is no page; use --format "
            "transformers or nautile"
        )
    model, tokenizer_config = read_config(checkpoint / CONFIG)
    tokenizer = tokenizer_for(tokenizer_config)
    # Computed here, so that nothing is written of a classifier that cannot be read.
    classifier = _classifier(checkpoint, labels, tokenizer, model) if labels and labels.classes else None
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "onnx"
        export_onnx(checkpoint, exported, bits)
        archive = fetch_runtime()
        out.mkdir(parents=True, exist_ok=True)
        digests = read_digests(exported)
        graphs = (PROMPT, WEIGHTS) if classifier else (PROMPT, STEP, WEIGHTS)
        for name in graphs:
            shutil.move(exported / name, out / name)
    with tarfile.open(archive) as package:
        for name in RUNTIME:
            source = package.extractfile(f"package/dist/{name}")
            assert source is not None  # the archive has the expected digest
            (out / name).write_bytes(source.read())
    files = {**dict(zip(COMMON, COMMON, strict=True)), **(CLASSIFIER if classifier else CHAT)}
    for name, source_name in files.items():
        shutil.copyfile(Path(__file__).parent / source_name, out / name)
    settings = {**_tokens(tokenizer), "context": model.context}
    settings |= {"classifier": classifier} if classifier else _chat(tokenizer, model.context)
    write_text(out / "settings.json", json.dumps(settings, ensure_ascii=False) + "\n")
    write_digests(out, {name: digests[name] for name in graphs})
    return sorted(out.iterdir())


def fetch_runtime() -> Path:
    """The path of the runtime's archive, from the cache or downloaded by npm, verified by its digest."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nautile"
    path = cache / f"{PACKAGE}-{VERSION}.tgz"
    if path.is_file() and _digest(path) == INTEGRITY:
        return path
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(
            f"--format web: npm, which downloads {PACKAGE} {VERSION}, is not installed; install it, or put the "
            f"package's archive at {path}"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--silent", "--pack-destination", scratch]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False, cwd=scratch)
        except subprocess.TimeoutExpired:
            raise Retryable(f"--format web: npm did not fetch {PACKAGE} {VERSION} within {FETCH_S} s") from None
        fetched = Path(scratch) / path.name
        if process.returncode or not fetched.is_file():
            lines = process.stderr.strip().splitlines()
            cause = lines[0] if lines else f"exit code {process.returncode}"
            raise Retryable(f"--format web: npm could not fetch {PACKAGE} {VERSION} ({cause})")
        if _digest(fetched) != INTEGRITY:
            raise ConfigError(
                f"--format web: the file that npm downloaded is not {PACKAGE} {VERSION} (its sha512 differs)"
            )
        fetched.replace(path)  # atomic: another process sees the whole archive or none
    return path


def _tokens(tokenizer: Tokenizer) -> dict[str, object]:
    """The fields of settings.json for the page's tokenizer: the bytes of all tokens."""
    trained = tokenizer.config.trained
    ranks = (tokenizer.decode_bytes([rank]) for rank in range(tokenizer.config.ranks))
    return {
        "digits": trained.digits if trained else 3,
        "tokens": [base64.b64encode(token).decode() for token in ranks],
    }


def _classifier(checkpoint: Path, labels: LabelSet, tokenizer: Tokenizer, model: ModelConfig) -> dict[str, object]:
    """The field `classifier` of settings.json: how a text is read, and how its probabilities are computed."""
    fields: dict[str, object] = {
        **reading_of(labels, tokenizer, model.context)._asdict(),
        **labels.model_dump(
            mode="json",
            include={"labels", "pooling", "bias", "temperature", "threshold", "thresholds", "calibrated"},
        ),
    }
    if labels.method == "head":
        head = load_head(checkpoint / HEAD, model.width, len(labels.classes))
        weight = base64.b64encode(head.weight_DC.astype("<f4").tobytes()).decode()
        fields["head"] = {"weight": weight, "bias": head.bias_C.tolist()}
    return fields


def _chat(tokenizer: Tokenizer, context: int) -> dict[str, object]:
    """The fields of settings.json for a chat: the template around the question."""
    # The page encodes the question itself. What the template has around it is the same for every question.
    question = tokenizer.encode("user\n?\n")
    prompt = encode_prompt(tokenizer, "?")
    return {
        "max_tokens": context - context // 4,
        "before": prompt[:1],
        "query": "user\n{query}\n",
        "after": prompt[1 + len(question) :],
        "stop_ids": [tokenizer.im_end, tokenizer.end_of_text],
        "think_end": tokenizer.think_end,
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
