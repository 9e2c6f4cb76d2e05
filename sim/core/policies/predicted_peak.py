"""Admission by the predicted peak of memory: take in as many as will probably fit, not as many as fit now, nor in the worst case.

Let request i have p_i known tokens, g_i of them generated, and cap_i. h decode steps from now it still runs with probability

    q_i(h) = P(length > g_i + h | length > g_i), or 0 if g_i + h >= cap_i,

and then holds b_i(h) = ceil((p_i + h) / block_size) blocks. With independent lengths, the blocks in demand then, D(h), have

    mean = sum of q_i b_i,    variance = sum of q_i (1 - q_i) b_i^2.

The head of the queue may start if, with it among the requests, P(D(h) > pool) <= risk at the worst h. For more than eight requests
D is taken to be normal (with half a block of continuity correction); for fewer, its distribution is computed exactly.

h runs over whole blocks' worth of steps, so b_i(h) = b_i(0) + h / block_size, and g_i is rounded down to one: requests of an age
share their q.

Assumptions. Everybody advances one token a step: steps that only compute prompts shift all alike, and a prompt not yet computed counts
whole. Later arrivals are judged when they come. The worst single moment stands for the peak over all moments, which is a little
more probable; moments are looked at a block apart at first, and then at distances that grow by half. Blocks that requests share
are counted for each of them, and the window of a model that has nothing else is not credited: both err on the safe side. With several
attention groups b_i(h) is what all of them hold then, windows credited. Source: kvtwin's own; no engine
that was read does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import erfc, sqrt

from ..admission import FOREVER, AdmissionBase, Rejection
from ..config import ConfigError
from ..look import RequestLook
from ..need import blocks_for
from ..view import EngineView
from .survival import Survival

EXACT_UP_TO = 8
"""Requests whose sums are all written out."""
OWN_HISTORY = 64
"""Finished requests after which a tenant is judged by its own outputs."""
RELEARN_EVERY = 16
"""Finished requests between two estimates, once there are 64."""


def horizons(block_size: int, longest_tokens: int) -> list[int]:
    """Blocks' worth of steps ahead at which the demand is looked at: 0, 1, 2, 3, 4, then half as many again each time."""
    ahead = [0, 1, 2]
    while ahead[-1] * block_size < longest_tokens:
        ahead.append(ahead[-1] + max(ahead[-1] // 2, 1))
    return ahead


def still_running(
    output_tokens: int, cap: int, lengths: Survival, block_size: int, ahead: Sequence[int]
) -> tuple[float, ...]:
    """For each horizon, the probability that a request with so many generated tokens, of at most `cap`, still runs then: 1 where none so
    long was ever seen to go on.
    """
    beyond, begun = lengths.beyond, lengths.beyond(output_tokens)
    alive: list[float] = []
    for blocks in ahead:
        then = output_tokens + blocks * block_size
        if blocks and then >= cap:
            break
        alive.append(beyond(then) / begun if blocks and begun > 0.0 else 1.0)
    return (*alive, *[0.0] * (len(ahead) - len(alive)))


def exceeds(pool: int, parts: Sequence[tuple[float, int]]) -> float:
    """P(sum of the blocks of those alive > pool), exactly: `parts` are (probability of being alive, blocks)."""
    sums: dict[int, float] = {0: 1.0}
    for alive, blocks in parts:
        longer: dict[int, float] = {}
        for total, probability in sums.items():
            longer[total] = longer.get(total, 0.0) + probability * (1.0 - alive)
            longer[total + blocks] = longer.get(total + blocks, 0.0) + probability * alive
        sums = longer
    return sum(probability for total, probability in sums.items() if total > pool)


def normal_exceeds(pool: int, mean: float, variance: float) -> float:
    """P(D > pool) for a whole-numbered D that is about normal."""
    if variance <= 0.0:
        return float(mean > pool)
    return 0.5 * erfc((pool + 0.5 - mean) / sqrt(2.0 * variance))


Part = tuple[tuple[float, ...], int]
"""One of the running requests: when it will still run, and its length in blocks of one table."""
Kind = tuple[tuple[float, ...], list[int]]
"""Running requests with one curve: when they will still run, and their lengths in blocks of one table."""


def _alike(parts: Iterable[Part]) -> list[Kind]:
    """Put together those with one curve; equal curves are one object."""
    alike: dict[int, Kind] = {}
    for curve, whole in parts:
        alike.setdefault(id(curve), (curve, []))[1].append(whole)
    return list(alike.values())


class PredictedPeak(AdmissionBase):
    """Start the head of the queue while P(peak demand > pool) <= `risk`; waived when nothing runs.

    Output lengths are learned from the requests that finish here (by tenant, once it has 64) and from those that run, or given as
    `quantiles`, `(share, tokens)` pairs. Until something has finished every request may reach its cap, as in full reservation.

    Not steady: as requests grow older their chances change, so a no can turn into a yes. The prediction is renewed every block_size
    decode steps, and when lengths are learned anew; in between, who starts is counted in, as old as it is then, and who
    leaves is counted out.
    """

    steady = False

    def __init__(self, *, risk: float = 0.05, quantiles: Sequence[tuple[float, int]] | None = None) -> None:
        if not 0.0 < risk < 1.0:
            raise ConfigError(f"risk is {risk}; it is a probability, above 0 and below 1")
        self.risk = risk
        self._given = None if quantiles is None else Survival.from_quantiles(quantiles)
        self._learned: dict[str, Survival] = {}
        self._learned_at = -1
        self._curves: dict[tuple[str, int, int], tuple[float, ...]] = {}
        self._key: tuple[int, int, int, int] | None = None
        self._ahead: list[int] = [0]
        self._few: list[tuple[tuple[float, ...], tuple[int, ...]]] = []
        self._held: dict[int, tuple[int, ...]] = {}
        self._moments: list[tuple[float, float]] = []
        self._equal: dict[tuple[float, ...], tuple[float, ...]] = {}
        self._parts: dict[str, Part] = {}  # by request id, as of the latest renewal
        self._predicted = False  # whether the latest answer rests on one

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Compare the probability at the worst moment with the risk."""
        self._predicted = False
        if not view.num_running:
            return True
        if need_blocks > view.num_free_blocks:
            return False
        self._predicted = True
        return self.probability(request, view) <= self.risk

    def steps_of_no(self, view: EngineView) -> int:
        """Until the prediction is renewed."""
        if not self._predicted:
            return FOREVER  # too few blocks are free, and they get fewer
        return view.block_size - view.decode_clock % view.block_size if view.has_full_attention else 1

    def probability(self, request: RequestLook, view: EngineView) -> float:
        """P(the running requests and this one come to need more than the pool), at the worst moment."""
        self._renew(view)
        own = self._curve(
            request.spec.tenant, request.num_output_tokens, view.output_cap(request.spec), view.block_size
        )
        held = self._blocks_ahead(blocks_for(request.num_tokens, view.block_size), view)
        worst, pool, few = 0.0, view.num_blocks, view.num_running < EXACT_UP_TO
        for index, blocks in enumerate(held):
            alive = own[index]
            if few:
                parts = [(curve[index], others[index]) for curve, others in self._few]
                chance = exceeds(pool, [*parts, (alive, blocks)])
            else:
                mean, variance = self._moments[index]
                chance = normal_exceeds(pool, mean + alive * blocks, variance + alive * (1.0 - alive) * blocks * blocks)
            worst = max(worst, chance)
        return worst

    def _renew(self, view: EngineView) -> None:
        """Predict for the running requests, if the last prediction is out of date."""
        window = (
            0 if view.has_full_attention else view.now_fs
        )  # with a window nobody is in the decode set, whose clock stands still
        key = (view.num_admissions, view.num_running, view.decode_clock // view.block_size, window)
        if key == self._key:
            return
        aged = self._key is None or key[2:] != self._key[2:]
        self._key = key
        block_size = view.block_size
        self._ahead = horizons(block_size, view.max_model_len)
        before, self._parts = ({} if self._learn(view) or aged else self._parts), {}
        come: list[Part] = []
        for name, running in view.running_by_id():
            part = before.pop(name, None)
            if part is None:
                num_tokens, cap = running.num_tokens, view.output_cap(running)
                curve = self._curve(running.tenant, num_tokens - running.input_tokens, cap, block_size)
                part = curve, blocks_for(num_tokens, block_size)
                come.append(part)
            self._parts[name] = part
        self._few = []
        if view.num_running < EXACT_UP_TO:
            self._few = [(curve, self._blocks_ahead(whole, view)) for curve, whole in self._parts.values()]
        if view.num_groups > 1:
            self._moments = self._bent(_alike(self._parts.values()), view)
        elif len(come) == len(self._parts):
            self._moments = self._straight(_alike(come))
        else:
            gone = self._straight(_alike(before.values()))
            changes = zip(self._moments, self._straight(_alike(come)), gone, strict=True)
            self._moments = [
                (mean + more - less, variance + wider - closer)
                for (mean, variance), (more, wider), (less, closer) in changes
            ]

    def _blocks_ahead(self, whole: int, view: EngineView) -> tuple[int, ...]:
        """What a request whose tokens fill `whole` blocks of one table holds at each horizon, if it runs until then."""
        if view.num_groups == 1:
            return tuple(whole + ahead for ahead in self._ahead)
        held = self._held.get(whole)
        if held is None:
            held = tuple(view.decoding_blocks((whole + ahead) * view.block_size) for ahead in self._ahead)
            self._held[whole] = held
        return held

    def _bent(self, alike: list[Kind], view: EngineView) -> list[tuple[float, float]]:
        """Mean and variance of the demand at each horizon, where what a request holds is no straight line."""
        moments = [(0.0, 0.0)] * len(self._ahead)
        for curve, lengths in alike:
            held = [self._blocks_ahead(whole, view) for whole in lengths]
            for index, alive in enumerate(curve):
                if alive:
                    mean, variance = moments[index]
                    blocks = [own[index] for own in held]
                    squares = sum(own * own for own in blocks)
                    moments[index] = mean + alive * sum(blocks), variance + alive * (1.0 - alive) * squares
        return moments

    def _straight(self, alike: list[Kind]) -> list[tuple[float, float]]:
        """The same with one table, which grows by a block every block_size steps: sums of blocks and of their squares are enough."""
        means, variances = [0.0] * len(self._ahead), [0.0] * len(self._ahead)
        for curve, lengths in alike:
            num, total, squares = len(lengths), sum(lengths), sum([whole * whole for whole in lengths])
            for index, (alive, ahead) in enumerate(zip(curve, self._ahead, strict=True)):
                if not alive:
                    break  # nobody of them comes back to life
                grown = num * ahead  # sum of (b + ahead) and of (b + ahead)^2
                means[index] += alive * (total + grown)
                variances[index] += alive * (1.0 - alive) * (squares + 2 * ahead * total + grown * ahead)
        return list(zip(means, variances, strict=True))

    def _curve(self, tenant: str, output_tokens: int, cap: int, block_size: int) -> tuple[float, ...]:
        """When a request of this age and cap will still run; kept until lengths are learned anew."""
        key = (tenant, output_tokens // block_size, cap)
        curve = self._curves.get(key)
        if curve is None:
            rounded = output_tokens // block_size * block_size
            curve = still_running(rounded, cap, self._lengths(tenant), block_size, self._ahead)
            curve = self._curves[key] = self._equal.setdefault(curve, curve)
        return curve

    def _lengths(self, tenant: str) -> Survival:
        return self._given or self._learned.get(tenant) or self._learned[""]

    def _learn(self, view: EngineView) -> bool:
        """Estimate output lengths anew, if enough has happened since the last time; True if so."""
        outputs = view.drain.outputs
        if self._given is not None:
            return False
        since = outputs.num_finished - self._learned_at
        if self._learned_at >= 0 and (since == 0 or (outputs.num_finished > 64 and since < RELEARN_EVERY)):
            return False
        self._learned_at = outputs.num_finished
        self._curves, self._equal = {}, {}
        running: dict[str, list[int]] = {}
        for other in view.running():
            running.setdefault(other.tenant, []).append(other.output_tokens)
        everybody = [tokens for mine in running.values() for tokens in mine]
        self._learned = {
            tenant: Survival(outputs.of(tenant), running.get(tenant, ()))
            for tenant in outputs.tenants
            if len(outputs.of(tenant)) >= OWN_HISTORY
        }
        self._learned[""] = Survival(outputs.all, everybody)
        return True
