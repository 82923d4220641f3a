"""The generation cache of a Nautile model, and the names under which versions 5 of `transformers` pass it.

Letters of shapes in names: B batch, L length, S columns of the cache.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

Pair = tuple[Tensor, Tensor]
# The cache's field in outputs, and its argument in `generate`: renamed in 5.24.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
# Arguments that `generate` of earlier versions and `Trainer` pass, and that the model does not need: the cache counts
# its columns itself, and the number of targets is only for the loss.
NOT_NEEDED = ("cache_position", "num_items_in_batch")


class RowLayout(NamedTuple):
    """The document and position of each token. Documents are numbered along a row; 0 is padding.

    A token at position 0 begins a new document, so a row may hold several (packed), or padding on the left.
    """

    positions_BL: Tensor  # counted from 0 in each document
    documents_BL: Tensor
    current_BL: Tensor  # as documents_BL, but padding has the document of the last token before it
    previous_B1: Tensor  # the document of the last token before these columns
    single: bool  # in every row these columns are one document, without padding and with an empty cache


class NautileCache:
    """The generation cache: the sums and last convolution inputs of each SCA layer, keys and values of each attention
    layer. Only keys and values grow with the length.
    """

    is_compileable = is_croppable = False  # the sums cannot be undone
    is_linear = (False,)  # so that `generate` reads only the tokens behind the columns that a cache has

    def __init__(self) -> None:
        self.layers: dict[int, Pair] = {}
        self.documents_BS: Tensor | None = None
        self.next_position_B: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns so far, including padding."""
        return 0 if self.documents_BS is None else self.documents_BS.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Always -1: there is no limit."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows of the batch, in this order."""
        self.layers = {index: (a[indices], b[indices]) for index, (a, b) in self.layers.items()}
        if self.documents_BS is not None and self.next_position_B is not None:
            self.documents_BS = self.documents_BS[indices]
            self.next_position_B = self.next_position_B[indices]

    reorder_cache = batch_select_indices  # the name that beam search calls

    def advance(self, layout: RowLayout) -> None:
        """Append the columns of `layout`. Call it before the layers, which update their own states."""
        documents_BL = layout.documents_BL
        # The next position follows the last token of the row's current document, if it has tokens in these columns.
        same_BL = (documents_BL > 0) & (documents_BL == layout.current_BL[:, -1:])
        next_B = torch.where(same_BL, layout.positions_BL + 1, 0).max(dim=1).values
        if self.documents_BS is not None and self.next_position_B is not None:
            documents_BL = torch.cat([self.documents_BS, documents_BL], dim=1)
            next_B = torch.where(same_BL.any(dim=1), next_B, self.next_position_B)
        self.documents_BS, self.next_position_B = documents_BL, next_B


def given_cache(cache: Any, past_key_values: Any) -> NautileCache | None:
    """The cache passed under either name. Raises ValueError if both are, or if it is of another class."""
    if cache is not None and past_key_values is not None:
        raise ValueError("pass either cache or past_key_values: they are two names of one argument")
    given = past_key_values if cache is None else cache
    if not isinstance(given, NautileCache | None):
        raise ValueError(
            f"{CACHE} is a {type(given).__name__}, which cannot hold the sums of SCA layers; pass None, or the {CACHE} "
            "that an earlier call returned"
        )
    return given


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raise TypeError for an argument that the model does not have and that would change its result unseen."""
    for name, value in arguments.items():
        if value is not None and name not in NOT_NEEDED:
            raise TypeError(f"forward() has no argument {name!r}")
