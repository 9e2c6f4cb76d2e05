"""The investigator: from what a failed run left behind to phase, cause, evidence and fixes."""

from .command import run_diagnose
from .diagnosis import Cause, Diagnosis, Fix, Phase
from .errors import DiagnoseError
from .investigate import diagnose, diagnose_text
from .render import render

__all__ = [
    "Cause",
    "DiagnoseError",
    "Diagnosis",
    "Fix",
    "Phase",
    "diagnose",
    "diagnose_text",
    "render",
    "run_diagnose",
]
