"""The public out-of-memory reports, diagnosed: expected against got, and how often that is right.

Run `python -m experiments.diagnose_oom_table [oom_messages.csv]`. It is printed twice. First, each
row is diagnosed from the message, the context and the model alone, none of the columns that hold an answer: this is the figure for
how well phases are inferred. Then the phase column is added as the title of the report, as reporters write it: the phase is then
mostly read, and what is shown is that it is read right and what knowing it does for the cause.

`ANSWERS` is the key: for each report the phases and causes that its free-text root cause admits, read row by row.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.investigator import Cause, Diagnosis, Phase, diagnose_text

_START = frozenset({Phase.START_UP, Phase.LOADING, Phase.PROFILING, Phase.GRAPH_CAPTURE, Phase.SAMPLER_WARM_UP})
_SERVING = frozenset({Phase.SERVING, Phase.PREFILL, Phase.DECODE, Phase.SAMPLING})


@dataclass(frozen=True, slots=True)
class Answer:
    """What a row admits as right."""

    phases: frozenset[Phase]
    causes: frozenset[Cause]


def _answer(phases: Phase | frozenset[Phase], *causes: Cause) -> Answer:
    return Answer(phases if isinstance(phases, frozenset) else frozenset({phases}), frozenset(causes))


# By the last part of the source. Why, where it is not plain from the row:
#  15105, 31618444482, 13221  the cause is that the account left too little room: the budget, or the peak it left out.
#  29049    LoRA slots and the sampler's warm-up, neither in the profile.
#  10637    "graphs + fragmentation outside profile".
#  257      prompt log-probabilities are made while a prompt is prefilled, by the sampler's code.
#  33155    no figures and no phase but "startup": "cannot tell" is right.
#  16343    nobody named a cause; counted nowhere.
#  172      a preallocation after the static pool took its share, for symmetric memory (communication).
#  2398     torch owns nothing: the engine's memory is outside it.
ANSWERS: Mapping[str, Answer] = {
    "27508": _answer(Phase.SAMPLER_WARM_UP, Cause.TRANSIENT_PEAK),
    "15105": _answer(_START, Cause.BUDGET, Cause.TRANSIENT_PEAK),
    "17939": _answer(Phase.SAMPLER_WARM_UP, Cause.TRANSIENT_PEAK),
    "29049": _answer(Phase.SAMPLER_WARM_UP, Cause.TRANSIENT_PEAK),
    "57595": _answer(Phase.GRAPH_CAPTURE, Cause.CUDA_GRAPHS),
    "7593": _answer(Phase.GRAPH_CAPTURE, Cause.CUDA_GRAPHS),
    "31273": _answer(Phase.LOADING, Cause.WEIGHTS),
    "40291": _answer(Phase.LOADING, Cause.WEIGHTS),
    "751": _answer(Phase.LOADING, Cause.OTHER_PROCESS),
    "783": _answer(_START, Cause.OTHER_PROCESS),
    "27466": _answer(_SERVING, Cause.FRAGMENTATION),
    "37428": _answer(_SERVING, Cause.FRAGMENTATION),
    "10637": _answer(_SERVING, Cause.CUDA_GRAPHS),
    "13221": _answer(_SERVING, Cause.BUDGET),
    "257": _answer(frozenset({Phase.SAMPLING, Phase.PREFILL}), Cause.TRANSIENT_PEAK),
    "5847": _answer(Phase.PROFILING, Cause.TRANSIENT_PEAK),
    "25597": _answer(Phase.COMMUNICATION, Cause.NON_TORCH),
    "16343": _answer(_START | {Phase.UNKNOWN}, Cause.UNKNOWN, Cause.BUDGET),
    "33155": _answer(_START | {Phase.UNKNOWN}, Cause.UNKNOWN),
    "42512954114": _answer(Phase.GRAPH_CAPTURE, Cause.CUDA_GRAPHS),
    "54825110075": _answer(Phase.LOADING, Cause.WEIGHTS),
    "69490887510": _answer(_SERVING | {Phase.AFTER_RELEASE}, Cause.OTHER_PROCESS),
    "31618444482": _answer(_SERVING, Cause.BUDGET, Cause.TRANSIENT_PEAK, Cause.KV_CAPACITY),
    "58686239322": _answer(Phase.PREFILL, Cause.KERNEL_FALLBACK),
    "5285": _answer(Phase.GRAPH_CAPTURE, Cause.CUDA_GRAPHS),
    "172": _answer(frozenset({Phase.START_UP, Phase.COMMUNICATION}), Cause.BUDGET, Cause.NON_TORCH),
    "1356": _answer(frozenset({Phase.PREFILL}), Cause.BUDGET),
    "653": _answer(frozenset({Phase.PREFILL}), Cause.BUDGET),
    "8642": _answer(frozenset({Phase.START_UP}), Cause.KV_CAPACITY),
    "2398": _answer(_SERVING, Cause.NON_TORCH),
}

_UNNAMED = ("none", "derived", "suspected")
"""Words with which `root_cause_confidence` says that no maintainer, title or reporter named the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row, judged."""

    key: str
    named: bool
    """The cause was named by a maintainer, the title or the reporter."""
    expected: Answer
    got: Diagnosis

    @property
    def phase_ok(self) -> bool:
        """The phase is one of the right ones."""
        return self.got.phase in self.expected.phases

    @property
    def cause_ok(self) -> bool:
        """The first cause is one of the right ones."""
        return self.got.cause in self.expected.causes


def report_text(row: Mapping[str, str], with_phase: bool = False) -> str:
    """What the row's reporter would paste. `with_phase` adds the phase in the row's own words, as a title does."""
    title = f"Out of memory: {row['phase']}\n" if with_phase else ""
    return f"{title}model: {row['model']}\n{row['context']}\n{row['message']}\n"


def judge_rows(rows: Sequence[Mapping[str, str]], with_phase: bool = False) -> list[Line]:
    """Every row that has an answer, diagnosed."""
    lines = []
    for row in rows:
        key = row["source"].rstrip("/").replace(" ", "/").rsplit("/", 1)[-1]
        if key in ANSWERS:
            named = not row["root_cause_confidence"].startswith(_UNNAMED)
            lines.append(
                Line(key=key, named=named, expected=ANSWERS[key], got=diagnose_text(report_text(row, with_phase)))
            )
    return lines


def shares(lines: Sequence[Line]) -> tuple[float, float]:
    """Share of right phases and of right causes."""
    return sum(line.phase_ok for line in lines) / len(lines), sum(line.cause_ok for line in lines) / len(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table. Returns the exit code."""
    default = Path(os.environ.get("KVTWIN_DATA", "shared/data")) / "memory" / "oom_messages.csv"
    path = Path(arguments[0]) if arguments else default
    if not path.is_file():
        sys.stderr.write(f"{path}: no such file; give the path of oom_messages.csv, or set KVTWIN_DATA\n")
        return 2
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for with_phase in (False, True):
        lines = judge_rows(rows, with_phase)
        print(f"\n{'with' if with_phase else 'without'} the report's title")
        for line in lines:
            marks = f"{'ok ' if line.phase_ok else '-- '}{'ok' if line.cause_ok else '--'}"
            want = f"{'/'.join(sorted(line.expected.phases))[:40]} | {'/'.join(sorted(line.expected.causes))}"
            print(
                f"{marks} {line.key:>12} {'n' if line.named else ' '} {want:<78} <- {line.got.phase} | "
                f"{line.got.headline} {line.got.confidence:.2f}"
            )
        for name, chosen in (
            ("cause named by maintainer, title or reporter", [line for line in lines if line.named]),
            ("all rows", lines),
        ):
            phase, cause = shares(chosen)
            print(f"{name}: {len(chosen)} rows, right phase {phase:.0%}, right cause first {cause:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
