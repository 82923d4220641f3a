"""The statistics of a distillation, and the limits that are checked against them."""

from collections import Counter
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.distill import DistillConfig
from nautile.data.distill.stats import DistillStats, check_final_reject_share


@pytest.mark.parametrize(("limit", "rejected"), [(0.3, 3), (0.1, 1), (0.4, 4), (0.7, 7)])
def test_exactly_the_allowed_share_of_rejects_is_allowed(limit, rejected):
    config = DistillConfig(prompts=10, teachers=({"endpoint": "t"},), max_rejected_share=limit)

    def stats(rejected_count):
        counts = {"rejected": Counter(empty=rejected_count), "kept": Counter(t=10 - rejected_count)}
        return DistillStats(prompts=10, **counts)

    where = Path("/store/staging/k/output/documents/rejected-*.jsonl")
    check_final_reject_share(config, stats(rejected), where)
    with pytest.raises(
        ConfigError, match=f"max_rejected_share is {limit}, but 0.*of 10 documents.* see {where.parent}"
    ):
        check_final_reject_share(config, stats(rejected + 1), where)


@pytest.mark.parametrize("fields", [{"rejected": Counter(empty=3)}, {"unanswered": Counter(timeout=3)}])
def test_a_distillation_without_a_document_says_where_the_replies_are(fields):
    config = DistillConfig(prompts=3, teachers=({"endpoint": "t"},))
    with pytest.raises(ConfigError, match=r"see /k/documents/rejected-\*\.jsonl$"):
        check_final_reject_share(config, DistillStats(prompts=3, **fields), Path("/k/documents/rejected-*.jsonl"))
