"""Asynchronous scheduling against an engine that really plans ahead.

kvtwin plans when a step is over and keeps the news from the plan. `Pipelined` does what an engine does (vLLM V1, engine-policies
§1.1.6): it decides step k+1 when step k starts, counts tokens as computed when they are scheduled, with a placeholder for the one to
be sampled, and hears of arrivals, departures and stop tokens when step k is over. Blocks are a number. Both must decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.clock import FS_PER_S
from sim.core.config import EngineConfig
from sim.core.durations import Durations
from sim.core.engine import EngineCore
from sim.core.plan import StepResult
from sim.core.request import RequestSpec


@dataclass(eq=False)
class Held:
    spec: RequestSpec
    seq: int
    known: int
    """Prompt, sampled tokens, and placeholders."""
    limit: int
    """Known tokens at which nothing more is scheduled."""
    computed: int = 0
    blocks: int = 0
    delivered: int = 0
    preemptions: int = 0
    gone: bool | str = False
    outgrown: bool = False
    """Out of the engine, because the pool is too small for it; whether its last token ended it will be heard."""

    @property
    def full(self):
        return self.known >= self.limit


@dataclass
class Pipelined:
    config: EngineConfig
    free: int = 0
    waiting: list = field(default_factory=list)
    running: list = field(default_factory=list)
    ends: dict = field(default_factory=dict)
    log: list = field(default_factory=list)
    in_vain: int = 0
    arrivals: int = 0

    def __post_init__(self):
        self.free = self.config.num_gpu_blocks
        self.decided = {"preempted": [], "released": [], "admitted": []}

    def blocks(self, tokens):
        return -(-tokens // self.config.block_size)

    # -- news

    def add(self, spec):
        limit = min(spec.input_tokens + (spec.max_tokens or 10**9), self.config.max_model_len)
        self.waiting.append(Held(spec, self.arrivals, spec.input_tokens, limit))
        self.arrivals += 1

    def outgrow(self, request):
        (self.running if request in self.running else self.waiting).remove(request)
        self.release(request)
        request.outgrown = True
        if request.known - request.spec.input_tokens == request.delivered:
            self.end(request, "failed")

    def abort(self, request_id):
        for request in [*self.waiting, *self.running]:
            if request.spec.request_id == request_id:
                self.end(request, "aborted")

    def end(self, request, outcome):
        if not request.outgrown:
            (self.running if request in self.running else self.waiting).remove(request)
            self.release(request)
        request.gone = True
        self.ends[request.spec.request_id] = (outcome, request.delivered, request.preemptions)

    def release(self, request):
        if request.blocks:
            self.decided["released"].append((request.spec.request_id, request.blocks))
        self.free += request.blocks
        request.blocks = 0

    def hear(self, done):
        """A step is over: sampled tokens become known."""
        for request, (num_tokens, samples) in done.items():
            if request.gone:
                self.in_vain += num_tokens if request.gone == "before" else 0
            elif samples:
                request.delivered += 1
                capped = request.spec.input_tokens + request.delivered >= request.limit
                if capped or request.delivered == request.spec.output_tokens:
                    self.end(request, "finished")
                elif request.outgrown:
                    self.end(request, "failed")

    # -- a decision

    def schedule(self):
        """`{request: (tokens, samples)}` of a step, or None."""
        while True:
            given, changed = {}, False
            budget = self.config.max_num_batched_tokens
            short = False
            position = 0
            while position < len(self.running) and budget:
                request = self.running[position]
                if request.full:
                    position += 1
                    continue
                tokens = min(request.known - request.computed, budget)
                if self.blocks(request.computed + tokens) > self.config.num_gpu_blocks:
                    self.outgrow(request)
                    changed = True
                    continue
                lacks = self.blocks(request.computed + tokens) - request.blocks
                if self.free < lacks <= self.free + sum(r.blocks for r in self.running if r.full):
                    short = True
                    position += 1
                    continue
                out = False
                while lacks > self.free:
                    short = changed = True
                    victim = self.victim()
                    if victim in given:
                        budget += given.pop(victim)
                    position -= self.running.index(victim) < position
                    self.preempt(victim)
                    if victim is request:
                        out = True
                        break
                if out:
                    break
                self.free -= lacks
                request.blocks += lacks
                given[request] = tokens
                budget -= tokens
                position += 1
            if not short:
                changed |= self.admit(given, budget)
            if given:
                return self.advance(given)
            if not changed:
                return None

    def admit(self, given, budget):
        changed, config = False, self.config
        while budget and self.waiting and len(self.running) < config.max_num_seqs:
            if config.scheduling_policy == "priority":
                self.waiting.sort(key=lambda request: (request.spec.priority, request.seq))
            request = self.waiting[0]
            if self.blocks(request.known) > config.num_gpu_blocks:
                self.outgrow(request)
                changed = True
                continue
            tokens = min(request.known, budget)
            if request.known > budget and not config.enable_chunked_prefill:
                return changed
            must_fit = self.blocks(request.known if config.reserve_full_prompt else tokens)
            spare = int(config.watermark * config.num_gpu_blocks) if self.running else 0
            if must_fit + spare > self.free:
                return changed
            self.running.append(self.waiting.pop(0))
            request.blocks = self.blocks(tokens)
            self.free -= request.blocks
            self.decided["admitted"].append(request.spec.request_id)
            given[request] = tokens
            budget -= tokens
        return changed

    def victim(self):
        able = [request for request in self.running if not request.full]
        if self.config.scheduling_policy == "priority":
            return max(able, key=lambda request: (request.spec.priority, request.seq))
        return able[-1]

    def preempt(self, request):
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.release(request)
        request.computed = 0
        request.preemptions += 1
        self.decided["preempted"].append(request.spec.request_id)

    def advance(self, given):
        step = {}
        rows = [(r.spec.request_id, given[r]) for r in self.running if r in given]
        for request, tokens in given.items():
            request.computed += tokens
            samples = request.computed == request.known
            request.known += samples
            step[request] = (tokens, samples)
        self.pending = {"scheduled": rows, **{key: sorted(map(str, value)) for key, value in self.decided.items()}}
        self.decided = {"preempted": [], "released": [], "admitted": []}
        return step, self.pending


def run_pipelined(config, events):
    engine, time, out, ahead = Pipelined(config), 0, None, None
    while engine.waiting or engine.running or out or time <= (max(events, default=0) + 1) // 2:
        news = [*events.get(2 * time - 1, ()), *events.get(2 * time, ())]
        for kind, what in news:  # departures are heard before outputs (vLLM #29987)
            getattr(engine, kind)(what)
        if out is not None:
            engine.hear(out[0])
        out = ahead if ahead is not None else engine.schedule()
        ahead = None
        if out is not None:
            for request in out[0]:
                request.gone = "before" if request.gone else False
            engine.log.append(out[1])
            ahead = engine.schedule()
        time += 1
        assert time < 5000
    return engine


def run_core(config, events):
    log, ends, time = [], {}, 0
    core = EngineCore(config, decision_sink=lambda entry, start_fs: log.append(entry))

    def happen(half):
        for kind, what in events.get(half, ()):
            (core.add if kind == "add" else core.abort)(what, half * FS_PER_S // 2)
            core.check()

    happen(0)
    while core.num_unfinished or time <= max(events, default=0) // 2:
        plan = core.plan(time * FS_PER_S, 1)
        core.check()
        happen(2 * time + 1)
        time += 1
        happen(2 * time)  # what happens at the end of a step is heard before its result
        if plan is not None:
            core.commit(plan, StepResult(durations=Durations.one(FS_PER_S)), time * FS_PER_S)
        core.check()
        for request in core.take_ended():
            ends[request.request_id] = request
    while (plan := core.plan(time * FS_PER_S, 1)) is not None:
        time += 1
        core.commit(plan, StepResult(durations=Durations.one(FS_PER_S)), time * FS_PER_S)
    assert core.pool.num_free == config.num_gpu_blocks
    rows = [
        {
            "scheduled": [(name, tokens) for name, tokens, _ in entry["scheduled"]],
            "released": sorted(str((name, len(blocks))) for name, blocks in entry["released"]),
            "preempted": sorted(entry["preempted"]),
            "admitted": sorted(entry["admitted"]),
        }
        for entry in log
    ]
    return core, rows, {name: (r.outcome.value, r.num_output_tokens, r.num_preemptions) for name, r in ends.items()}


@st.composite
def worlds(draw):
    growing = draw(st.booleans())
    chunked = draw(st.sampled_from([True, True, False]))
    max_num_seqs = draw(st.integers(1, 5))
    block_size = draw(st.sampled_from([1, 2, 4]))
    config = EngineConfig(
        num_gpu_blocks=draw(st.sampled_from([24, 40, 64])) // block_size,
        block_size=block_size,
        max_model_len=draw(st.sampled_from([96, 40])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([60, 10, 3, 0])) if chunked else 96,
        enable_prefix_caching=False,
        enable_chunked_prefill=chunked,
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        reserve_full_prompt=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.2])),
        async_scheduling=True,
    )
    events, time = {}, 0
    for number in range(draw(st.integers(1, 8))):
        time += draw(st.sampled_from([0, 0, 1, 2, 3, 9]))
        output_tokens = draw(st.integers(15, 40) if growing else st.integers(1, 12))
        input_tokens = draw(st.integers(1, 8 if growing else 20))
        max_tokens = draw(st.sampled_from([None, output_tokens, output_tokens + 5, 3]))
        if (
            input_tokens + (max_tokens or 1) > config.max_model_len
            or -(-(input_tokens + (max_tokens or 1) - 1) // block_size) > config.num_gpu_blocks
        ):
            continue
        spec = RequestSpec(
            request_id=f"r{number}",
            arrival_s=0.0,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            max_tokens=max_tokens,
            priority=draw(st.integers(0, 2)),
        )
        events.setdefault(time, []).append(("add", spec))
        patience = draw(st.sampled_from([None, None, None, 1, 2, 5, 12]))
        if patience is not None:
            events.setdefault(time + patience, []).append(("abort", spec.request_id))
    return config, events


@settings(max_examples=400)
@given(worlds())
def test_the_core_decides_what_an_engine_that_plans_ahead_decides(world):
    config, events = world
    naive = run_pipelined(config, events)
    core, log, ends = run_core(config, events)
    launched = [entry for entry in log if entry["scheduled"]]
    assert [entry["scheduled"] for entry in launched] == [entry["scheduled"] for entry in naive.log]
    assert [entry["admitted"] for entry in launched] == [entry["admitted"] for entry in naive.log]
    assert [entry["preempted"] for entry in launched] == [entry["preempted"] for entry in naive.log]
    assert [entry["released"] for entry in launched] == [entry["released"] for entry in naive.log]
    assert ends == naive.ends
    assert core.discarded_tokens == naive.in_vain
