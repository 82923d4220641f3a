"""The configuration of a Nautile model for `transformers`: paper §2, under the names that the paper's author uses."""

from typing import Any

from transformers import PretrainedConfig


class NautileConfig(PretrainedConfig):
    """The sizes of a model of `num_layers` layers, which repeat `pattern`: S is an SCA layer, A one of attention.

    `vocab_size` includes the padding id 0. `unused_ids` are the ids that no token has, as pairs (first, end): they are
    never predicted. `maxlen` is the longest sequence in tokens; with `decay = "window"` it also
    changes the results. Raises ValueError where the sizes do not fit each other.
    """

    model_type = "nautile"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "max_position_embeddings": "maxlen",
    }

    def __init__(
        self,
        vocab_size: int = 100_282,
        d_model: int = 1024,
        num_layers: int = 24,
        pattern: str = "SSA",
        maxlen: int = 1024,
        seqcond_heads: int = 16,
        num_query_heads: int = 16,
        num_thetas: int = 2,
        expand_factor: int = 2,
        out_expand_factor: int = 3,
        conv_kernel_size: int = 4,
        decay: str = "relative",
        grid: str = "ordered",
        integration: str = "normalised",
        chunk: int = 32,
        num_heads: int = 16,
        num_kv_heads: int = 4,
        d_ff: int = 2730,
        rope_base: float = 10_000.0,
        qk_norm: bool = True,
        sca_norm_epsilon: float = 1e-5,
        norm_epsilon: float = 1e-6,
        unused_ids: list[list[int]] | None = None,
        use_cache: bool = True,
        classifier: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.num_layers = num_layers
        self.pattern = pattern
        self.maxlen = maxlen
        self.seqcond_heads = seqcond_heads  # memory heads K
        self.num_query_heads = num_query_heads  # Q; if fewer than K, several memory heads share a query
        self.num_thetas = num_thetas  # spectral samples M
        self.expand_factor = expand_factor
        self.out_expand_factor = out_expand_factor
        self.conv_kernel_size = conv_kernel_size
        self.decay = decay
        self.grid = grid  # "free": the spectral grid θ is a parameter itself; "fixed": it is not trained
        self.integration = integration  # the same for the integration weights ω
        self.chunk = chunk  # positions computed at a time: affects speed and memory, not the results
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.d_ff = d_ff
        self.rope_base = rope_base
        self.qk_norm = qk_norm
        self.sca_norm_epsilon = sca_norm_epsilon
        self.norm_epsilon = norm_epsilon
        self.unused_ids = unused_ids or []  # edit it after new tokens were given some of them
        self.use_cache = use_cache
        # Of a tuned classifier: `pooling` of the features of its head, or `replies`, the ids of each label's text, and
        # their `bias`; `temperature`, by which logits are divided; `threshold`, below which an answer is no answer,
        # or where a text may have several labels, one for each in `thresholds`.
        self.classifier = classifier or {}
        checks = {
            "pattern is not a text of the letters S and A": not pattern or set(pattern) - {"S", "A"},
            "num_layers is not a multiple of the letters of pattern": num_layers % max(len(pattern), 1),
            "d_model * expand_factor is not a multiple of seqcond_heads * num_thetas": (
                d_model * expand_factor % (seqcond_heads * num_thetas)
            ),
            "seqcond_heads is not a multiple of num_query_heads": seqcond_heads % num_query_heads,
            "num_heads is not a multiple of num_kv_heads": num_heads % num_kv_heads,
            "d_model is not an even multiple of num_heads": d_model % (2 * num_heads),
            'decay is neither "relative" nor "window"': decay not in ("relative", "window"),
            'grid is not "ordered", "free" or "fixed"': grid not in ("ordered", "free", "fixed"),
            'integration is not "normalised", "free" or "fixed"': integration not in ("normalised", "free", "fixed"),
        }
        faults = [fault for fault, broken in checks.items() if broken]
        if faults:
            raise ValueError(f"config.json: {faults[0]}")
        kwargs.setdefault("tie_word_embeddings", True)
        kwargs.setdefault("pad_token_id", 0)
        super().__init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Head dimension of the attention layers."""
        return self.d_model // self.num_heads

    @property
    def memory_head_dim(self) -> int:
        """Head dimension H of the SCA layers."""
        return self.d_model * self.expand_factor // (self.seqcond_heads * self.num_thetas)
