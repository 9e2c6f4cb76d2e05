"""Fair share over tenants by counting the tokens each has been served: the virtual token counter.

Source: VTC, "Fairness in Serving Large Language Models", Sheng et al., OSDI 2024, algorithm 2. Between two tenants that always have
requests waiting, the service they get differs by at most a bound that does not grow with time, whatever they send.
"""

from __future__ import annotations

from ..config import ConfigError
from ..request import Request, State
from ..view import EngineView
from ..waiting import FcfsQueue


class _Served:
    """A request that has left the queue, and the output tokens its tenant has been charged for.

    While it is one of those that decode steadily (`steady`) it has been charged for a token more with each of their steps.
    """

    __slots__ = ("charged", "request", "steady")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.charged = request.num_output_tokens
        self.steady = False


class FairQueue:
    """The oldest request of the tenant that has been served least.

    A tenant is charged `input_weight` for each prompt token when its request first starts, and `output_weight` for each token it
    gets (the paper's weights, 1 and 2). A tenant that comes back after a pause is lifted to the least of those who wait, so that a
    pause earns no credit; if nobody waits, to the tenant that left the queue last. Ties go to the older request. A preempted request
    is the first of its tenant.

    Not steady: counters grow with every decode step, and with them the order may change. Arrivals are taken up when the next step is
    planned, when the counters are known.
    """

    steady = False

    def __init__(self, view: EngineView, *, input_weight: int = 1, output_weight: int = 2) -> None:
        self.check(input_weight, output_weight)
        self._view = view
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._arrived: list[Request] = []
        self._waiting: dict[str, FcfsQueue] = {}
        self._num_waiting = 0
        self._counters: dict[str, int] = {}
        self._left_last = ""
        self._served: dict[int, _Served] = {}
        self._steady_key: tuple[int, int] | None = None
        self._steady_clock = self._charged_clock = 0
        self._steady_tenants: dict[str, int] = {}

    @staticmethod
    def check(input_weight: int, output_weight: int) -> None:
        """Raises ConfigError for weights that no counter could go by."""
        if input_weight < 0 or output_weight < 0:
            raise ConfigError(f"weights are {input_weight} and {output_weight}; whole numbers, at least 0")

    def __len__(self) -> int:
        return self._num_waiting

    def counter(self, tenant: str) -> int:
        """Service a tenant has been charged for, as of the last step planned."""
        return self._counters.get(tenant, 0)

    def add(self, request: Request) -> bool:
        """Queue a new arrival. Whether it is the head will be known when the next step is planned, so it may be."""
        self._arrived.append(request)
        self._num_waiting += 1
        return True

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before all others of its tenant."""
        self._charge(self._served.pop(request.seq))
        self._queue_of(request.spec.tenant).put_back(request)
        self._num_waiting += 1

    def started(self, request: Request) -> None:
        """Its tenant is charged for its output from the first token on; for the prompt it was when the first copy started."""
        served = self._served[request.seq] = _Served(request)
        served.charged = 0

    def head(self, *, important: bool = False) -> Request | None:
        """The oldest request of the tenant with the smallest counter."""
        self._settle()
        for tenant in list(self._waiting):
            self._drop_empty(tenant)
        for request in self._arrived:
            if request.state is not State.ENDED:
                self._enter(request)
        self._arrived.clear()
        heads = [queue.head(important=important) for queue in self._waiting.values()]
        return min(
            (head for head in heads if head is not None),
            key=lambda head: (self.counter(head.spec.tenant), head.arrival_fs, head.seq),
            default=None,
        )

    def pop(self, request: Request) -> None:
        """Take a request that `head` has just named."""
        tenant = request.spec.tenant
        self._waiting[tenant].pop(request)
        self._num_waiting -= 1
        self._drop_empty(tenant)
        if not request.num_preemptions and not request.computed_high:
            self._counters[tenant] = self.counter(tenant) + self._input_weight * request.spec.input_tokens
        self._served[request.seq] = _Served(request)

    def discard(self, request: Request) -> None:
        """The request stays in place until it would be first of its tenant."""
        self._num_waiting -= 1
        if request not in self._arrived:
            self._waiting[request.spec.tenant].discard(request)

    def _enter(self, request: Request) -> None:
        tenant = request.spec.tenant
        if tenant not in self._waiting:
            level = min(map(self.counter, self._waiting)) if self._waiting else self.counter(self._left_last)
            self._counters[tenant] = max(self.counter(tenant), level)
        self._queue_of(tenant).add(request)

    def _queue_of(self, tenant: str) -> FcfsQueue:
        if tenant not in self._waiting:
            self._waiting[tenant] = FcfsQueue(self._view)
        return self._waiting[tenant]

    def _drop_empty(self, tenant: str) -> None:
        if not len(self._waiting[tenant]):
            del self._waiting[tenant]
            self._left_last = tenant

    def _settle(self) -> None:
        """Charge everybody for the output tokens they got since the last time."""
        view = self._view
        key = (view.decode_version, len(self._served)) if view.all_decoding else None
        if key is not None and key == self._steady_key:
            # The same requests decode as the last time: a token each for every step since.
            steps = view.decode_clock - self._charged_clock
            for tenant, num in self._steady_tenants.items():
                self._counters[tenant] += self._output_weight * num * steps
            self._charged_clock = view.decode_clock
            return
        self._steady_tenants = {}
        for seq, served in list(self._served.items()):
            self._charge(served)
            request = served.request
            if request.state is State.ENDED:
                del self._served[seq]
            elif request.decoding:
                served.steady = True
                self._steady_tenants[request.spec.tenant] = self._steady_tenants.get(request.spec.tenant, 0) + 1
        self._steady_key = (view.decode_version, len(self._served)) if view.all_decoding else None
        self._steady_clock = self._charged_clock = view.decode_clock

    def _charge(self, served: _Served) -> None:
        """Charge one request's tenant for what it got beyond what it has been charged for."""
        request = served.request
        charged = served.charged + served.steady * (self._charged_clock - self._steady_clock)
        known = request.anchor + self._view.decode_clock + 1 if request.decoding else request.num_tokens
        served.charged, served.steady = known - request.spec.input_tokens, False
        tenant = request.spec.tenant
        self._counters[tenant] = self.counter(tenant) + self._output_weight * (served.charged - charged)
