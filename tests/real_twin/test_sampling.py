"""What is sampled has the distribution that was asked for: counts against exact probabilities, with the random numbers of real runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from gpu.kernels.sample_twin import sample_twin
from gpu.kernels.sampling import SampleCall
from gpu.tokens import TokenBook

DRAWS = 8_000
LOGITS = (2.0, -1.0, 0.5, 0.5, 1.25, -3.0, 1.25, 0.0)
"""Two pairs of equals, so that top-k has ties to keep."""


@cache
def uniforms() -> tuple[float, ...]:
    """The random numbers of as many positions of one request."""
    book = TokenBook([], seed=3, vocab_size=len(LOGITS))
    return tuple(book.uniform("r0", position) for position in range(DRAWS))


def exact(temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities by the definition: softmax of what is left by top-k (and equals of its last), then the smallest set of the
    likeliest that has a share of `top_p`, equals of its last included.
    """
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    if top_k:
        last = sorted(weights, reverse=True)[top_k - 1]
        weights = [weight if weight >= last else 0.0 for weight in weights]
    ordered, whole, reached, last = sorted(weights, reverse=True), sum(weights), 0.0, 0.0
    for weight in ordered:
        if reached >= top_p * whole:
            break
        reached, last = reached + weight, weight
    kept = [weight if weight >= last else 0.0 for weight in weights]
    return [weight / sum(kept) for weight in kept]


def chi_square(counts: Sequence[int], shares: Sequence[float]) -> tuple[float, int]:
    """The statistic, and its degrees of freedom. What has no share must have no count."""
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0.0)
    total = sum(counts)
    terms = [
        (count - total * share) ** 2 / (total * share) for count, share in zip(counts, shares, strict=True) if share
    ]
    return sum(terms), len(terms) - 1


def bound(freedom: int) -> float:
    """What the statistic exceeds once in some ten thousand cases. **Source:** Wilson and Hilferty (1931), the normal's 3.72."""
    share = 2 / (9 * max(freedom, 1))
    return max(freedom, 1) * (1 - share + 3.72 * share**0.5) ** 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (4, 1.0), (0, 0.6), (0, 0.95), (5, 0.7), (1, 1.0)])
def test_counts_are_those_of_the_exact_probabilities(temperature, top_k, top_p):
    tokens = torch.full((DRAWS,), -7)
    sample_twin(
        SampleCall(
            logits=torch.tensor([LOGITS]).expand(DRAWS, -1),
            temperature=torch.full((DRAWS,), temperature),
            top_k=torch.full((DRAWS,), top_k, dtype=torch.int32),
            top_p=torch.full((DRAWS,), top_p),
            uniform=torch.tensor(uniforms()),
            tokens=tokens,
        )
    )
    seen = Counter(tokens.tolist())
    statistic, freedom = chi_square([seen[token] for token in range(len(LOGITS))], exact(temperature, top_k, top_p))
    assert sum(seen.values()) == DRAWS
    assert statistic < bound(freedom)


def test_the_count_is_not_blind():
    """A temperature that is a tenth off is seen."""
    shares = exact(1.0, 0, 1.0)
    counts = [round(DRAWS * share) for share in exact(1.1, 0, 1.0)]
    statistic, freedom = chi_square(counts, shares)
    assert statistic > bound(freedom)


@pytest.mark.parametrize("apart", ["positions", "requests", "seeds"])
def test_random_numbers_of_neighbours_have_nothing_to_do_with_each_other(apart):
    """Pairs on a grid of 8 by 8, of two positions, two requests, two seeds."""
    book, other = (TokenBook([], seed=seed, vocab_size=2) for seed in (3, 4))
    pairs = {
        "positions": lambda place: (book.uniform("r0", place), book.uniform("r0", place + 1)),
        "requests": lambda place: (book.uniform("r0", place), book.uniform("r1", place)),
        "seeds": lambda place: (book.uniform("r0", place), other.uniform("r0", place)),
    }[apart]
    seen = Counter(tuple(int(8 * number) for number in pairs(place)) for place in range(DRAWS))
    statistic, freedom = chi_square([seen[x, y] for x in range(8) for y in range(8)], [1 / 64] * 64)
    assert statistic < bound(freedom)
