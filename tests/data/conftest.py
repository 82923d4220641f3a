"""Small token artifacts that the tests of the text part share."""

import numpy as np
import pytest

from nautile.common.events import silent
from nautile.configs.model import TokenizerConfig
from nautile.data.records import SynthRecord, WebRecord
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.build import CorpusPlan, write_tokens

RANKS = 300


@pytest.fixture(scope="session")
def small() -> TokenizerConfig:
    """A tokenizer of 305 ids."""
    return TokenizerConfig(ranks=RANKS)


@pytest.fixture(scope="session")
def tokenizer(small):
    return tokenizer_for(small)


@pytest.fixture(scope="session")
def web_records() -> list[WebRecord]:
    """120 documents of 1 to 60 words, all different."""
    rng = np.random.default_rng(1)
    words = ["sea", "shell", "pearl", "wave", "tide", "foam", "sand", "reef", "gull", "mast"]
    return [
        WebRecord(f"{number} " + " ".join(rng.choice(words, rng.integers(1, 60))), id=str(number))
        for number in range(120)
    ]


@pytest.fixture(scope="session")
def synth_records() -> list[SynthRecord]:
    """90 sums, in three exercises of unequal frequency."""
    kinds = ["math", "math", "math", "rag", "memo"]
    return [
        SynthRecord(
            query=f"What is {n} plus {n * 7 % 31}?",
            synthetic_reasoning=f"{n} and {n * 7 % 31} " + "so on " * (n % 9),
            synthetic_answer=str(n + n * 7 % 31),
            exercise=kinds[n % len(kinds)],
            constraints="Use the passage." if n % len(kinds) == 3 else None,
        )
        for n in range(90)
    ]


@pytest.fixture(scope="session")
def make_tokens(small, tmp_path_factory):
    """make(records, **plan) -> (artifact folder, PublishedTokens): by default rows of 64 tokens, 8 rows per shard."""

    def make(records, /, emit=silent, **changes):
        root = tmp_path_factory.mktemp("tokens")
        form = "web" if isinstance(records[0], WebRecord) else "synth"
        plan = {"tokenizer": small, "form": form, "row_length": 64, "rows_per_shard": 8, "validation_share": 0.1}
        plan = CorpusPlan(**{**plan, **changes})
        corpus = write_tokens(lambda skip: iter(records[skip:]), plan, root / "work", root / "out", emit)
        return root / "out", corpus

    return make


@pytest.fixture(scope="session")
def web_tokens(make_tokens, web_records):
    return make_tokens(web_records)[0]


@pytest.fixture(scope="session")
def synth_tokens(make_tokens, synth_records):
    return make_tokens(synth_records)[0]
