"""Export to a web page (`nautile export --format web`): a chat that runs offline, with onnxruntime's WebAssembly.

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
from nautile.data.chat_template import encode_prompt
from nautile.data.label_set import refuse_head
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.exports.onnx.folder import PROMPT, STEP, WEIGHTS, export_onnx
from nautile.model.weights.files import CONFIG, read_config, read_digests, refuse_occupied, write_digests

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # sha512
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
PAGE = ("index.html", "page.css", "page.mjs", "tokenizer.mjs")
FETCH_S = 300


def export_web(checkpoint: Path, out: Path, bits: int = 32) -> list[Path]:
    """Export a checkpoint folder as static files: the page, the runtime and the model, in the new or empty `out`.

    Raises ConfigError as `export_onnx` does, or if npm is missing or its file has another digest; Retryable if npm
    cannot download it.
    """
    refuse_occupied(out)
    refuse_head(checkpoint, "web")
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "onnx"
        export_onnx(checkpoint, exported, bits)
        archive = fetch_runtime()
        out.mkdir(parents=True, exist_ok=True)
        digests = read_digests(exported)
        for name in (PROMPT, STEP, WEIGHTS):
            shutil.move(exported / name, out / name)
        model, tokenizer_config = read_config(exported / CONFIG)
    with tarfile.open(archive) as package:
        for name in RUNTIME:
            source = package.extractfile(f"package/dist/{name}")
            assert source is not None  # the archive has the expected digest
            (out / name).write_bytes(source.read())
    for name in PAGE:
        shutil.copyfile(Path(__file__).parent / name, out / name)
    settings = _settings(tokenizer_for(tokenizer_config), model.context)
    write_text(out / "settings.json", json.dumps(settings, ensure_ascii=False) + "\n")
    write_digests(out, {name: digests[name] for name in (PROMPT, STEP, WEIGHTS)})
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


def _settings(tokenizer: Tokenizer, context: int) -> dict[str, object]:
    """The content of settings.json for the page: the chat template around the question, and the bytes of all tokens."""
    # The page encodes the question itself. What the template has around it is the same for every question.
    question = tokenizer.encode("user\n?\n")
    prompt = encode_prompt(tokenizer, "?")
    trained = tokenizer.config.trained
    ranks = (tokenizer.decode_bytes([rank]) for rank in range(tokenizer.config.ranks))
    return {
        "context": context,
        "max_tokens": context - context // 4,
        "before": prompt[:1],
        "query": "user\n{query}\n",
        "after": prompt[1 + len(question) :],
        "stop_ids": [tokenizer.im_end, tokenizer.end_of_text],
        "think_end": tokenizer.think_end,
        "digits": trained.digits if trained else 3,
        "tokens": [base64.b64encode(token).decode() for token in ranks],
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
