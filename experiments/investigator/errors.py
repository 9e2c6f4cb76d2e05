"""The one error of the investigator: a file that cannot be used, and what would be right."""

from __future__ import annotations


class DiagnoseError(ValueError):
    """A file, or a setting given with it, that no diagnosis can start from. The message says where, what, and what would do."""
