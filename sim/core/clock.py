"""Time, exactly: an integer number of femtoseconds.

The core never reads a clock; it is told the time. Times and durations inside kvtwin are Python integers that
count femtoseconds (suffix `_fs`), and become floating-point seconds (`_s`) only where a person or a file reads them.
The reason is invariant I13: a leap over k steps adds one closed-form sum where stepping adds k durations, and only
exact arithmetic gives both the same bytes. A femtosecond keeps a cost slope of a few nanoseconds per context token
precise to better than one part in a million.
"""

FS_PER_S = 10**15


def to_fs(seconds: float) -> int:
    """Nearest whole number of femtoseconds to a time in seconds."""
    numerator, denominator = seconds.as_integer_ratio()
    whole, rest = divmod(numerator * FS_PER_S, denominator)
    above_half = 2 * rest - denominator
    return whole + (above_half > 0 or (above_half == 0 and whole % 2))  # halves go to the even neighbour


def to_s(time_fs: int) -> float:
    """Seconds, correctly rounded, from an integer number of femtoseconds."""
    return time_fs / FS_PER_S
