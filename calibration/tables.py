"""Reading measured tables: columns are checked by name, values by unit and range, before anything is fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CalibrationError

if TYPE_CHECKING:
    import pandas as pd

UNIT_SUFFIXES = ("_us", "_ms", "_s", "_ns")
"""How a column's name tells its unit."""


def read_csv(path: Path, columns: Sequence[str], least_rows: int = 1) -> pd.DataFrame:
    """The table in `path`, which has at least `columns` and `least_rows` rows, all of them finite numbers but for text columns.

    Raises: CalibrationError for a missing column (naming a column of another unit, if that is what it is), a value that is not
    a finite number or is negative, or too few rows; OSError.
    """
    import pandas as pd

    try:
        table = pd.read_csv(path)
    except (ValueError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: not a CSV table ({error})") from error
    return checked(table, columns, str(path), least_rows)


def read_parquet(path: Path, columns: Sequence[str], least_rows: int = 1) -> pd.DataFrame:
    """As `read_csv`, for a Parquet file. Raises: CalibrationError also when pyarrow is not installed."""
    import pandas as pd

    try:
        table = pd.read_parquet(path)
    except ImportError as error:
        raise CalibrationError(f"{path}: reading Parquet needs pyarrow; pip install 'kvtwin[silicon]'") from error
    except (ValueError, OSError) as error:
        if not path.is_file():
            raise
        raise CalibrationError(f"{path}: not a Parquet table ({error})") from error
    return checked(table, columns, str(path), least_rows)


def checked(
    table: pd.DataFrame, columns: Sequence[str], where: str, least_rows: int, *, gaps: bool = False
) -> pd.DataFrame:
    """`table`, found fit for use. With `gaps` a number may be missing. Raises: CalibrationError."""
    for column in columns:
        if column not in table.columns:
            raise CalibrationError(f"{where}: column {column!r} is missing{_other_unit(column, table.columns)}")
    if len(table) < least_rows:
        raise CalibrationError(f"{where}: {len(table)} rows are too few to fit; at least {least_rows} are needed")
    for column in columns:
        _check_numbers(table, column, where, gaps=gaps)
    return table


def _check_numbers(table: pd.DataFrame, column: str, where: str, *, gaps: bool) -> None:
    import numpy as np
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(table[column]):
        words = pd.to_numeric(table[column], errors="coerce").isna().to_numpy()
        if not words.all():  # neither names nor numbers
            first = int(np.flatnonzero(words)[0])
            raise CalibrationError(
                f"{where}: row {first + 1} has {column} = {table[column].iloc[first]!r} among numbers; a finite number is needed"
            )
        return
    values = table[column].to_numpy(dtype=np.float64)
    bad = np.flatnonzero(np.isinf(values) | (values < 0) | (np.isnan(values) & (not gaps)))
    if bad.size:
        raise CalibrationError(
            f"{where}: row {int(bad[0]) + 1} has {column} = {values[bad[0]]}; a finite number, at least 0, is needed"
        )


def _other_unit(column: str, present: Any) -> str:
    """What to add when the table has the same quantity in another unit."""
    for suffix in UNIT_SUFFIXES:
        if column.endswith(suffix):
            stem = column.removesuffix(suffix)
            others = [name for name in present if name in {stem + other for other in UNIT_SUFFIXES} | {stem}]
            if others:
                return f"; it has {others[0]!r} instead, which is another unit (or none): convert it to {suffix[1:]}"
    others = [name for name in present if name in {column + other for other in UNIT_SUFFIXES}]
    if others:
        return f"; it has {others[0]!r} instead, which names a unit where none is expected"
    return f"; it has {', '.join(map(str, present)) or 'no columns'}"
