"""Files are whole or absent, and equal values give equal bytes."""

import csv
import errno
import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from sim.results.files import csv_text, json_text, write_csv, write_json, write_text


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "summary.json"
    target.write_text("old")

    def no_replace(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", no_replace)
    with pytest.raises(OSError, match="disk full"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_is_told_with_the_file_that_does_not_fit(tmp_path, monkeypatch):
    """What the operating system says of a write has no name in it."""

    def full(handle, mode):
        os.close(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sim.results.files.os.fdopen", full)
    with pytest.raises(OSError) as raised:
        write_text(tmp_path / "memory.csv", "1\n")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "memory.csv"))
    assert list(tmp_path.iterdir()) == []


def test_missing_folders_are_made_and_the_file_is_readable_by_others(tmp_path):
    path = write_text(tmp_path / "a" / "b" / "x.txt", "Σ\n")
    assert path.read_bytes() == "Σ\n".encode()
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")
    path.chmod(0o640)
    write_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o640


def test_floats_read_back_exactly():
    values = [0.1 + 0.2, 1e-300, 1 / 3, 123456789.123456789]
    rows = list(csv.reader(io.StringIO(csv_text({"x": values}))))
    assert [float(row[0]) for row in rows[1:]] == values
    assert json.loads(json_text(values)) == values


def test_cells_say_missing_by_being_empty_and_bools_in_lower_case():
    text = csv_text(
        {"a": [None, 1.5], "b": [math.nan, True], "c": ['say "x, y"', np.int64(7)], "d": [np.float64(0.5), math.inf]}
    )
    assert text == 'a,b,c,d\n,,"say ""x, y""",0.5\n1.5,true,7,inf\n'


def test_columns_of_different_length_are_refused_with_their_lengths():
    with pytest.raises(ValueError, match="'b': 2"):
        csv_text({"a": [1], "b": [1, 2]})


def test_no_rows_still_give_a_header(tmp_path):
    assert write_csv(tmp_path / "x.csv", {"a": [], "b": []}).read_text() == "a,b\n"


def test_json_is_valid_even_where_a_number_cannot_exist(tmp_path):
    value = {
        "nan": math.nan,
        "rate": math.inf,
        "n": np.int64(3),
        "x": np.float64(0.25),
        "list": (1, 2),
        3: np.array([1.0]),
    }
    path = write_json(tmp_path / "x.json", value)
    assert json.loads(path.read_text()) == {"nan": None, "rate": "inf", "n": 3, "x": 0.25, "list": [1, 2], "3": [1.0]}


def test_json_keeps_the_order_of_keys_and_ends_with_a_line_end():
    assert list(json.loads(json_text({"b": 1, "a": 2}))) == ["b", "a"]
    assert json_text({}).endswith("}\n")
