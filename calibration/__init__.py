"""From measurements to a cost profile that can be believed.

`measuring` times designed steps on a device (its `rig` runs them for real) and keeps them in a run folder, and `timed_steps` makes a
profile of it; `readers` take tables that others measured, and `kernels` fits non-negative terms to them, judged on points they did
not see. `recorded` reads runs of real servers, simulates their requests again and corrects a profile by them; `judging` compares such a
run with its simulation, and carries what is not known into predictions. `sources` finds out which of these a file needs, `numerics` is
what the fits have in common, and `profiles` keeps what came out, with provenance, error and range. `sim.costs` prices steps with the
profiles and needs nothing from here.
"""

from .errors import CalibrationError

__all__ = ["CalibrationError"]
