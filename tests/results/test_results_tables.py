"""What a run gives back: tables with the columns of the contract, and files."""

import json
import subprocess
import sys

import pandas as pd
import pytest

from sim.results.result import MARK_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, Result
from tests.support.results import columns, good, make, request, step


def test_tables_have_the_contract_columns_in_order_and_stable_types():
    result = make([request(0), request(1, "rejected", reason="needs 200 blocks, the pool has 100")], [step(0)])
    assert list(result.requests.columns) == list(REQUEST_COLUMNS)
    assert list(result.timeline.columns) == list(TIMELINE_COLUMNS)
    assert list(result.marks.columns) == list(MARK_COLUMNS)
    assert result.requests["retry_after_s"].dtype == "float64"
    assert result.requests["ttft_s"].isna().tolist() == [False, True]
    assert result.requests["peak_blocks"].dtype == "int64"
    empty = Result(summary={}, request_columns={}, timeline_columns={}, mark_columns={})
    assert empty.requests.dtypes["ttft_s"] == "float64"
    assert len(empty.requests) == 0


def test_a_table_is_built_once():
    result = good()
    assert result.requests is result.requests


def test_a_missing_or_short_column_is_named():
    whole = columns([step(0)], TIMELINE_COLUMNS)
    lacking = {name: values for name, values in whole.items() if name != "waiting"}
    with pytest.raises(ValueError, match="timeline_columns lacks waiting"):
        Result(summary={}, request_columns={}, timeline_columns=lacking, mark_columns={})
    with pytest.raises(ValueError, match=r"time_s has 1 rows, but .'waiting': 2"):
        Result(summary={}, request_columns={}, timeline_columns=whole | {"waiting": [1, 2]}, mark_columns={})


def test_further_columns_follow_those_of_the_contract():
    rows = {"tenant": ["a"]} | columns([request(0)], REQUEST_COLUMNS)
    result = Result(summary={}, request_columns=rows, timeline_columns={}, mark_columns={})
    assert list(result.requests.columns) == [*REQUEST_COLUMNS, "tenant"]


def test_making_a_result_imports_no_heavy_library():
    code = (
        "import sys; from sim.results.result import Result; import sim.results.report_template, sim.results.files\n"
        "Result(summary={}, request_columns={}, timeline_columns={}, mark_columns={})\n"
        "print([name for name in ('pandas', 'plotly', 'scipy', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_save_writes_five_files_and_the_same_bytes_each_time(tmp_path):
    good().save(tmp_path / "a")
    good().save(tmp_path / "b")
    names = ["marks.csv", "report.html", "requests.csv", "summary.json", "timeline.csv"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_saved_tables_read_back_as_the_tables_of_the_result(tmp_path):
    result = make([request(0), request(1, "aborted", reason="client, gone")], [step(0)], [(0.1, "aborted", "req-1", 0)])
    result.save(tmp_path)
    read = pd.read_csv(tmp_path / "requests.csv")
    assert list(read.columns) == list(REQUEST_COLUMNS)
    assert read["e2el_s"].tolist()[0] == result.requests["e2el_s"].tolist()[0]
    assert read["reason"].tolist()[1] == "client, gone"
    assert pd.read_csv(tmp_path / "timeline.csv")["used_blocks_end"].tolist() == [52]
    assert json.loads((tmp_path / "summary.json").read_text())["num_requests"] == 2


def test_without_plotly_the_data_is_saved_and_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ModuleNotFoundError, match="pip install plotly"):
        good().save(tmp_path)
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "report.html").exists()
