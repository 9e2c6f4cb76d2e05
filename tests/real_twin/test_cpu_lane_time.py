"""What a request costs on the CPU is no part of the time of the device's step that it came in."""

from __future__ import annotations

from experiments.validation import SCENARIOS
from gpu.cpu_lane import CpuLane
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.core.batch_shape import BatchShape
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import CpuMove, ScheduledRequest, StepPlan
from sim.core.request import RequestSpec


def test_a_step_is_timed_before_the_cpu_goes_on_with_who_came(monkeypatch):
    happened: list[str] = []

    class Timer:
        def start(self) -> None:
            happened.append("start")

        def stop_fs(self) -> int:
            happened.append("stop")
            return 1

    monkeypatch.setattr("gpu.executor.step_timer", lambda device, clock: Timer())
    decode = CpuLane._decode
    monkeypatch.setattr(CpuLane, "_decode", lambda *given: (happened.append("cpu"), decode(*given)))
    specs = [RequestSpec(request_id=name, arrival_s=0.0, input_tokens=9, output_tokens=12) for name in "rs"]
    config = EngineConfig(
        num_gpu_blocks=12, block_size=4, max_model_len=24, max_num_seqs=2, max_num_batched_tokens=24, num_cpu_blocks=8
    )
    engine = RealEngine(RealSettings(shape=SCENARIOS["pressure-0"].shape), specs)
    executor = engine.executor(EngineCore(config))

    def run(step: int, *shares: ScheduledRequest, **decided: object) -> None:
        tokens = sum(share.num_tokens for share in shares)
        shape = BatchShape(decode_seqs=tokens, sampled_seqs=len(shares))
        executor.execute(
            StepPlan(step=step, repeat=1, start_fs=0, shape=shape, scheduled=lambda ahead: shares, **decided)
        )

    run(0, ScheduledRequest("r", 9, 0, (1, 2, 3), True), ScheduledRequest("s", 9, 0, (4, 5, 6), True))
    pairs = ((1, 1), (2, 2), (3, 3))
    run(
        1,
        ScheduledRequest("s", 1, 9, (4, 5, 6), True),
        swap_outs=(("r", pairs),),
        to_cpu=(CpuMove(request_id="r", computed_tokens=9, most_tokens=20, group_tables=((1, 2, 3),)),),
        releases=(("r", (1, 2, 3)),),
    )
    assert happened == ["start", "stop", "start", "stop", "cpu"]
    assert len(engine.tokens.answer("r")) == 12
    assert len(engine.tokens.answer("s")) == 2
