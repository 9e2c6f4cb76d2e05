"""A diagnosis for a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .diagnosis import Cause, Diagnosis, Fix


def render(diagnosis: Diagnosis) -> RenderableType:
    """The verdict in a frame, then evidence, what was ruled out, fixes with their effect, and what to record."""
    sure = "" if diagnosis.cause is Cause.UNKNOWN else f"   confidence {diagnosis.confidence:.0%}"
    head = Text.assemble(
        ("phase  ", "dim"),
        (str(diagnosis.phase), "bold"),
        "\n",
        ("cause  ", "dim"),
        (diagnosis.headline, "bold"),
        (sure, "dim"),
    )
    parts: list[RenderableType] = [Panel(head, title="diagnosis", expand=False)]
    for title, sentences in (
        ("Evidence", diagnosis.evidence),
        ("Ruled out", diagnosis.ruled_out),
    ):
        parts += _list(title, sentences)
    if diagnosis.fixes:
        parts += [Text("\nFixes", style="bold"), _fixes(diagnosis.fixes)]
    parts += _list("By file, each alone", tuple(
        f"{one.file}: {one.phase}, {one.cause}" + (f" ({one.confidence:.0%})" if one.confidence else "")
        for one in diagnosis.by_file
    ))  # fmt: skip
    parts += _list("Record next", diagnosis.next_to_record)
    parts += _list("Notes", diagnosis.notes)
    return Group(*parts)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print it on stdout."""
    Console(soft_wrap=False, highlight=False).print(render(diagnosis))


def _list(title: str, sentences: tuple[str, ...]) -> list[RenderableType]:
    if not sentences:
        return []
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row(" •", Text(sentence))
    return [Text(f"\n{title}", style="bold"), table]


def _fixes(fixes: tuple[Fix, ...]) -> Table:
    table = Table(box=None, pad_edge=True, show_edge=False)
    table.add_column("change", overflow="fold")
    table.add_column("GiB back", justify="right")
    table.add_column("KV tokens", justify="right")
    table.add_column("because", overflow="fold", style="dim")
    for fix in fixes:
        gib = "–" if fix.effect_gib is None else f"{fix.effect_gib:+.2f}"
        tokens = "–" if fix.effect_tokens is None else f"{fix.effect_tokens:+,}"
        table.add_row(Text(fix.change), gib, tokens, Text(fix.basis))
    return table
