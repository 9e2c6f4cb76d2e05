"""`kvtwin validate`: the same scenarios in both worlds, and every difference between them."""

from .cell import Cell, check_cell
from .scenarios import SCENARIOS, SmallScenario
from .worlds import Recorded, reference_answers, replay, run_for_real

__all__ = [
    "SCENARIOS",
    "Cell",
    "Recorded",
    "SmallScenario",
    "check_cell",
    "reference_answers",
    "replay",
    "run_for_real",
]
