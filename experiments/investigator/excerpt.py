"""The parts of a long log that a diagnosis needs: the start-up, and the lines around the failure."""

from __future__ import annotations

HEAD_CHARS = 1 << 19
"""Kept from the beginning: start-up with its configuration."""
BEFORE_CHARS, AFTER_CHARS = 3 << 17, 1 << 17
"""Kept before and after the first failure."""
_SIGNS = (
    "out of memory",
    "outofmemory",
    "no available memory",
    "memory leak detected",
    "to serve at least one request",
    "buffer overflow when",
)


def excerpt(text: str) -> str:
    """`text` itself, or those two parts of it with blank lines for what was left out, so that line numbers stay.

    Without a sign of a failure the end of the log takes its place.
    """
    if len(text) <= HEAD_CHARS + BEFORE_CHARS + AFTER_CHARS:
        return text
    lowered = text.lower()
    found = [at for at in (lowered.find(sign) for sign in _SIGNS) if at >= 0]
    failure = min(found, default=len(text))
    start = max(HEAD_CHARS, failure - BEFORE_CHARS)
    # Whole lines only: half a line may read like something else.
    start = text.find("\n", start) + 1 or start
    head = text[: text.rfind("\n", 0, HEAD_CHARS) + 1 or HEAD_CHARS]
    return head + "\n" * text.count("\n", len(head), start) + text[start : max(start, failure) + AFTER_CHARS]
