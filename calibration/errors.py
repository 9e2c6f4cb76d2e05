"""What can be wrong with measurements."""


class CalibrationError(ValueError):
    """A table, a run or a profile cannot be used: one sentence that says which file, what is wrong, and what would be right."""


class StepTooLargeError(CalibrationError):
    """A designed step ran out of memory. The device is as it was before it."""
