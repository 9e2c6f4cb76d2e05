"""Ten thousand steps under pressure: a model with random weights, a pool too small for its load, and an eye on the allocator."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.plan import StepPlan, StepResult, Untold
from sim.core.request import RequestSpec
from sim.costs import FixedCost
from sim.world.run import run_world

from ..validation.worlds import preset

if TYPE_CHECKING:
    from gpu.executor import TorchExecutor
    from gpu.metering import AllocationMeter
    from gpu.readings import StepReading
    from sim.results.recorder import RunRecord

TELL_EVERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureSettings:
    """What is served, and how much of it. The defaults are for a GPU; `small` is for trying the run itself."""

    model: str = "llama-3.1-8b"
    device: str = "cuda"
    small: bool = False
    """Whether only the run itself is tried: a few hundred steps, of short requests."""
    num_requests: int = 1200
    max_concurrency: int = 64
    """Clients, each with one request at a time."""
    warm_up_steps: int = 1000
    """Steps after which the allocator is to be at rest."""
    min_steps: int = 10_000
    limit_s: float | None = None
    """The run is broken off after so long."""

    @classmethod
    def of(cls, device: str, *, small: bool, limit_s: float | None = None) -> PressureSettings:
        """The run on a device, or a try of it with a tiny model."""
        if not small:
            return cls(device=device, limit_s=limit_s)
        few = {"num_requests": 40, "max_concurrency": 16, "warm_up_steps": 50, "min_steps": 120}
        return cls(model="tiny-llama-test", device=device, small=True, limit_s=limit_s, **few)

    @property
    def engine(self) -> EngineConfig:
        """A pool too small for the load."""
        return SMALL_ENGINE if self.small else ENGINE

    def requests(self) -> list[RequestSpec]:
        """Prompts of 50 to 600 tokens that begin like others, answers of 20 to 400, an eighth of that in a try; one in twenty is
        cancelled.
        """
        draw, made, parts = random.Random(0), [], 8 if self.small else 1
        for index in range(self.num_requests):
            spec = RequestSpec(
                request_id=f"r{index}",
                arrival_s=0.0,
                input_tokens=draw.randint(50, 600) // parts,
                output_tokens=draw.randint(20, 400) // parts,
                cancel_after_s=draw.random() * 20 if draw.random() < 0.05 else None,
            )
            made.append(replace(spec, content_ids=(draw.randrange(8),), content_block_tokens=32))
        return made


ENGINE = EngineConfig(
    num_gpu_blocks=500, block_size=16, max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512, num_cpu_blocks=400
)  # fmt: skip
"""Room for 8,000 tokens, of 32 sequences that want about 14,000."""
SMALL_ENGINE = EngineConfig(
    num_gpu_blocks=30, block_size=16, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64, num_cpu_blocks=30
)


class _TimeIsUpError(Exception):
    """The run is to be broken off."""


class _Watched:
    """Counts allocator calls of decode steps without moves of blocks, once everything has been used for the first time."""

    def __init__(self, inner: TorchExecutor, meter: AllocationMeter, settings: PressureSettings, book: _Book) -> None:
        self.inner, self._meter, self._settings, self._book = inner, meter, settings, book
        self._until_s = None if settings.limit_s is None else time.perf_counter() + settings.limit_s
        self.metered_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """As the executor does. Raises _TimeIsUpError when it is."""
        if self._until_s is not None and time.perf_counter() > self._until_s:
            raise _TimeIsUpError
        moves = plan.copies or plan.swap_outs or plan.swap_ins
        if plan.step < self._settings.warm_up_steps or plan.shape.prefill or moves:
            return self.inner.execute(plan)
        before = self._book.steps
        with self._meter:
            result = self.inner.execute(plan)
        self.metered_steps += self._book.steps - before
        return result

    def close(self, untold: Untold) -> None:
        """Passed on."""
        self.inner.close(untold)


class _Book:
    """What is kept of each step."""

    def __init__(self, device: str, tell: Callable[[dict[str, Any]], None]) -> None:
        self._cuda, self._tell = device.startswith("cuda"), tell
        self._started_s = time.perf_counter()
        self.durations_ms: dict[str, list[float]] = {}
        self.reserved: list[int] = []
        self.steps = self.oom_steps = 0

    def __call__(self, reading: StepReading) -> None:
        """A step was run."""
        kind = f"{reading.phase}, {'graph' if reading.served_by.startswith('graph') else reading.served_by}"
        self.durations_ms.setdefault(kind, []).append(reading.duration_fs / 1e12)
        self.steps += 1
        self.oom_steps += reading.oom
        if self._cuda:
            import torch

            self.reserved.append(torch.cuda.memory_reserved())
        if self.steps % TELL_EVERY == 0:
            self._tell({"steps": self.steps, "seconds": round(time.perf_counter() - self._started_s, 1)})

    def figures(self, warm_up: int) -> dict[str, Any]:
        """The steps by kind, and what torch had reserved after the warm-up."""
        return {
            "steps": self.steps,
            "oom_steps": self.oom_steps,
            "seconds": round(time.perf_counter() - self._started_s, 1),
            "step_ms": {
                kind: {"steps": len(each), "median": statistics.median(each), "most": max(each)}
                for kind, each in sorted(self.durations_ms.items())
            },
            "reserved_bytes": sorted({*self.reserved[warm_up:]})[:20],
        }


def run_pressure(
    settings: PressureSettings, tell: Callable[[dict[str, Any]], None] = lambda figures: None
) -> tuple[dict[str, Any], list[str]]:
    """Serve, and look: the figures, and every bar that was not met. `tell` hears how far it is."""
    from gpu.metering import allocation_meter
    from gpu.real_engine import RealEngine
    from gpu.real_settings import RealSettings

    requests, book = settings.requests(), _Book(settings.device, tell)
    threads = 1 if settings.device == "cpu" else None
    real = RealSettings(shape=model_shape(settings.model), device=settings.device, num_threads=threads)
    engine, meter = RealEngine(real, requests, on_step=book), allocation_meter(settings.device)
    watched: list[_Watched] = []

    def executor(core: Any) -> _Watched:
        watched.append(_Watched(engine.executor(core), meter, settings, book))
        return watched[-1]

    configured, policy = preset("vllm-v1")(settings.engine)
    try:
        record: RunRecord | None = run_world(
            configured,
            FixedCost(1.0),
            requests,
            executor=executor,
            policy=policy,
            max_concurrency=settings.max_concurrency,
        )
    except _TimeIsUpError:
        record = None
    (one,) = watched
    figures = {
        **book.figures(settings.warm_up_steps),
        **_outcome(record),
        "model": settings.model,
        "metered_steps": one.metered_steps,
        "allocator_calls": meter.allocations,
        "leaked_blocks": one.inner.leaked_blocks,
        "executor": one.inner.report(),
    }
    return figures, _missed(settings, figures, record)


def _outcome(record: RunRecord | None) -> dict[str, Any]:
    if record is None:
        return {"finished": False}
    ended = Counter(str(request.outcome.value) if request.outcome else "none" for request in record.requests)
    return {
        "finished": True,
        "outcomes": dict(sorted(ended.items())),
        "preemptions": sum(request.num_preemptions for request in record.requests),
    }


def _missed(settings: PressureSettings, figures: dict[str, Any], record: RunRecord | None) -> list[str]:
    """The bars that were not met, with the numbers."""
    report, graphs = figures["executor"], figures["executor"]["graphs"]
    checks = [
        (record is None, f"broken off after {settings.limit_s:g} s" if settings.limit_s else "broken off"),
        (figures["steps"] < settings.min_steps, f"{figures['steps']} steps of {settings.min_steps}"),
        (figures["allocator_calls"] > 0, f"{figures['allocator_calls']} allocator calls in {figures['metered_steps']} steps"),
        (not figures["metered_steps"], "no step was metered"),
        (bool(report["fallbacks"]), f"fallbacks: {report['fallbacks']}"),
        (len(figures["reserved_bytes"]) > 1, f"what torch has reserved moved after the warm-up: {figures['reserved_bytes']}"),
        (graphs is not None and not graphs["replays"], "no graph was replayed"),
    ]  # fmt: skip
    if record is not None:
        checks += [
            (figures["preemptions"] < settings.min_steps // 100, f"only {figures['preemptions']} preemptions: no pressure"),
            ("none" in figures["outcomes"], f"requests without an outcome: {figures['outcomes']}"),
            (figures["leaked_blocks"] > 0, f"{figures['leaked_blocks']} blocks leaked"),
        ]  # fmt: skip
    return [text for broken, text in checks if broken]
