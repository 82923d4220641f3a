"""Names and shapes of the tensors of the author's checkpoint; without JAX, since estimates by arithmetic count them."""

from collections.abc import Iterator

from nautile.configs.model import ModelConfig


def author_shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The author's tensor names and shapes. The embedding has a row for padding and one for each id."""
    width, hidden = model.width, model.feed_forward
    heads, head_dim = model.memory_heads, model.head_dim
    inner, gated, expanded = model.projection_width, 2 * heads * head_dim, model.readout_expand * head_dim
    kv_width = model.kv_heads * model.attention_head_dim
    sca = {
        "norm.scale": (width,),
        "attn.in_proj.weight": (inner, width),
        "attn.conv_weight": (inner, 1, model.convolution),
        **spectrum_shapes(model),
        "attn.decay_slopes": (heads,),
        "attn.score_scale": (heads,),
        "attn.score_bias": (heads,),
        "attn.phase_scale": (heads,),
        "attn.gate_proj.weight": (gated, width),
        "attn.gated_norm.weight": (gated,),
        "attn.W_readout": (heads, 2 * head_dim, 2 * expanded),
        "attn.out_proj.weight": (width, expanded * heads),
    }
    transformer = {
        "norm1.scale": (width,),
        "norm2.scale": (width,),
        "attn.q_proj.weight": (width, width),
        "attn.k_proj.weight": (kv_width, width),
        "attn.v_proj.weight": (kv_width, width),
        "attn.out_proj.weight": (width, width),
        "ff_in.weight": (2 * hidden, width),
        "ff_in.bias": (2 * hidden,),
        "ff_out.weight": (width, hidden),
        "ff_out.bias": (width,),
    }
    yield "embedding.weight", (model.vocabulary + 1, width)
    for index, letter in enumerate(model.blocks * model.pattern):
        layer = sca if letter == "S" else transformer
        yield from ((f"blocks.{index}.{name}", shape) for name, shape in layer.items())


def spectrum_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of θ and of ω, in this order."""
    last = (model.head_dim, model.spectral_samples)
    raw_grid = "attn.theta_raw" if model.spectral_samples == 1 else "attn.theta_d_raw"
    free_grid, free_weights = model.grid == "free", model.integration == "free"
    weights = (model.query_heads, 1 if free_weights else model.memory_heads // model.query_heads, *last)
    return {
        "attn.theta" if free_grid else raw_grid: (1, 1, model.memory_heads, *last),
        "attn.w_int" if free_weights else "attn.w_int_raw": (1, 1, *weights),
    }
