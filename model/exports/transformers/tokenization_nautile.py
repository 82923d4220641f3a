"""The tokenizer of a tuned Nautile model for `transformers`: it makes of a text what the model was tuned to read."""

from typing import Any

from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerFast


class NautileTokenizer(PreTrainedTokenizerFast):
    """Encodes texts by `reading` (tokenizer_config.json), and with `add_special_tokens=False` as any tokenizer does.

    A text is stripped and cut after `longest` tokens, `suffix` is appended, and its ids stand between `before` and
    `after`; `most` ids are read. Markers that are spelled in a text stay text. Chat templates are not affected.
    """

    # There is no __init__: the library would build a class that has one from the vocabulary alone.
    @property
    def reading(self) -> dict[str, Any] | None:
        """The settings of the reading; None for a tokenizer of no tuned model."""
        return self.init_kwargs.get("reading")

    def plain(self) -> Tokenizer:
        """The same merges without the added tokens, which would be found in a text that spells them."""
        plain = Tokenizer(self.backend_tokenizer.model)
        plain.pre_tokenizer, plain.decoder = self.backend_tokenizer.pre_tokenizer, self.backend_tokenizer.decoder
        return plain

    def __call__(
        self,
        text: Any = None,
        text_pair: Any = None,
        *args: Any,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Any = None,
        return_attention_mask: bool | None = None,
        return_offsets_mapping: bool = False,
        return_special_tokens_mask: bool = False,
        **options: Any,
    ) -> BatchEncoding:
        """Encode a text or a list of texts.

        `return_offsets_mapping`: the characters of each token in the text, white space at their beginning left out.
        Raises ValueError for pairs and words, for `truncation` below what the model reads, and for a text whose prompt
        is longer than the model's context.
        """
        shape = {"padding": padding, "pad_to_multiple_of": pad_to_multiple_of, "padding_side": padding_side}
        if self.reading is None or not add_special_tokens:
            return super().__call__(
                text, text_pair, *args, add_special_tokens=add_special_tokens, truncation=truncation,
                max_length=max_length, return_tensors=return_tensors, return_attention_mask=return_attention_mask,
                return_offsets_mapping=return_offsets_mapping, return_special_tokens_mask=return_special_tokens_mask,
                **shape, **options,
            )  # fmt: skip
        texts = [text] if isinstance(text, str) else text
        if text_pair is not None or options.get("is_split_into_words") or not _all_texts(texts):
            raise ValueError("a tuned Nautile model reads single texts: no pairs, and no lists of words")
        plain = self.plain()
        rows = [self._read(plain, text) for text in texts]
        longest = max((len(ids) for ids, _ in rows), default=0)
        if truncation and max_length is not None and longest > max_length:
            raise ValueError(
                f"max_length {max_length}: this model was tuned to read {self.reading['longest']} tokens of a text, "
                f"with its prompt {longest}; the tokenizer cuts longer texts itself"
            )
        encoded = self.pad(
            {"input_ids": [ids for ids, _ in rows]}, max_length=max_length, return_attention_mask=True, **shape
        )
        fields: dict[str, Any] = {"input_ids": encoded["input_ids"]}
        if return_attention_mask is not False:
            fields["attention_mask"] = encoded["attention_mask"]
        if return_offsets_mapping or return_special_tokens_mask:
            on_left = (padding_side or self.padding_side) == "left"
            places = []
            for (ids, offsets), padded in zip(rows, encoded["input_ids"], strict=True):
                spare = [None] * (len(padded) - len(ids))
                places.append([*spare, *offsets] if on_left else [*offsets, *spare])
            if return_special_tokens_mask:
                fields["special_tokens_mask"] = [[int(place is None) for place in row] for row in places]
            if return_offsets_mapping:
                fields["offset_mapping"] = [[place or (0, 0) for place in row] for row in places]
        if isinstance(text, str) and return_tensors is None:
            fields = {name: rows[0] for name, rows in fields.items()}
        return BatchEncoding(fields, tensor_type=return_tensors)

    def _read(self, plain: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int] | None]]:
        """The ids of a text, and for each the characters that it stands for; None for those around the text."""
        reading = self.reading or {}
        # Half a surrogate pair is no character, and the library refuses it.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = whole.strip()
        ids = plain.encode(text).ids
        if len(ids) > reading["longest"]:
            # A character of which only some bytes remain is removed.
            text = plain.decode(ids[: reading["longest"]]).rstrip("\N{REPLACEMENT CHARACTER}")
        encoding = plain.encode(text + reading["suffix"])
        ids = [*reading["before"], *encoding.ids, *reading["after"]]
        skipped = len(whole) - len(whole.lstrip())
        offsets: list[tuple[int, int] | None] = [None] * len(reading["before"])
        for start, end in encoding.offsets:
            start += len(text[start:end]) - len(text[start:end].lstrip())
            offsets.append((skipped + start, skipped + end) if start < min(end, len(text)) else None)
        offsets += [None] * len(reading["after"])
        if len(ids) > reading["most"] and reading["after"]:
            raise ValueError(
                f"a text of {len(encoding.ids)} tokens with its prompt and a label is longer than the model's context: "
                f"{len(ids)} tokens, and {reading['most']} are read"
            )
        return ids[: reading["most"]], offsets[: reading["most"]]


def _all_texts(texts: Any) -> bool:
    return isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
