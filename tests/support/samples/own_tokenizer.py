"""A tokenizer that was trained, on texts of the test's own."""

from pathlib import Path

from nautile.configs.model import Digits, TokenizerConfig, TrainedRanks
from nautile.data.bpe_training import train_ranks

TEXTS = [
    *(f"{n * n} times {n}, that's {n**3:,}.\r\n  été {'=' * (n % 7)} 漢字\n" for n in range(300)),
    *(Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8").split("\n\n"),
]


def own_tokenizer(ranks: int, digits: Digits = 3) -> TokenizerConfig:
    return TokenizerConfig.of_trained(ranks, TrainedRanks(train_ranks(TEXTS, ranks, digits), digits))
