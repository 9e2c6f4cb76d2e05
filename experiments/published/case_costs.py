"""The prices of a recorded run's model and GPU that validation compares."""

from __future__ import annotations

from calibration.recorded.host import Correction, corrected
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.costs import Roofline
from sim.costs.fitted import fitted_cost
from sim.costs.profile import FittedProfile

from .profile_sources import Case

KERNELS_ONLY = "profile, kernels only"
STATED_GAPS = "profile, with stated gaps"
COMPOSED = "composed from the card's kernel terms"


def costs_of(case: Case) -> dict[str, FittedProfile | Roofline]:
    """The embedded profile and the roofline, for the model and GPU of a case."""
    model, device = model_shape(case.settings["model"]), gpu(case.settings["gpu"])
    ranks = case.settings.get("tensor_parallel_size", 1)
    embedded = fitted_cost(case.profile, model, device, tensor_parallel_size=ranks)
    return {
        KERNELS_ONLY: corrected(embedded, Correction()),
        f"{STATED_GAPS} of {embedded.terms.gap_s * 1e3:.2f} ms a step": embedded,
        "roofline": Roofline(model, device, tensor_parallel_size=ranks),
        **(
            {COMPOSED: fitted_cost(device.name, model, device, tensor_parallel_size=ranks)}
            if case.profile != device.name
            else {}
        ),
    }
