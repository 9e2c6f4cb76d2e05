"""What would have to change: each suggestion is the ledger again, with one setting changed."""

from __future__ import annotations

import pytest

from sim.core.config import ConfigError
from sim.memory import build_ledger
from sim.memory.target import Target, parse_target, suggestions


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("64 requests x 8192 tokens", Target(requests=64, prompt_tokens=8192)),
        ("64 x 8192", Target(requests=64, prompt_tokens=8192)),
        ("1 request × 131_072 tokens", Target(requests=1, prompt_tokens=131_072)),
        ("8 requests x 4096+1024 tokens, n=4", Target(requests=8, prompt_tokens=4096, output_tokens=1024, sequences=4)),
        (
            "8 requests x 4096+1024 tokens x 4 beams",
            Target(requests=8, prompt_tokens=4096, output_tokens=1024, sequences=4),
        ),
    ],
)
def test_a_target_is_read(text: str, target: Target) -> None:
    assert parse_target(text) == target
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    "text", ["", "many requests", "64 requests", "64 requests of 8192", "0 requests x 8192 tokens", "8192 tokens"]
)
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--fit"):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "unfilled"),
    [
        ("64 requests x 8192 tokens", 0),
        ("64 requests x 8190 tokens", 64 * 2),
        # The 6 full blocks of the prompt are shared; each of 4 sequences has 4 + 30 tokens of its own in 3 blocks.
        ("5 requests x 100+30 tokens, n=4", 5 * 4 * (3 * 16 - 34)),
    ],
)
def test_rounding_to_blocks_wastes_the_ends_of_last_blocks(text: str, unfilled: int) -> None:
    ledger = build_ledger("llama-3.1-8b", "h100")
    target = parse_target(text)
    assert target.unfilled_tokens(ledger) == unfilled
    if target.sequences == 1:
        assert target.blocks(ledger) * 16 - target.requests * target.tokens == unfilled


def test_a_target_that_fits_needs_nothing() -> None:
    ledger, found = suggestions({"model": "llama-3.1-8b", "gpu": "h100"}, parse_target("32 x 8192"))
    assert ledger is not None and found == []


def test_every_suggestion_is_what_the_ledger_says() -> None:
    settings = {"model": "llama-3.1-8b", "gpu": "h100", "max_model_len": 8192}
    target = parse_target("128 requests x 8192 tokens")
    base, found = suggestions(settings, target)
    assert base is not None and not target.fits(base)
    assert target.shortage_bytes(base) == (128 * 512 - base.num_gpu_blocks) * base.block_bytes
    for one in found:
        changed = build_ledger(**{**settings, **one.settings})
        assert one.effect_tokens == changed.kv_tokens - base.kv_tokens
        assert one.effect_gib == pytest.approx(changed.line("kv_pool").gib - base.line("kv_pool").gib)
        assert one.fits == target.fits(changed)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True) and any(fits)
    flags = " ".join(one.change for one in found)
    for flag in (
        "gpu-memory-utilization",
        "kv-cache-dtype",
        "quantization",
        "max-num-seqs",
        "max-num-batched-tokens",
        "tensor-parallel-size",
        "--gpu ",
    ):
        assert flag in flags


def test_changes_on_the_same_gpu_are_taken_together_where_none_is_enough() -> None:
    found = suggestions({"model": "llama-3.1-8b", "gpu": "h100"}, parse_target("128 x 8192"))[1]
    together = found[0]
    assert together.fits and len(together.settings) > 1
    assert not {"gpu", "tensor_parallel_size"} & together.settings.keys()


def test_a_model_that_does_not_start_has_no_base_and_still_has_ways_out() -> None:
    base, found = suggestions({"model": "llama-3.1-70b", "gpu": "h100"}, parse_target("16 x 8192"))
    assert base is None
    assert found[0].settings == {"tensor_parallel_size": 4} and found[0].fits


def test_continuations_of_one_prompt_are_counted_once_where_they_share() -> None:
    ledger = build_ledger("llama-3.1-8b", "h100")
    many, one = parse_target("8 x 4096+1024, n=4"), parse_target("32 x 4096+1024")
    assert many.blocks(ledger) == 8 * (256 + 4 * 64)
    assert one.blocks(ledger) == 32 * 320
