"""The search against an answer known in closed form: TTFT p99 = 1 / (mu - rate), so the limit L is met up to mu - 1 / L."""

import math

import pytest

from experiments.capacity import NO_LIMIT, binding_limit, capacity_of, gpus_for
from experiments.capacity_search import HIGHEST_RATE_PER_S, LOWEST_RATE_PER_S, TOLERANCE, Search
from experiments.replicate import Measured
from sim.resolve import resolve
from sim.scenario import Scenario, ScenarioError
from sim.slo import Slo

SCENARIO = Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", workload="uniform")


class Queue:
    """Stands in for the simulator: an M/M/1-like delay curve with service rates that differ a little between replications."""

    def __init__(self, service_rates_per_s, *, lost_above_per_s=math.inf, waited_s=None):
        self.service_rates_per_s = service_rates_per_s
        self.lost_above_per_s = lost_above_per_s
        self.waited_s = waited_s or {}
        self.rates_tried = []

    def run(self, tasks):
        self.rates_tried.append(tasks[0].scenario.workload.rate)
        return iter(
            [self.one(task.scenario.workload.rate, self.service_rates_per_s[task.replication]) for task in tasks]
        )

    def one(self, rate, service_rate):
        delay = 1 / (service_rate - rate) if rate < service_rate else 1e6
        finished = 1000 if rate <= self.lost_above_per_s else 900
        return Measured(
            summary={
                "ttft_s": {"p99": delay},
                "queue_s": {"p99": 0.9 * delay},
                "finished": finished,
                "num_requests": 1000,
                "num_preemptions": 0,
            },
            queue_grows=rate >= service_rate,
            waited_s={"KV blocks": 0.0, "max_num_seqs": 0.0, "max_num_batched_tokens": 0.0} | self.waited_s,
        )


def search(queue, slo="ttft_p99=1", replications=4):
    return Search(SCENARIO, Slo.parse(slo), replications, queue).find()


@pytest.mark.parametrize(("service_rate", "limit_s"), [(10.0, 1.0), (10.0, 0.2), (0.5, 10.0), (900.0, 0.1)])
def test_it_finds_the_rate_of_the_closed_form(service_rate, limit_s):
    found = search(Queue([service_rate] * 4), f"ttft_p99={limit_s}")
    right = service_rate - 1 / limit_s
    assert found.value <= right < found.failed.rate_per_s
    assert found.failed.rate_per_s <= found.value * (1 + TOLERANCE) * 1.001  # rates are rounded to four digits


def test_without_noise_the_interval_is_the_last_step_of_the_bisection():
    found = search(Queue([10.0] * 4))
    assert found.low == found.value
    assert found.high == found.failed.rate_per_s


def test_with_noise_the_interval_is_wider_and_holds_the_answer():
    found = search(Queue([9.0, 10.0, 11.0, 12.0]))
    assert found.low < found.value < found.high
    assert found.high / found.low > 1.1


def test_no_rate_is_simulated_twice():
    queue = Queue([9.0, 10.0, 11.0, 12.0])
    search(queue)
    assert len(queue.rates_tried) == len(set(queue.rates_tried))


def test_a_growing_queue_is_not_sustainable_even_within_the_objectives():
    found = search(Queue([10.0] * 4), "ttft_p99=1e9")
    assert found.value < 10.0 <= found.failed.rate_per_s


def test_losing_requests_is_not_sustainable_even_within_the_objectives():
    found = search(Queue([100.0] * 4, lost_above_per_s=5.0))
    assert found.value <= 5.0 < found.failed.rate_per_s


def test_objectives_that_an_empty_system_misses_are_reported_with_the_number():
    found = search(Queue([10.0] * 4), "ttft_p99=0.05")
    assert found.value is None
    limit, evidence = binding_limit(found, Slo.parse("ttft_p99=0.05"))
    assert limit == "latency of a single request"
    assert "ttft_p99 is 0.1001 s, above 0.05 s" in evidence
    assert f"{LOWEST_RATE_PER_S:g} requests/s" in evidence


def test_without_a_limit_the_search_ends_and_says_so():
    found = search(Queue([1e9] * 4))
    assert found.value == HIGHEST_RATE_PER_S
    assert found.high is None
    assert binding_limit(found, Slo.parse("ttft_p99=1"))[0] == NO_LIMIT


@pytest.mark.parametrize("name", ["KV blocks", "max_num_seqs", "max_num_batched_tokens"])
def test_the_limit_that_keeps_requests_in_the_queue_binds(name):
    found = search(Queue([10.0] * 4, waited_s={name: 0.9}))
    limit, evidence = binding_limit(found, Slo.parse("ttft_p99=1"))
    assert limit == name
    assert name in evidence


def test_compute_binds_when_no_request_is_left_in_the_queue():
    assert binding_limit(search(Queue([10.0] * 4)), Slo.parse("ttft_p99=1"))[0] == "compute"


@pytest.mark.parametrize(("target", "gpus"), [(10.0, 2), (10.1, 4), (1.0, 2), (95.0, 20)])
def test_gpus_come_in_whole_copies_of_what_was_simulated(target, gpus):
    assert gpus_for(target, 10.0, resolve(SCENARIO.with_(tensor_parallel_size=2))) == gpus


def test_gpus_are_unknown_without_a_target_or_a_rate():
    assert gpus_for(None, 10.0, resolve(SCENARIO)) is None
    assert gpus_for(10.0, None, resolve(SCENARIO)) is None


@pytest.mark.parametrize(
    ("changes", "arguments", "says"),
    [
        ({}, {}, "no objectives"),
        ({"slo": "ttft=1", "max_concurrency": 8}, {}, "closed-loop"),
        ({"slo": "ttft=1"}, {"replications": 1}, "at least 2"),
        ({"slo": "ttft=1"}, {"target_rate": 0.0}, "target-rate"),
    ],
)
def test_a_question_without_sense_is_refused(changes, arguments, says):
    with pytest.raises(ScenarioError, match=says):
        capacity_of(SCENARIO.with_(**changes), **arguments)
