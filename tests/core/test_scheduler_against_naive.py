"""The core against a naive engine: the same decisions, step by step, in single steps and in leaps.

`NaiveEngine` is engine-policies §1.1.2 to §1.1.6 (vLLM V1) written down in lists and loops: tokens are compared as tokens,
lengths are counted one by one, nothing is remembered that can be searched. Where kvtwin decides otherwise on purpose it says so:
(1) what can never fit is rejected, or fails, with its blocks released; (2) a watermark for admission; (3) a step in which
everybody gave way and nothing is left to compute takes no time; (4) content is findable by others if it is named, by its own
request after a preemption.
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
class NaiveRequest:
    spec: RequestSpec
    seq: int
    known: int = 0
    computed: int = 0
    most_computed: int = 0
    recomputed: int = 0
    preemptions: int = 0
    table: list[int] = field(default_factory=list)

    def key(self, index, block_size):
        """Every token from the first to the last of block `index`: its name where it has one, else whose it is."""
        span = self.spec.content_block_tokens
        names = self.spec.content_ids
        named = min(len(names) * span, self.spec.input_tokens)
        return tuple(
            (names[token // span], token) if token < named else (self.spec.request_id, self.seq, token)
            for token in range((index + 1) * block_size)
        )

    def shared(self, index, block_size):
        return (index + 1) * block_size <= len(self.spec.content_ids) * self.spec.content_block_tokens


class NaiveEngine:
    def __init__(self, config):
        self.config = config
        self.free = list(range(1, config.num_gpu_blocks + 1))
        self.references = dict.fromkeys(self.free, 0)
        self.content = {}  # block -> key, oldest registration first
        self.waiting, self.running, self.leaving, self.log, self.ends = [], [], [], [], {}
        self.steps = self.arrivals = 0
        self.out = None
        self.forget_decisions()

    def forget_decisions(self):
        self.decisions = {"preempted": [], "released": [], "admitted": [], "rejected": []}

    def blocks(self, tokens):
        return -(-tokens // self.config.block_size)

    # -- the pool

    def take(self, count):
        taken = [self.free.pop(0) for _ in range(count)]
        for block in taken:
            self.content.pop(block, None)
            self.references[block] = 1
        return taken

    def give_back(self, request):
        for block in reversed(request.table):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
        self.decisions["released"].append((request.spec.request_id, request.table))
        request.table = []

    def register(self, request, tokens, private):
        if self.config.enable_prefix_caching:
            for index in range(tokens // self.config.block_size):
                if private or request.shared(index, self.config.block_size):
                    self.content.setdefault(request.table[index], request.key(index, self.config.block_size))

    def find(self, request):
        hits = []
        for index in range((request.known - 1) // self.config.block_size):
            key = request.key(index, self.config.block_size)
            block = next((block for block, content in self.content.items() if content == key), None)
            if block is None:
                break
            hits.append(block)
        return hits

    def need(self, request, tokens, hits=()):
        idle = sum(not self.references[block] for block in hits)
        return max(self.blocks(tokens) - len(request.table) - len(hits), 0) + idle

    def allocate(self, request, tokens, hits=()):
        if self.need(request, tokens, hits) > len(self.free):
            return None
        for block in hits:
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1
        new = [*hits, *self.take(self.blocks(tokens) - len(request.table) - len(hits))]
        request.table += new
        return new

    # -- arrivals and ends

    def add(self, spec):
        request = NaiveRequest(spec, self.arrivals, known=spec.input_tokens)
        self.arrivals += 1
        longest = spec.input_tokens + (spec.max_tokens or 1)
        if longest > self.config.max_model_len or self.blocks(longest - 1) > self.config.num_gpu_blocks:
            self.ends[spec.request_id] = "rejected"
            self.decisions["rejected"].append(spec.request_id)
        else:
            self.waiting.append(request)

    def abort(self, request_id):
        for request in [*self.waiting, *self.running]:
            if request.spec.request_id == request_id and request not in self.leaving:
                if request in self.running and self.out is not None:
                    self.leaving.append(request)
                else:
                    self.end(request, "aborted")

    def end(self, request, outcome):
        if request in self.running:
            self.running.remove(request)
            self.register(request, request.computed, private=False)
            self.give_back(request)
        else:
            self.waiting.remove(request)
        output = request.known - request.spec.input_tokens
        self.ends[request.spec.request_id] = (outcome, output, request.preemptions, request.recomputed)

    # -- a step

    def preempt(self, request):
        self.running.remove(request)
        for block in request.table[request.computed // self.config.block_size :]:
            self.content.pop(block, None)  # would have been full after this step
        self.register(request, request.computed, private=True)
        self.give_back(request)
        request.most_computed = max(request.most_computed, request.computed)
        request.computed = 0
        request.preemptions += 1
        self.waiting.insert(0, request)
        self.decisions["preempted"].append(request.spec.request_id)

    def victim(self):
        if self.config.scheduling_policy == "priority":
            return max(self.running, key=lambda request: (request.spec.priority, request.seq))
        return self.running[-1]

    def run_running(self, given):
        """True if somebody had to give way."""
        budget = self.config.max_num_batched_tokens
        preempted = False
        position = 0
        while position < len(self.running) and budget:
            request = self.running[position]
            num_tokens = min(request.known - request.computed, budget)
            if self.blocks(request.computed + num_tokens) > self.config.num_gpu_blocks:
                self.end(request, "failed")
                self.changed = True
                continue
            while (new := self.allocate(request, request.computed + num_tokens)) is None:
                victim = self.victim()
                if victim in given:
                    budget += given.pop(victim)[0]
                    position -= self.running.index(victim) < position
                self.preempt(victim)
                preempted = True
                if victim is request:
                    return True
            self.register(request, request.computed + num_tokens, private=False)
            given[request] = num_tokens, new
            budget -= num_tokens
            position += 1
        if not preempted:
            self.run_waiting(given, budget)
        return preempted

    def run_waiting(self, given, budget):
        config = self.config
        while budget and self.waiting and len(self.running) < config.max_num_seqs:
            if config.scheduling_policy == "priority":
                self.waiting.sort(key=lambda request: (request.spec.priority, request.seq))
            request = self.waiting[0]
            if self.blocks(request.known) > config.num_gpu_blocks:
                self.end(request, "failed")
                self.changed = True
                continue
            hits = self.find(request)
            hit_tokens = len(hits) * config.block_size
            num_tokens = min(request.known - hit_tokens, budget)
            if request.known - hit_tokens > budget and not config.enable_chunked_prefill:
                return
            must_fit = request.known if config.reserve_full_prompt else hit_tokens + num_tokens
            spare = int(config.watermark * config.num_gpu_blocks) if self.running else 0
            if self.need(request, must_fit, hits) + spare > len(self.free):
                return
            new = self.allocate(request, hit_tokens + num_tokens, hits)
            request.computed = hit_tokens
            self.running.append(self.waiting.pop(0))
            self.register(request, hit_tokens + num_tokens, private=False)
            self.decisions["admitted"].append(request.spec.request_id)
            given[request] = num_tokens, new
            budget -= num_tokens

    def plan(self):
        given = {}
        while not given:
            self.changed = False
            if not (self.run_running(given) or self.changed or given):
                return False
        self.out = given
        scheduled = [(r.spec.request_id, *given[r]) for r in self.running if r in given]
        self.log.append({"step": self.steps, "scheduled": scheduled, **self.decisions})
        self.forget_decisions()
        return True

    def commit(self):
        given, self.out = self.out, None
        self.steps += 1
        for request, (num_tokens, _new) in given.items():
            end = request.computed + num_tokens
            request.recomputed += max(min(end, request.most_computed) - request.computed, 0)
            request.computed = end
            if end == request.known and request not in self.leaving:
                request.known += 1
        for request in self.leaving:
            self.end(request, "aborted")
        self.leaving = []
        for request in list(self.running):
            spec = request.spec
            if request.known == min(spec.input_tokens + spec.target_tokens, self.config.max_model_len):
                self.end(request, "finished")


def run_naive(config, events):
    engine, step = NaiveEngine(config), 0

    def happen(half):
        for kind, what in events.get(half, ()):
            getattr(engine, kind)(what)

    while engine.waiting or engine.running or step <= max(events, default=0) // 2:
        happen(2 * step)
        engine.plan()
        happen(2 * step + 1)
        if engine.out is not None:
            engine.commit()
        step += 1
        assert step < 5000
    return engine.log, engine.ends


def run_core(config, events, leap):
    """Time is counted in half steps: even ones are moments before a decision, odd ones moments in which a step is out."""
    log, ends = [], {}
    core, step = EngineCore(config, decision_sink=lambda entry, _start_fs: log.append(entry)), 0

    def settle():
        core.check()
        for request in core.take_ended():
            assert request.request_id not in ends
            outcome = request.outcome.value
            numbers = (request.num_output_tokens, request.num_preemptions, request.recomputed_tokens)
            ends[request.request_id] = outcome if outcome == "rejected" else (outcome, *numbers)

    def happen(half):
        matters = False
        for kind, what in events.get(half, ()):
            now_fs = half * FS_PER_S // 2
            matters |= core.add(what, now_fs).may_change_plan if kind == "add" else core.abort(what, now_fs)
            settle()
        return matters

    while core.num_unfinished or step <= max(events, default=0) // 2:
        happen(2 * step)
        plan = core.plan(step * FS_PER_S, None if leap else 1)
        settle()
        if plan is None:
            happen(2 * step + 1)
            step += 1
            continue
        done = 1
        while not happen(2 * (step + done) - 1) and done < plan.repeat and not events.get(2 * (step + done)):
            done += 1
        step += done
        core.commit(plan, StepResult(durations=Durations.affine(done, FS_PER_S, 0)), step * FS_PER_S)
        settle()
        assert step < 5000
    assert core.pool.num_free == config.num_gpu_blocks
    for entry in log:
        entry["rejected"] = [request_id for request_id, _ in entry["rejected"]]
    return [{key: entry[key] for key in ("step", "scheduled", *NaiveEngine(config).decisions)} for entry in log], ends


@st.composite
def configs(draw):
    budget = draw(st.sampled_from([2, 4, 8, 16, 40]))
    chunked = budget < 40 or draw(st.booleans())
    return EngineConfig(
        num_gpu_blocks=draw(st.integers(3, 16)),
        block_size=draw(st.sampled_from([1, 2, 3, 4])),
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.integers(1, min(budget, 6))),
        max_model_len=40,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.booleans()),
        reserve_full_prompt=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.4])),
    )


@st.composite
def happenings(draw):
    """Up to 12 requests in about 30 steps: prompts that share names in front, some that go away."""
    events = {}
    for index in range(draw(st.integers(1, 12))):
        input_tokens = draw(st.integers(1, 20))
        output_tokens = draw(st.integers(1, 20))
        span = draw(st.sampled_from([0, 2, 3, 5]))
        names = -(-input_tokens // span) if span else 0
        common = draw(st.integers(0, names))
        spec = RequestSpec(
            request_id=f"r{index}",
            arrival_s=0.0,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            max_tokens=draw(st.sampled_from([None, output_tokens, output_tokens + 2])),
            priority=draw(st.integers(0, 2)),
            content_ids=tuple((span, name) if name < common else (span, name, index) for name in range(names)),
            content_block_tokens=span,
        )
        half = draw(st.integers(0, 60))
        events.setdefault(half, []).append(("add", spec))
        if draw(st.integers(0, 3)) == 0:
            events.setdefault(half + draw(st.integers(0, 30)), []).append(("abort", spec.request_id))
    return events


@settings(max_examples=300)
@given(config=configs(), events=happenings())
def test_the_core_decides_as_the_naive_engine_does_in_steps_and_in_leaps(config, events):
    naive = run_naive(config, events)
    assert run_core(config, events, leap=False) == naive
    assert run_core(config, events, leap=True) == naive
