"""TokenBook: which tokens a request is made of. Pure Python.

A trace says how long prompts are and which parts of them are equal, not what they say. Here every content id becomes tokens
drawn from the seed and the id, so that equal ids mean equal tokens; what no id names is drawn from the request's own name,
or from that of the request whose samples it is one of.
Output is what the model samples, except where a trace's ids name the output too (the next turn of a conversation will
repeat it): there the named token is fed back, and the sampled one is kept as the answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from sim.core.request import RequestSpec


class TokenBook:
    """The tokens of a run's requests, prompt and answer."""

    def __init__(self, requests: Iterable[RequestSpec], *, seed: int, vocab_size: int) -> None:
        self._specs = {spec.request_id: spec for spec in requests}
        self._seed = seed
        self._vocabulary = range(vocab_size)
        self._known: dict[str, list[int]] = {}
        self._named: dict[str, list[int]] = {}
        self._sampled: dict[str, list[int]] = {}

    def spec(self, request_id: str) -> RequestSpec:
        """What was asked for.

        Raises:
            KeyError: a request that nobody announced.
        """
        if request_id not in self._specs:
            raise KeyError(f"request {request_id} is not among the {len(self._specs)} whose tokens are known")
        return self._specs[request_id]

    def tokens(self, request_id: str, start: int, stop: int) -> list[int]:
        """Tokens `[start, stop)` of a request.

        Raises:
            ValueError: one of them has not been sampled yet: the plan is ahead of its executor.
        """
        known = self._known.get(request_id)
        if known is None:
            known = self._known[request_id] = self._prompt(request_id)
        if stop > len(known):
            raise ValueError(f"{request_id} is to compute token {stop - 1}, but only {len(known)} are known")
        return known[start:stop]

    def num_known(self, request_id: str) -> int:
        """Tokens of a request that are known: its prompt, and what has been sampled."""
        return len(self._known[request_id]) if request_id in self._known else self.spec(request_id).input_tokens

    def record(self, request_id: str, position: int, token: int) -> None:
        """The model sampled `token` for `position`. What was recorded from there on, by steps that did not count, is forgotten.

        Raises:
            ValueError: the token before it is not known.
        """
        spec, known = self.spec(request_id), self._known[request_id]
        answer, index = self._sampled.setdefault(request_id, []), position - spec.input_tokens
        if position > len(known) or not 0 <= index <= len(answer):
            raise ValueError(
                f"{request_id} got token {position}, but {len(known)} tokens are known and {len(answer)} sampled"
            )
        named = self._named[request_id]
        del known[position:], answer[index:]
        known.append(named[index] if index < len(named) else token)
        answer.append(token)

    def fork(self, request_id: str, source: str) -> None:
        """From here on a request's tokens are those of `source`, sampled ones included. With greedy sampling that is also what its
        own first token would have been; with a temperature, samples of one prompt would start with the same token.
        """
        self.tokens(request_id, 0, 0)
        self._known[request_id] = self._known[source].copy()
        self._sampled[request_id] = self._sampled.get(source, []).copy()

    def answer(self, request_id: str, num_tokens: int | None = None) -> list[int]:
        """The first `num_tokens` sampled tokens (all by default)."""
        return self._sampled.get(request_id, [])[:num_tokens]

    def uniform(self, request_id: str, position: int) -> float:
        """The random number in [0, 1) that belongs to a position: the same whoever shares the batch."""
        return random.Random(f"{self._seed}:sample:{request_id}:{position}").random()

    def _prompt(self, request_id: str) -> list[int]:
        spec = self.spec(request_id)
        named: list[int] = []
        for content in spec.content_ids:
            if len(named) >= spec.named_tokens:
                break
            named += self._draw(f"{content.__class__.__name__}:{content!r}", spec.content_block_tokens)
        del named[spec.named_tokens :]
        self._named[request_id] = named[spec.input_tokens :]
        private = self._draw(f"private:{spec.sample_of or request_id}", max(spec.input_tokens - len(named), 0))
        return [*named[: spec.input_tokens], *private]

    def _draw(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self._seed}:{name}").choices(self._vocabulary, k=count)
