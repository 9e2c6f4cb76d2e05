"""From measurements to a cost profile that can be believed.

`design` says which steps to time, `rig` runs them for real (the only module that needs torch), `measure` keeps them in a run folder
(`step_log`), and `fit_run` makes a profile of it. `readers` take tables that others measured; `attention`, `fit_model` and `fit_gpu`
fit non-negative terms to them, judged on points they did not see; `profiles` keeps what came out, with provenance, error and
range; `judge` compares a recorded run with its simulation. `sim.costs` prices steps with the profiles and needs nothing from here.
"""

from .errors import CalibrationError

__all__ = ["CalibrationError"]
