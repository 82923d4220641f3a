"""The loader with few and with many shards: rows of 1,024 tokens a second, with a cold and a warm page cache.

    python bench/training/loader.py [--shards 36 36000] [--rows 144000] [--steps 200] [--folder FOLDER] [--json FILE]

The same rows (ids of 2 bytes) in different numbers of shards, in an artifact as ingest writes it. Batches of 64 rows,
those of one of the paper's 8 hosts, are drawn one after the other, without any training. For comparison, the model
would consume 188 rows/s on a v4 host at 40 % utilisation (estimated: `nautile plan`). "cold": a new loader, after the
shards and the row offsets are dropped from the page cache. "warm": the same steps by another loader. Interleaved;
medians.
"""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, print_rows, write_results
from nautile.configs.model import TokenizerConfig
from nautile.configs.training import PhaseConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.loader import Loader
from nautile.data.tokens.shards import ConcatPacker, ShardIndex, write_index, write_shard

HOSTS, BATCH_ROWS, LENGTH, NEEDED = 8, 512, 1024, 1.54e6 / 1024 / 8
TOKENIZER = TokenizerConfig(ranks=8000)


def artifact(folder: Path, shards: int, rows: int, length: int = LENGTH) -> Path:
    """A tokens artifact of `shards` equal shards of random documents of some 300 tokens; written once per folder."""
    if (folder / "index.json").is_file():
        return folder
    tokenizer, rng = tokenizer_for(TOKENIZER), np.random.default_rng(0)
    packer = ConcatPacker(length)
    # One shard is made and copied: what is measured is opening and reading, not the content.
    while packer.rows <= rows // shards:
        ids = rng.integers(0, tokenizer.end_of_text, rng.integers(8, 600), dtype=np.uint32)
        packer.add(np.append(ids, np.uint32(tokenizer.end_of_text)))
    first = write_shard(folder, 0, "train", packer.finish(), tokenizer.vocabulary)
    entries = [replace(first, file=f"shards/train-{number:05d}-00000.bin") for number in range(shards)]
    for entry in entries[1:]:
        shutil.copyfile(folder / first.file, folder / entry.file)
    index = ShardIndex(TOKENIZER, tokenizer.fingerprint, length, "web", tuple(entries))
    write_index(folder, index)
    # Pages that are not written back cannot be dropped from the cache.
    os.sync()
    return folder


def drop_from_cache(folder: Path) -> None:
    for path in (*folder.glob("shards/*"), folder / "rows.u4"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rows_per_second(folder: Path, steps: int, *, cold: bool) -> float:
    phase = PhaseConfig(name="one", tokens=BATCH_ROWS * LENGTH * steps, mixture={"web": 1.0})
    loader = Loader({"web": folder}, [phase], BATCH_ROWS, 0, TOKENIZER, host=3, hosts=HOSTS)
    if cold:
        drop_from_cache(folder)
    start = time.perf_counter()
    for step in range(steps):
        loader.batch(step)
    return steps * BATCH_ROWS / HOSTS / (time.perf_counter() - start)


def main() -> None:
    arguments = argument_parser(
        __doc__, shards=[36, 36_000], rows=144_000, steps=200, repeats=3, folder=None
    ).parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        folders = {shards: artifact(Path(root) / str(shards), shards, arguments.rows) for shards in arguments.shards}
        rates: dict[tuple[int, bool], list[float]] = {}
        for _ in range(arguments.repeats):
            for shards, folder in folders.items():
                for cold in (True, False):
                    rates.setdefault((shards, cold), []).append(rows_per_second(folder, arguments.steps, cold=cold))
    results = [
        {"shards": shards, "cache": "cold" if cold else "warm", "rows_per_s": round(median(entry))}
        | {"times_what_a_v4_host_needs": round(median(entry) / NEEDED, 1)}
        for (shards, cold), entry in rates.items()
    ]
    print_rows({"loader": results})
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
