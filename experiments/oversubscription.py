"""What over-committing the KV pool costs: TensorRT-LLM #16827, MAX_UTILIZATION against GUARANTEED_NO_EVICT.

    python -m experiments.oversubscription [--fits 48 32 24 16] [--json FILE]

128 requests of about 4096 + 512 tokens, 32 at a time, on a pool that holds so many of them to their end. The report measured, on
Llama-3.3-70B-FP8 on an H200 with TensorRT-LLM 1.2.1 and 128 requests of 512 output tokens, for the same change: output throughput
161.0 to 95.7 tokens/s (-40.6 %), TPOT p99 122 to 1111 ms (9.1 times), TTFT p50 35.8 to 27.1 s. It gives neither prompt lengths nor
pool, so this load was looked for (long prompts computed in chunks, somewhat more sent than fits), and only the direction is claimed:
the first token sooner, the tail of TPOT several times worse, throughput lower, and all of it explained by what is computed again.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sim.core.config import EngineConfig
from sim.core.policies import preset_of
from sim.core.request import RequestSpec
from sim.costs.constant import FixedCost
from sim.results.files import write_json
from sim.results.summary import summarize
from sim.world import run_world

INPUT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE = 4096, 512, 32
PER_TOKEN_S = 2e-4
COST = FixedCost(0.03, per_token_s=PER_TOKEN_S, per_context_token_s=3e-8)
"""A step costs 30 ms, and 0.2 ms a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one policy made of one pool."""

    preset: str
    requests_that_fit: float
    """Mean requests, at their full length, that the pool holds; 32 are sent at a time."""
    output_throughput_tokens_per_s: float
    ttft_p50_s: float
    tpot_p99_s: float
    num_preemptions: int
    recompute_share: float
    """Tokens computed again, as a share of all tokens computed."""
    recomputed_s: float
    """The time that those tokens took, without the steps' fixed part."""
    simulated_time_s: float
    """From the first arrival to the last end."""


def summary_of(preset: str, requests_that_fit: float) -> dict[str, Any]:
    """The summary of one run; the requests are always the same."""
    rng = random.Random(1)
    requests = [
        RequestSpec(
            request_id=f"r{index}",
            arrival_s=0.0,
            input_tokens=int(INPUT_TOKENS * rng.uniform(0.5, 1.5)),
            output_tokens=OUTPUT_TOKENS,
            max_tokens=OUTPUT_TOKENS,
        )
        for index in range(128)
    ]
    config = EngineConfig(
        num_gpu_blocks=int(requests_that_fit * (INPUT_TOKENS + OUTPUT_TOKENS)) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=32768,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    made = preset_of(preset, config)
    record = run_world(made.config, COST, requests, policy=made.policy, max_concurrency=32)
    return dict(summarize(record, scenario={}, seed=0, version=""))


def served(preset: str, requests_that_fit: float) -> Served:
    """The figures that the story is about."""
    summary = summary_of(preset, requests_that_fit)
    again, once = summary["recomputed_tokens"], summary["input_tokens"] + summary["output_tokens"]
    return Served(
        preset=preset,
        requests_that_fit=requests_that_fit,
        output_throughput_tokens_per_s=summary["output_throughput_tokens_per_s"],
        ttft_p50_s=summary["ttft_s"]["p50"],
        tpot_p99_s=summary["tpot_s"]["p99"],
        num_preemptions=summary["num_preemptions"],
        recompute_share=again / (again + once),
        recomputed_s=again * PER_TOKEN_S,
        simulated_time_s=summary["simulated_time_s"],
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", nargs="+", type=float, default=[48, 32, 24, 16], help="requests that the pool holds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if min(options.fits) < 2:
        parser.error(f"--fits has {min(options.fits):g}; the longest request alone needs a pool that holds 2")
    rows: list[Served] = []
    print(
        "| pool holds | preset | output tokens/s | TTFT p50 s | TPOT p99 ms | preemptions | computed again | in s | whole run s |"
    )
    print("|---" * 9 + "|")
    for fits in options.fits:
        for preset in ("trtllm-no-evict", "trtllm-max-util"):
            row = served(preset, fits)
            rows.append(row)
            print(
                f"| {fits:g} of 32 | {preset} | {row.output_throughput_tokens_per_s:.1f} | {row.ttft_p50_s:.1f} "
                f"| {1000 * row.tpot_p99_s:.0f} | {row.num_preemptions} | {row.recompute_share:.0%} "
                f"| {row.recomputed_s:.0f} | {row.simulated_time_s:.0f} |",
                flush=True,
            )
    if options.json is not None:
        write_json(options.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
