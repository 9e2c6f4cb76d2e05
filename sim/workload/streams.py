"""Named random streams: one root seed, one independent stream for each thing that is random.

Every attribute of a request is drawn when the request is created, each from its own stream, so that changing one
thing (the rate, the cancel rate, a policy) leaves all others as they were: common random numbers. Streams in use:
`arrival`, `ticks`, `input_tokens`, `output_tokens`, `prefix`, `priority`, `tenant`, `lora`, `cancel`, `cancel_age`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.workload.errors import WorkloadError, whole_number

if TYPE_CHECKING:
    import numpy as np


def stream(seed: int, name: str, replication: int = 0) -> np.random.Generator:
    """A fresh generator of the stream called `name`; the same three arguments always give the same numbers.

    The spawn key is the replication number followed by the bytes of the name: two names never share a key, and
    nothing depends on Python's salted `hash()`.

    Raises: WorkloadError when the seed or the replication is negative or not an integer, or the name is empty.

    Source: NumPy, "Parallel random number generation", SeedSequence spawning.
    """
    import numpy as np

    whole_number("seed", seed, least=0)
    whole_number("replication", replication, least=0)
    if not name:
        raise WorkloadError("a random stream needs a name, such as 'arrival'")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(replication, *name.encode())))
