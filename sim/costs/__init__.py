"""Cost models: what a step takes. All answer the questions of `CostModel`, and only those."""

from .constant import FixedCost
from .efficiency import RooflineEfficiency
from .profile import FittedProfile
from .protocol import CostModel
from .roofline import Roofline

__all__ = ["CostModel", "FittedProfile", "FixedCost", "Roofline", "RooflineEfficiency"]
