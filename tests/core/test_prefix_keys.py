"""Block keys: two blocks share a key only if their tokens, all tokens before them and their namespace are the same (I7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.chains import KeyTable
from sim.core.config import EngineConfig
from sim.core.prefix import BlockKeys
from sim.core.request import Namespace, Outcome, RequestSpec
from sim.costs.constant import FixedCost
from sim.world import run_world

BLOCKS_ASKED = 12


def a_request(
    input_tokens: int,
    ids: tuple[object, ...] = (),
    span: int = 0,
    *,
    name: str = "r",
    output_tokens: int = 1,
    **fields: object,
) -> RequestSpec:
    """A request whose content is `ids`, each naming `span` tokens."""
    return RequestSpec(
        request_id=name,
        arrival_s=0.0,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        content_ids=ids,
        content_block_tokens=span,
        **fields,
    )


def keys_of(spec: RequestSpec, block_size: int, table: KeyTable) -> list[int]:
    """The keys of its first blocks."""
    return BlockKeys(spec, block_size, table).keys(0, BLOCKS_ASKED)


def named_tokens(spec: RequestSpec) -> int:
    """How many leading tokens the ids say something about."""
    count, span = len(spec.content_ids), spec.content_block_tokens
    last_id_starts_in_the_prompt = (count - 1) * span < spec.input_tokens
    if last_id_starts_in_the_prompt:
        return min(count * span, spec.input_tokens)  # what follows the prompt is output, which that id does not name
    return count * span


def content_of(spec: RequestSpec, index: int, block_size: int) -> object:
    """What a block holds, in words: equal if and only if the key must be equal."""
    end = (index + 1) * block_size
    if end > named_tokens(spec):
        return ("private to", spec.request_id, index)
    ids = spec.content_ids[: (end - 1) // spec.content_block_tokens + 1]
    return ("named", spec.namespace, ids, index)


@st.composite
def requests(draw: st.DrawFn, span: int, name: str) -> RequestSpec:
    """Requests over two content ids, so that prefixes often agree."""
    ids = tuple(draw(st.lists(st.sampled_from(["x", "y"]), max_size=5)))
    namespace = draw(st.sampled_from([Namespace(), Namespace(lora="n"), Namespace(salt="n"), Namespace(model="n")]))
    return a_request(draw(st.integers(1, 60)), ids, span, name=name, namespace=namespace)


@given(st.data(), st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 4, 6, 16]))
def test_keys_are_equal_exactly_where_namespace_content_and_place_are(
    data: st.DataObject, block_size: int, span: int
) -> None:
    first, second = data.draw(requests(span, "first")), data.draw(requests(span, "second"))
    table = KeyTable()
    keys = {"first": keys_of(first, block_size, table), "second": keys_of(second, block_size, table)}
    blocks = [(spec, index) for spec in (first, second) for index in range(BLOCKS_ASKED)]
    for spec, index in blocks:
        for other, other_index in blocks:
            same_content = content_of(spec, index, block_size) == content_of(other, other_index, block_size)
            same_key = keys[spec.request_id][index] == keys[other.request_id][other_index]
            assert same_key == same_content, (spec, index, other, other_index)


@given(st.data(), st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 4, 6, 16]))
def test_keys_do_not_depend_on_the_order_in_which_they_are_asked_for(
    data: st.DataObject, block_size: int, span: int
) -> None:
    spec = data.draw(requests(span, "r"))
    asked = BlockKeys(spec, block_size, KeyTable())
    order = data.draw(st.permutations(range(BLOCKS_ASKED)))
    one_by_one = {index: asked.key(index) for index in order}
    assert asked.keys(0, BLOCKS_ASKED) == [one_by_one[index] for index in range(BLOCKS_ASKED)]
    start = data.draw(st.integers(0, BLOCKS_ASKED))
    assert asked.keys(start, BLOCKS_ASKED) == [one_by_one[index] for index in range(start, BLOCKS_ASKED)]


@pytest.mark.parametrize(
    ("input_tokens", "ids", "span", "block_size", "shared"),
    [
        (64, 4, 16, 16, 4),  # ids as large as blocks
        (1024, 2, 512, 16, 64),  # 16-token blocks in 512-token ids
        (1024, 64, 16, 512, 2),  # 512-token blocks over 16-token ids
        (100, 7, 16, 24, 4),  # sizes that do not divide each other: blocks end at 24, 48, 72, 96 of 100 tokens
        (700, 2, 512, 16, 43),  # the last id names 188 tokens, 700 = 43 x 16 + 12: the block over the end is private
        (704, 2, 512, 16, 44),  # the prompt ends with a block
        (700, 1, 512, 16, 32),  # the prompt is longer than what is named
        (700, 3, 512, 16, 96),  # content longer than the prompt names the output too
        (512, 2, 512, 16, 64),  # a second id that starts where the prompt ends names output
        (15, 1, 16, 16, 0),  # not one whole block is named
        (16, 0, 0, 16, 0),  # nothing is named
    ],
)
def test_blocks_wholly_inside_named_content_are_shared(
    input_tokens: int, ids: int, span: int, block_size: int, shared: int
) -> None:
    content = tuple(f"id-{i}" for i in range(ids))
    mine = BlockKeys(a_request(input_tokens, content, span, name="mine"), block_size, table := KeyTable())
    yours = BlockKeys(a_request(input_tokens, content, span, name="yours"), block_size, table)
    agree = [mine.key(i) == yours.key(i) for i in range(shared + 5)]
    assert agree == [True] * shared + [False] * 5
    assert mine.num_shared == shared


def test_a_lora_is_not_a_salt_and_neither_is_a_model() -> None:
    table = KeyTable()
    names = [Namespace(model="n"), Namespace(lora="n"), Namespace(salt="n"), Namespace(lora="n", salt="n"), Namespace()]
    keys = [keys_of(a_request(64, ("a",), 64, namespace=name), 16, table)[0] for name in names]
    assert len(set(keys)) == len(names)


def test_ids_that_name_spans_of_different_lengths_never_share() -> None:
    """An id of 32 tokens and an id of 16 tokens are not the same tokens, whatever they are called."""
    table = KeyTable()
    long_spans = keys_of(a_request(64, ("a", "b"), 32, name="long"), 16, table)
    short_spans = keys_of(a_request(64, ("a", "b", "c", "d"), 16, name="short"), 16, table)
    assert not set(long_spans) & set(short_spans)


def test_two_engines_with_their_own_tables_give_the_same_keys_for_the_same_calls() -> None:
    spec = a_request(64, ("a", "b"), 16)
    assert keys_of(spec, 16, KeyTable()) == keys_of(spec, 16, KeyTable())


def chain(table: KeyTable, contents: tuple[object, ...], span: int = 16, block_size: int = 16) -> list[int]:
    """The keys of all blocks that end in these contents."""
    return [key for piece in table.shared(Namespace(), span, block_size, contents) for key in piece]


@given(
    st.lists(st.lists(st.sampled_from([1, True, 1.0, "1", 2]), max_size=8), max_size=12),
    st.sampled_from([(16, 16), (16, 48), (48, 16), (24, 16), (16, 24)]),
)
def test_keys_are_equal_exactly_where_typed_contents_are_however_sequences_part(
    sequences: list[list[object]], sizes: tuple[int, int]
) -> None:
    """Contents that nobody has parted from are kept in one piece; which pieces there are must not show."""
    table, (span, block_size) = KeyTable(), sizes
    key_of: dict[object, int] = {}
    for sequence in sequences:
        keys = chain(table, tuple(sequence), span, block_size)
        assert len(keys) == len(sequence) * span // block_size
        for index, key in enumerate(keys):
            last = ((index + 1) * block_size - 1) // span
            typed = (index, tuple((type(content), content) for content in sequence[: last + 1]))
            assert key_of.setdefault(typed, key) == key
    assert len(set(key_of.values())) == len(key_of)


def test_a_long_prompt_nobody_has_seen_shares_what_another_one_begins_with() -> None:
    table = KeyTable()
    first = chain(table, tuple(range(1000)))
    shorter = chain(table, tuple(range(400)))
    parting = chain(table, (*range(600), *range(2000, 2100)))
    assert shorter == first[:400]
    assert parting[:600] == first[:600]
    assert not set(parting[600:]) & set(first)
    assert chain(table, tuple(range(1000))) == first


# -- what an engine makes of them -----------------------------------------------------------------------------------


@given(st.integers(1, 70), st.sampled_from([1, 4, 16]))
def test_a_repeated_prompt_hits_every_full_block_but_never_its_last_token(input_tokens: int, block_size: int) -> None:
    hits = hits_of_a_repeated_prompt(input_tokens, block_size, ids=tuple(range(input_tokens)), span=1)
    assert hits == (input_tokens - 1) // block_size * block_size


@given(st.integers(1, 70), st.sampled_from([1, 4, 16]), st.sampled_from([5, 16, 64]))
def test_a_repeated_prompt_with_coarse_ids_hits_every_named_block_but_never_its_last_token(
    input_tokens: int, block_size: int, span: int
) -> None:
    ids = tuple(range(-(-input_tokens // span)))
    hits = hits_of_a_repeated_prompt(input_tokens, block_size, ids=ids, span=span)
    assert hits == (input_tokens - 1) // block_size * block_size


@given(st.integers(1, 70), st.sampled_from([1, 4, 16]))
def test_what_nothing_names_is_never_found_by_others(input_tokens: int, block_size: int) -> None:
    assert hits_of_a_repeated_prompt(input_tokens, block_size, ids=(), span=0) == 0


def hits_of_a_repeated_prompt(input_tokens: int, block_size: int, ids: tuple[int, ...], span: int) -> int:
    """Tokens that the second of two equal prompts finds, once the first has been served."""
    config = EngineConfig(
        num_gpu_blocks=200, block_size=block_size, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=128
    )
    first, second = (a_request(input_tokens, ids, span, name=name) for name in ("first", "second"))
    record = run_world(config, FixedCost(1.0), [first, second], max_concurrency=1, check=True)
    assert [request.outcome for request in record.requests] == [Outcome.FINISHED] * 2
    return record.requests[1].prefix_hit_tokens


def test_a_preempted_request_finds_its_own_private_blocks_again(drive: type) -> None:
    """Two requests of 8 tokens in 5 blocks of 4: the younger gives way at 9 tokens, and comes back to 2 of its own blocks."""
    engine = drive(num_gpu_blocks=5, block_size=4)
    engine.add("older", 8, 4)
    engine.add("younger", 8, 4)
    steps = engine.run()
    back = next(step for step in steps if "younger" in step.plan.admitted and step.plan.step > 0)
    assert steps[1].plan.preempted == ("younger",)
    assert back.tokens == {"younger": 1}
    assert [request.outcome for request in engine.ended] == [Outcome.FINISHED] * 2
