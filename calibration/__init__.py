"""From measurements to a cost profile that can be believed.

`design` says which steps to time, `rig` runs them for real (the only module that needs torch), `measure` keeps them in a run folder
(`step_log`), and `fit_run` makes a profile of it. `readers` take tables that others measured; `attention`, `gemm`, `fit_model`,
`fit_gpu` and `whole_steps` fit non-negative terms to them (tables that follow a law, `field`), judged on points they did not
see; `fit_requests` corrects them by a real run, and `uncertainty` carries what is not known into predictions; `profiles` keeps what
came out, with provenance, error and range; `judge` compares a recorded run with its simulation. `sim.costs` prices steps with the
profiles and needs nothing from here.
"""

from .errors import CalibrationError

__all__ = ["CalibrationError"]
