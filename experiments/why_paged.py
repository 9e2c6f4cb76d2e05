"""Why paged: one run's KV cache held in six ways, with the same bytes, and what becomes of them over time.

Run `python -m experiments.why_paged [SCENARIO.toml] --out FILE.html`. The scenario is simulated with its own (paged) pool; then the
life of every request, as it was, is replayed under each way of holding its keys and values: reserved in one piece for the longest
sequence, for exactly its own length, in powers of two, grown by copying (in one arena and in PyTorch's caching allocator), and
paged. The page shows what holds tokens, what was set aside for none (internal fragmentation) and what is free in pieces too small
(external).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.memory.allocators import Holding, KvSpan
    from sim.results.result import Result
    from sim.scenario import Scenario

_POINTS_OF_TOKENS = 16
"""A request's growth is replayed in steps of so many tokens: a block."""


def small_busy_card() -> Scenario:
    """A pool that holds about a dozen conversations, and more of them than that."""
    from sim import Scenario

    return Scenario(
        model="llama-3.1-8b",
        gpu="l4-24gb",
        engine={"max_model_len": 8192, "num_gpu_blocks_override": 1400},
        workload={"workload": "azure-conv", "num_requests": 300, "rate": 2.0},
    )


def spans_of(result: Result, longest: int) -> list[KvSpan]:
    """The life of each finished request's KV: its prompt from when it was scheduled, then token by token until it ended.

    `longest` is the sequence that a reservation without foresight must reckon with.
    """
    from sim.memory.allocators import KvSpan

    rows = result.request_columns
    names = ("request_id", "outcome", "scheduled_s", "finished_s", "input_tokens", "output_tokens")
    spans = []
    for row in zip(*(rows[name] for name in names), strict=True):
        name, outcome, start_s, end_s, prompt, output = row
        if outcome != "finished" or output < 1:
            continue
        spans.append(
            KvSpan.steady(
                str(name),
                start_s=start_s,
                prompt_tokens=prompt,
                output_tokens=output,
                seconds_per_token=(end_s - start_s) / output,
                max_tokens=max(longest, prompt + output),
                tokens_per_point=_POINTS_OF_TOKENS,
            )
        )
    return spans


def holdings_of(result: Result) -> list[Holding]:
    """The run held in every way, on the bytes of its own pool."""
    from sim.memory.allocators import compare_holdings

    ledger: Any = result.ledger
    longest = int(result.scenario["engine"]["max_model_len"])
    return compare_holdings(
        spans_of(result, longest),
        ledger.num_gpu_blocks * ledger.block_bytes,
        bytes_per_token=ledger.kv_bytes_per_token,
        block_size=ledger.block_size,
    )


def rows_of(holdings: Sequence[Holding]) -> list[dict[str, Any]]:
    """One row a way: requests served and dropped, best use of the memory, and mean fragmentation over the events."""
    rows = []
    for one in holdings:
        table = one.replay.columns()
        inside = [
            1 - used / held for used, held in zip(table["used_bytes"], table["allocated_bytes"], strict=True) if held
        ]
        outside = table["external_fragmentation"]
        rows.append(
            {
                "name": one.name,
                "served": one.requests_served,
                "dropped": one.requests_dropped,
                "best_use": one.best_use,
                "internal": sum(inside) / max(1, len(inside)),
                "external": sum(outside) / max(1, len(outside)),
                "in_pieces": one.fragmentation_failures,
            }
        )
    return rows


def page(holdings: Sequence[Holding], title: str) -> str:
    """The comparison as one page that loads nothing."""
    from sim.results.page_parts import card, html_page, html_table, panels, verdict

    head = ("Held", "Served", "Dropped", "Failed in pieces", "Best use", "Internal, mean", "External, mean")
    rows = [
        (
            row["name"],
            f"{row['served']:,}",
            f"{row['dropped']:,}",
            f"{row['in_pieces']:,}",
            *(f"{row[share]:.1%}" for share in ("best_use", "internal", "external")),
        )
        for row in rows_of(holdings)
    ]
    said = (
        "Every way has the same bytes for keys and values. A request whose next allocation does not fit is dropped, so fewer dropped "
        "requests mean more load that fits."
    )
    end_s = max(one.replay.columns()["time_s"][-1] for one in holdings)
    pictures = panels([_picture(one, end_s) for one in holdings])
    body = verdict("plain", ["kvtwin", title], "Why paged", said) + card(
        "Six ways to hold the same requests", html_table(head, rows)
    )
    return html_page("Why paged", body + card("Over time", pictures))


def _picture(one: Holding, end_s: float) -> str:
    """One way until `end_s`, all in shares of the memory: what holds tokens, what was set aside for none, and what is free but not in
    the largest free piece.
    """
    from sim.results.svg_plot import Series, plot

    table = one.replay.columns()
    parts = {
        "holds tokens": table["used_bytes"],
        "set aside and empty": map(sub, table["allocated_bytes"], table["used_bytes"]),
        "free in smaller pieces": map(sub, table["free_bytes"], table["largest_free_bytes"]),
    }
    series = [
        Series(name=name, x=table["time_s"], y=[100 * value / one.capacity_bytes for value in values], steps=True)
        for name, values in parts.items()
    ]
    return plot(one.name, series, x_label="s", y_label="% of the memory", x_range=(0.0, end_s), y_range=(0.0, 100.0))


def main(arguments: Sequence[str]) -> int:
    """Simulate, replay, print the table, write the page. Returns the exit code: 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.why_paged", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenario", nargs="?", type=Path, help="a scenario file; without one, a small card under load")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the page here")
    given = parser.parse_args(arguments)
    from sim import Scenario, simulate
    from sim.core.config import ConfigError
    from sim.results.files import write_text
    from sim.scenario import ScenarioError

    try:
        scenario = Scenario.load(given.scenario) if given.scenario else small_busy_card()
        result = simulate(scenario)
        holdings = holdings_of(result)
    except (ScenarioError, ConfigError, OSError) as error:
        sys.stderr.write(f"why_paged: {error}\n")
        return 2
    print(f"{'held':<44}{'served':>8}{'dropped':>9}{'in pieces':>11}{'best use':>10}{'internal':>10}{'external':>10}")
    for row in rows_of(holdings):
        print(
            f"{row['name']:<44}{row['served']:>8,}{row['dropped']:>9,}{row['in_pieces']:>11,}{row['best_use']:>10.1%}"
            f"{row['internal']:>10.1%}{row['external']:>10.1%}"
        )
    if given.out is not None:
        tables = result.scenario
        title = f"{tables['model']['model']} on {tables['gpu']['gpu']}, {len(result.request_columns['request_id']):,} requests"
        write_text(given.out, page(holdings, title))
        print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
