"""How long outputs will be, learned from outputs that ended and from those that have not ended yet."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from ..config import ConfigError


class Survival:
    """P(an output is longer than n tokens), a step function of n.

    Estimated from finished outputs and running ones with the product-limit formula (Kaplan and Meier, 1958):

        P(length > n) = product over observed lengths L <= n of (1 - ended_L / reached_L)

    where `reached_L` counts outputs seen to have at least L tokens, and one more that is imagined never to end. Leaving the running
    out would teach that outputs are short, because the short ones end first. The imagined one keeps the tail open: with nothing
    observed every output may reach its cap; after n ended ones about 1 in n + 1 still may.

    Assumes that outputs are alike, and independent of how long a request waited. Finished outputs are a window of the latest,
    running ones have all of their past counted, so in a long run `reached_L` is a little large and outputs are taken to be a little
    longer than they are.
    """

    def __init__(self, ended: Iterable[int] = (), running: Iterable[int] = ()) -> None:
        ended_at, still = Counter(ended), sorted(running)
        self._lengths = sorted(ended_at)
        self._after: list[float] = [1.0]
        """`_after[i]` is the probability beyond the first i observed lengths."""
        reached = sum(ended_at.values()) + 1
        for length in self._lengths:
            beyond = len(still) - bisect_right(still, length - 1)  # running ones that have at least `length` tokens
            self._after.append(self._after[-1] * (1.0 - ended_at[length] / (reached + beyond)))
            reached -= ended_at[length]

    @classmethod
    def from_quantiles(cls, quantiles: Sequence[tuple[float, int]]) -> Survival:
        """From `(share, tokens)` pairs, ascending: that share of outputs has at most so many tokens; straight between them.

        Raises ConfigError for shares or lengths that do not ascend.
        """
        shares, lengths = [share for share, _ in quantiles], [tokens for _, tokens in quantiles]
        if not quantiles or shares != sorted(shares) or lengths != sorted(lengths) or shares[0] < 0 or shares[-1] > 1:
            raise ConfigError(
                f"quantiles of output lengths must ascend in share (0 to 1) and tokens; got {list(quantiles)}"
            )
        made = cls()
        low_share, low_tokens = 0.0, 0
        for share, tokens in quantiles:
            parts = min(16, max(tokens - low_tokens, 1))
            for part in range(1, parts + 1):
                made._lengths.append(low_tokens + (tokens - low_tokens) * part // parts)
                made._after.append(1.0 - (low_share + (share - low_share) * part / parts))
            low_share, low_tokens = share, tokens
        return made

    def beyond(self, tokens: int) -> float:
        """P(length > tokens)."""
        return self._after[bisect_right(self._lengths, tokens)]
