"""Readers of public trace formats, one module a format."""

from sim.workload.readers.recognise import FORMATS, Format, read_trace

__all__ = ["FORMATS", "Format", "read_trace"]
