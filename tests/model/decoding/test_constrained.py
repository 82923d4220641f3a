"""Replies held to a JSON schema: every finished one is a document of it, whatever the model likes; its neighbours in
the batch are as they would be alone."""

import json
import math
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.data.json_schema import bounded_validator, inclusive_bounds, shortest_document
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding import slots
from nautile.model.decoding.constrained import Constraint, MaskFailed, mask_words
from nautile.model.decoding.engine import Engine
from nautile.model.decoding.sampling import _invert, only_allowed
from nautile.model.decoding.slots import DecodeRequest, JaxSlots, RequestFailed
from nautile.model.loss import masked_logits
from nautile.model.nautile import forward, initialise
from tests.model.conftest import tiny_config

TOKENIZER = tokenizer_for(TokenizerConfig(ranks=300))
ENDS = (TOKENIZER.im_end, TOKENIZER.end_of_text)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}

LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"const": "x y"}, {"const": [1, {"a": None}]}]),
    st.lists(st.one_of(st.integers(-99, 99), st.text('aé"\\\n', max_size=3)), min_size=1, max_size=3, unique=True).map(
        lambda values: {"enum": values}
    ),
    st.tuples(st.integers(-300, 300), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2}-[0-9]$"}),
)


def objects(inner):
    names = st.dictionaries(st.sampled_from(["a", "b c", "é"]), st.tuples(inner, st.booleans()), max_size=3)
    return names.map(
        lambda members: {
            "type": "object",
            "properties": {name: part for name, (part, _) in members.items()},
            "required": [name for name, (_, required) in members.items() if required],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": sum(parts[1:])}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=4,
)


def document(ids):
    """The document of a finished reply: what is between the thinking and the end."""
    assert ids[-1] in ENDS
    text = TOKENIZER.decode(ids[ids.index(TOKENIZER.think_end) + 1 : -1])
    assert text.startswith("\n")
    return json.loads(text)


@settings(max_examples=60)
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_finished_reply_is_a_document_of_its_schema(schema, seed):
    """Tokens drawn at random from those that the masks allow, thought first."""
    constraint, rng = Constraint(TOKENIZER, schema), np.random.default_rng(seed)
    mask, ids = constraint.begin(), []
    words = np.zeros(mask_words(TOKENIZER.vocabulary), np.uint32)
    while not ids or ids[-1] not in ENDS:
        mask.write(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: TOKENIZER.vocabulary])
        thinks_on = len(ids) == 3 and TOKENIZER.think_end not in ids  # it may have been drawn already
        ids.append(TOKENIZER.think_end if thinks_on else int(rng.choice(allowed)))
        mask.accept(ids[-1])
        assert len(ids) < 1000
    constraint.validator.validate(document(ids))
    if TOKENIZER.think_end not in ids[:3]:
        assert len(ids) - 3 >= constraint.least_tokens - 1  # of a line break that merges with what follows


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "allows no document"),
        ([], "is an object, not list"),
        ({"type": "word"}, "not a JSON schema: type"),
        ({"type": "string", "pattern": "("}, "not a JSON schema: pattern"),
        ({"enum": []}, "a part of it allows nothing"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "must contain itself"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "a part of it allows nothing"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum \(3\)"),
        ({"type": "string", "pattern": "^a{3}$", "maxLength": 2}, "Unsatisfiable schema"),
        ({"const": 123456789012345678901234567890}, "the integer 123456789012345678901234567890 has more digits"),
        ({"minimum": 10**400}, "has more digits than can be enforced"),
        ({"not": {}}, r'Unimplemented keys: \["not"\]'),
        ({"$ref": "https://example.invalid/s.json"}, "does not fetch"),
        ({"$ref": "#/nowhere"}, "does not exist"),
    ],
)
def test_a_schema_that_is_none_or_cannot_be_met_is_refused(schema, message):
    with pytest.raises(ConfigError, match=message):
        Constraint(TOKENIZER, schema, "S.json")


def test_the_shortest_document_bounds_what_every_keyword_asks_for():
    shape = {
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "required": ["n"]}},
        "allOf": [{"$ref": "#/$defs/tree"}],
        "type": ["object", "null"],
    }
    assert shortest_document(shape, "s") == '{"n": 0}'
    assert shortest_document({"type": "array", "prefixItems": [{"const": "ab"}], "minItems": 3}, "s") == '["ab", 0, 0]'
    options = [{"type": "string", "minLength": 3}, {"type": "integer", "maximum": -100}]
    assert shortest_document({"anyOf": options}, "s") == "-100"
    assert shortest_document({"enum": ["long", "a"]}, "s") == '"a"'


def test_a_grammar_that_outgrows_the_limits_fails_its_reply_alone():
    mask = Constraint(TOKENIZER, {"type": "integer"}).begin()
    mask.accept(TOKENIZER.think_end)
    mask.accept(TOKENIZER.im_start)  # which the mask forbids
    with pytest.raises(MaskFailed, match="grammar of the reply's schema has failed"):
        mask.write(np.zeros(mask_words(TOKENIZER.vocabulary), np.uint32))


def test_a_token_whose_share_is_zero_is_never_drawn():
    """The running sum minus the drawn block's share rounds above the target: what is left to pass is below zero."""
    rng = np.random.default_rng(0)
    shares_BV = np.where(np.arange(512) % 128 < 3, 0, rng.random((4000, 512))).astype(np.float32)
    invert = jax.jit(_invert)
    drawn_B = np.asarray(invert(shares_BV, rng.random(4000).astype(np.float32)))
    sums = shares_BV.reshape(4000, 4, 128).sum(-1, dtype=np.float32).cumsum(-1, dtype=np.float32)
    # Targets at the very edges of blocks, where rounding decides.
    edges_B = (sums[:, 1] / sums[:, 3]).astype(np.float32)
    at_edges_B = np.asarray(invert(shares_BV, edges_B))
    rows = np.arange(4000)
    assert (shares_BV[rows, drawn_B] > 0).all()
    assert (shares_BV[rows, at_edges_B] > 0).all()


@pytest.fixture(scope="module")
def model():
    config = tiny_config(vocabulary=TOKENIZER.vocabulary + 5, blocks=1)  # rows of no token: never allowed
    return config, jax.tree.map(lambda leaf: leaf * 1.5, jax.jit(initialise, static_argnums=0)(config, 0))


@pytest.fixture(scope="module")
def decode(model):
    """Decode requests together; the ids, log-probabilities, alternatives and finish reason of each."""
    config, params = model
    engine, events = Engine(JaxSlots(params, config, ENDS, TOKENIZER.think_end, 4), 16), SimpleQueue()
    engine.start(lambda batch: [events.put(event) for event in batch])

    def fill(*requests):
        handles = engine.submit(requests)
        outcomes = {handle: ([], [], []) for handle in handles}
        ends = {}
        while len(ends) < len(handles):
            handle, event = events.get(timeout=120)
            assert not isinstance(event, RequestFailed), event
            for part, added in zip(outcomes[handle], (event.ids, event.logprobs, event.alternatives), strict=True):
                part.extend(added)
            if event.finish:
                ends[handle] = event.finish
        return [(*outcomes[handle], ends[handle]) for handle in handles]

    yield fill
    engine.close()


@pytest.mark.slow
def test_unconstrained_samples_and_programs_are_as_without(decode):
    """Beside constrained ones, in slots that they leave, and after them; and nothing is compiled before the first."""
    slots.advance.clear_cache()
    free = [DecodeRequest((5, 6, 7), 12, (1,), temperature=0.0), DecodeRequest((9,), 20, (2,))]
    alone = decode(*free)
    compiled = slots.advance._cache_size()
    held = DecodeRequest((5, 6, 7), 60, (3,), thinking_budget=0, constraint=Constraint(TOKENIZER, PERSON))
    beside = decode(*free, held, held)[:2]
    assert [outcome[0] for outcome in beside] == [outcome[0] for outcome in alone]
    assert [outcome[0] for outcome in decode(*free)] == [outcome[0] for outcome in alone]
    assert (compiled, slots.advance._cache_size()) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "cut"), [(0.0, {}), (30.0, {}), (1.0, {"top_k": 3}), (30.0, {"top_k": 3}), (30.0, {"top_p": 0.4})]
)
def test_replies_of_a_model_meet_the_schema(decode, temperature, cut):
    constraint = Constraint(TOKENIZER, PERSON)
    request = {"temperature": temperature, "thinking_budget": 0, "constraint": constraint, **cut}
    for ids, logprobs, _, finish in decode(*(DecodeRequest((5, 6), 60, (seed,), **request) for seed in range(3))):
        assert len(ids) == len(logprobs)
        assert finish == "stop"
        constraint.validator.validate(document(ids))


@pytest.mark.slow
def test_the_constraint_begins_behind_the_thinking(decode):
    """Nothing ends the reply before; one that is cut while it thinks has no answer."""
    constraint = Constraint(TOKENIZER, {"type": "boolean"})
    thinking, cut = decode(
        DecodeRequest((5, 6), 40, (1,), thinking_budget=9, temperature=3.0, constraint=constraint),
        DecodeRequest((5, 6), 8, (4,), temperature=3.0, constraint=constraint),
    )
    assert 0 < thinking[0].index(TOKENIZER.think_end) <= 9
    assert document(thinking[0]) in (True, False)
    assert (TOKENIZER.think_end in cut[0], cut[3]) == (False, "length")


@pytest.mark.slow
def test_log_probabilities_are_those_under_the_mask(decode, model):
    config, params = model
    constraint = Constraint(TOKENIZER, PERSON)
    request = DecodeRequest((5, 6, 7), 50, (1,), thinking_budget=0, alternatives=20, constraint=constraint)
    [(ids, logprobs, best, _)] = decode(request)
    row = jnp.asarray([[*request.prompt, *ids]])
    hidden_BLD = jax.jit(lambda: forward(params, config, row, jnp.ones_like(row), jnp.arange(row.shape[1])[None]))()
    logits_TV = masked_logits(hidden_BLD[0, len(request.prompt) - 1 : -1], params["embedding"], config.vocabulary)
    mask, words_TW = constraint.begin(), np.zeros((len(ids), mask_words(config.vocabulary)), np.uint32)
    for words_W, token in zip(words_TW, ids, strict=True):
        mask.write(words_W)
        mask.accept(token)
    expected_TV = np.asarray(jax.nn.log_softmax(only_allowed(logits_TV, jnp.asarray(words_TW))))
    np.testing.assert_allclose(logprobs, expected_TV[np.arange(len(ids)), ids], atol=1e-4)
    for pairs, expected_V in zip(best, expected_TV, strict=True):
        assert len(pairs) == min(20, np.isfinite(expected_V).sum())
        np.testing.assert_allclose([value for _, value in pairs], np.sort(expected_V)[::-1][: len(pairs)], atol=1e-4)


@pytest.mark.slow
def test_a_reply_that_cannot_fit_is_refused_before_it_is_queued(decode):
    with pytest.raises(ConfigError, match="max_tokens 8: a reply that meets the schema takes"):
        decode(DecodeRequest((5,), 8, constraint=Constraint(TOKENIZER, PERSON)))


def numbers(draw, schema, count):
    """Documents of a schema of a number, drawn at random from what the masks allow."""
    constraint, rng = Constraint(TOKENIZER, schema), np.random.default_rng(draw)
    words = np.zeros(mask_words(TOKENIZER.vocabulary), np.uint32)
    for _ in range(count):
        mask = constraint.begin()
        mask.accept(TOKENIZER.think_end)
        ids = [TOKENIZER.think_end]
        while ids[-1] not in ENDS:
            mask.write(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: TOKENIZER.vocabulary])
            ends = [end for end in ENDS if end in allowed]
            # End early half of the time: the bound itself has few digits.
            ids.append(ends[0] if ends and rng.random() < 0.5 else int(rng.choice(allowed)))
            mask.accept(ids[-1])
        yield constraint, document(ids)


BOUNDS = st.one_of(st.integers(-300, 300), st.floats(-3, 3).map(lambda value: round(value, 2)), st.just(0))


@settings(max_examples=40)
@given(
    low=BOUNDS, width=st.sampled_from([0.01, 0.5, 1, 3, 250]), kind=st.sampled_from(["number", "integer"]),
    keys=st.tuples(st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])),
    draw=st.integers(0, 2**32),
)  # fmt: skip
def test_exclusive_bounds_exclude_the_bound(low, width, kind, keys, draw):
    high = round(low + width, 4)
    least = math.floor(low) + 1 if keys[0] == "exclusiveMinimum" else math.ceil(low)
    most = math.ceil(high) - 1 if keys[1] == "exclusiveMaximum" else math.floor(high)
    assume(kind == "number" or least <= most)
    for constraint, value in numbers(draw, {"type": kind, keys[0]: low, keys[1]: high}, 6):
        constraint.validator.validate(value)
        assert constraint.fault(json.dumps(value)) is None


@pytest.mark.parametrize(
    ("schema", "inside"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, {"minimum": 1e-6, "maximum": 0.4999999}),
        ({"type": "integer", "exclusiveMinimum": 0}, {"type": "integer", "minimum": 1}),
        ({"type": "integer", "exclusiveMaximum": -1.5}, {"type": "integer", "maximum": -2}),
        ({"type": ["integer", "null"], "exclusiveMinimum": 0.5}, {"type": ["integer", "null"], "minimum": 1}),
        ({"minimum": 3, "exclusiveMinimum": 1}, {"minimum": 3}),
        ({"minimum": 1, "exclusiveMinimum": 1}, {"minimum": 1.000001}),
        ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, {"minimum": 4, "type": "integer"}),
        ({"exclusiveMinimum": 10**400}, {"minimum": 10**400 + 1}),
        ({"properties": {"exclusiveMinimum": {"exclusiveMinimum": 0}}},
         {"properties": {"exclusiveMinimum": {"minimum": 1e-6}}}),
        ({"const": {"exclusiveMinimum": 0}}, {"const": {"exclusiveMinimum": 0}}),
    ],
)  # fmt: skip
def test_an_exclusive_bound_becomes_the_next_number_inside(schema, inside):
    assert inclusive_bounds(schema) == inside


def test_bounds_that_leave_next_to_no_room_are_kept_apart():
    narrow = inclusive_bounds({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-9})
    assert 0 < narrow["minimum"] < narrow["maximum"] < 1e-9
    adjacent = inclusive_bounds({"exclusiveMinimum": 1.0, "maximum": math.nextafter(1.0, 2)})
    assert adjacent == {"minimum": math.nextafter(1.0, 2), "maximum": math.nextafter(1.0, 2)}


def test_the_fewest_tokens_are_counted_in_tokens():
    """A face is one character, and in this vocabulary four tokens."""
    assert Constraint(TOKENIZER, {"enum": ["🙂", "a"]}).least_tokens == 6


@pytest.mark.slow
def test_a_faulty_answer_is_told_in_bounded_time():
    """Whatever its schema: no regular expression is run, and alternatives of alternatives are cut off."""
    name = {"type": "string", "pattern": "^(a+)+$"}
    constraint = Constraint(TOKENIZER, {"type": "object", "properties": {"n": name}, "required": ["n"]})
    assert constraint.fault('{"n": "' + "a" * 60 + '!"}') is None  # the grammar's part
    assert "'n' is a required property" in constraint.fault("{}")
    assert "is not of type 'object'" in constraint.fault("3")
    assert constraint.fault('{"n": "a", "n": "b"}') == "an object has two members of the same name"
    levels = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    endless = Constraint(TOKENIZER, {"$ref": "#/$defs/d0", "$defs": {**levels, "d40": {"type": "integer"}}})
    assert endless.fault("1") is None
    assert "steps to check" in endless.fault('"x"')
    # Nor in a part that only a reference makes a schema; nor by the validator of a draft that a part names.
    hidden = Constraint(TOKENIZER, {"$ref": "#/x/y", "x": {"y": {"type": "string", "pattern": "^(a|a)*$"}}})
    assert hidden.fault('"' + "a" * 60 + '!"') is None
    levels["d0"]["$schema"] = levels["d1"]["$schema"] = "http://json-schema.org/draft-07/schema#"
    other_draft = Constraint(TOKENIZER, {"$ref": "#/$defs/d0", "$defs": {**levels, "d40": {"type": "integer"}}})
    assert "steps to check" in other_draft.fault('"x"')
    either = {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}
    assert bounded_validator(either, "s").is_valid("a")
    assert not bounded_validator(either, "s").is_valid(1)


def test_a_schema_that_is_too_large_is_refused_before_anything_is_decoded():
    many = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5_000)}}
    with pytest.raises(ConfigError, match=r"S: .*(at most 120000 can be enforced|cannot be enforced while decoding)"):
        Constraint(TOKENIZER, many, "S")


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "number"}, 40),
        ({"type": "integer"}, 36),
        ({"type": "number", "minimum": 0, "maximum": 1}, 40),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}, 82),
        ({"const": 10**40}, 41),
    ],
)
def test_a_number_ends_after_some_digits(schema, longest):
    """Whatever the model likes: here a digit, wherever one is allowed. Where the schema demands more, more come."""
    constraint = Constraint(TOKENIZER, schema)
    mask, text = constraint.begin(), ""
    mask.accept(TOKENIZER.think_end)
    words = np.zeros(mask_words(TOKENIZER.vocabulary), np.uint32)
    while len(text) < 200:
        mask.write(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: TOKENIZER.vocabulary])
        liked = [token for token in allowed if token < 256 and TOKENIZER.decode([token]) in "3.e"]
        token = int(liked[-1] if liked else allowed[0])
        if token in ENDS:
            break
        mask.accept(token)
        text += TOKENIZER.decode([token])
    assert len(text.strip()) <= longest
    constraint.validator.validate(json.loads(text))


def test_digits_in_a_string_are_not_counted():
    schema = {"type": "string", "pattern": '^[0-9]{50}"[0-9]{50}$'}
    _, text = next(numbers(0, schema, 1))
    assert len(text) == 101
