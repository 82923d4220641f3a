"""Every data set that the published configurations name behind one Hub on loopback, with its columns in public.

python -m tests.support.servers.public_hub FOLDER     serves until the end of stdin; prints the address
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nautile.configs.load import load
from nautile.data.sources.wikipedia import articles
from nautile.flows.dag import pipeline_steps
from nautile.flows.readiness import HubDataset, hub_datasets
from nautile.rl.problems import TRAINING_SETS
from tests.evals.conftest import records
from tests.support.servers.benchmark_hub import LAYOUTS, BenchmarkHub, _write
from tests.support.servers.fake_hub import FakeHub

ROWS = 300
TRAINING_ROWS = 400  # of which one in twenty is the guard's
Row = dict[str, Any]


_articles = cache(lambda: articles(0))  # shuffled anew in each call


def _article(n: int, french: bool) -> tuple[str, str]:
    article = _articles()[n]
    if french:
        return article.title, f"Voici ce que l'on sait de {article.title} : le sujet est traité ailleurs, numéro {n}."
    return article.title, article.extract


def _web(n: int, french: bool) -> Row:
    return {
        "text": _article(n, french)[1], "id": f"<urn:uuid:{n}>", "dump": "CC-MAIN-2024-10", "url": f"https://a.example/{n}",
        "file_path": "s3://x", "language": "fr" if french else "en", "language_score": 0.95, "token_count": 90,
        "score": 3.1, "int_score": 3,
    }  # fmt: skip


def _pages_of_mathematics(n: int, french: bool) -> Row:
    return _web(7000 + n, french)


def _synth(n: int, french: bool) -> Row:
    title, text = _article(2000 + n, french)
    return {
        "synth_id": f"memorization_{n}", "language": "fr" if french else "en", "exercise": "memorization", "model": "x",
        "query": f"What should one know about {title}?", "query_seed_url": "", "query_seed_text": text,
        "additional_seed_url": None, "seed_license": "CC-By-SA (4.0)", "constraints": None, "script": None,
        "synthetic_reasoning": f"Query: {title}. → {text[:200]}", "synthetic_answer": text, "words": 90,
    }  # fmt: skip


def _messages(column: str, start: int) -> Callable[[int, bool], Row]:
    def row(n: int, french: bool) -> Row:
        title, text = _article(start + n, False)
        talk = [
            {"role": "user", "content": f"Tell me in two sentences why {title} matters to historians and to readers."}
        ]
        talk.append({"role": "assistant", "content": text})
        return {"id": f"{start}-{n}", column: talk, "source": "hand-made", "language": "English"}

    return row


def _dolly(n: int, french: bool) -> Row:
    title, text = _article(5000 + n, False)
    return {
        "instruction": f"Name one fact about {title} from the passage.",
        "context": text,
        "response": text,
        "category": "qa",
    }


def _story(n: int, french: bool) -> Row:
    return {"prompt": f"[ WP ] A story in which {_article(6000 + n, False)[0]} is lost , and found .", "story": "Once."}


def _math(n: int, french: bool) -> Row:
    return {"problem": f"What is {n} times {n + 1}, less {n % 7}?", "level": "Level 1", "type": "Algebra",
            "solution": f"It is $\\boxed{{{n * (n + 1) - n % 7}}}$."}  # fmt: skip


# Repository -> (path of a file of a subset, its rows).
_PATH = "{subset}/train-00000-of-00001.parquet"
OTHERS: dict[str, tuple[str, Callable[[int, bool], Row]]] = {
    "HuggingFaceFW/fineweb-edu": ("{subset}/000_00000.parquet", _web),
    "PleIAs/SYNTH": ("synth_001.parquet", _synth),
    "allenai/tulu-3-sft-mixture": ("data/train-00000-of-00001.parquet", _messages("messages", 3000)),
    "databricks/databricks-dolly-15k": ("databricks-dolly-15k.jsonl", _dolly),
    "allenai/WildChat-1M": ("data/train-00000-of-00001.parquet", _messages("conversation", 3500)),
    "euclaise/writingprompts": ("data/train-00000-of-00001.parquet", _story),
    "HuggingFaceTB/smoltalk": ("data/{subset}/train-00000-of-00001.parquet", _messages("messages", 4000)),
    "EleutherAI/hendrycks_math": (_PATH, _math),
    "HuggingFaceTB/finemath": (_PATH, _pages_of_mathematics),
}


class PublicHub(BenchmarkHub):
    """A context manager. `renamed`: repository -> (column, its new name). `french`: of SYNTH, one row in so many."""

    def __init__(
        self, folder: Path, *, renamed: Mapping[str, tuple[str, str]] | None = None, french: int | None = None
    ) -> None:
        super().__init__(folder, lambda name: records(name, 60))
        for training_set in TRAINING_SETS.values():
            for part in training_set.parts:
                if part.hub in LAYOUTS:  # other questions than the benchmark's, which are held out
                    path = self.repositories[part.hub].folder / LAYOUTS[part.hub].path.format(
                        subset=part.subset, split=part.split
                    )
                    _write(path, records(part.name, 2000 + TRAINING_ROWS)[2000:], {})
        datasets = [
            d for name in ("nautile_370m", "nautile_100m", "spark") for d in hub_datasets(pipeline_steps(load(name)))
        ]
        for dataset in datasets:
            if dataset.path in OTHERS:
                self._add(folder, dataset, (renamed or {}).get(dataset.path), french)

    def _add(self, folder: Path, dataset: HubDataset, renamed: tuple[str, str] | None, french: int | None) -> None:
        name, row_of = OTHERS[dataset.path]
        repository = folder / dataset.path.replace("/", "--")
        path = repository / name.format(subset=dataset.subset)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_synth = dataset.path == "PleIAs/SYNTH"
        rows = [row_of(n, bool(is_synth and french and n % french == 0)) for n in range(ROWS)]
        if renamed:
            rows = [{renamed[1] if key == renamed[0] else key: value for key, value in row.items()} for row in rows]
        _write(path, rows, {})
        card, entry = repository / "README.md", ""
        if dataset.subset:
            place = path.relative_to(repository)
            entry = f"- config_name: {dataset.subset}\n  data_files:\n  - {{split: train, path: {place}}}\n"
        before = (
            card.read_text().removesuffix("---\n")
            if card.exists()
            else "---\n" + ("configs:\n" if entry else "license: mit\n")
        )
        card.write_text(f"{before}{entry}---\n")
        self.repositories.setdefault(dataset.path, FakeHub(repository, dataset.path, dataset.revision))


def main() -> None:
    with PublicHub(Path(sys.argv[1])) as hub:
        sys.stdout.write(f"{hub.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
