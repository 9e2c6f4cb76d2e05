"""The public out-of-memory reports: right phase and right cause first on at least nine of ten whose cause was named."""

import csv

import pytest

from experiments.diagnose_oom_table import judge_rows, main, shares


@pytest.fixture(scope="module")
def rows(data_dir):
    path = data_dir / "memory" / "oom_messages.csv"
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_every_row_has_an_answer(rows):
    assert len(judge_rows(rows)) == len(rows)


def test_with_the_report_s_title_nine_of_ten_phases_and_causes_are_right(rows):
    lines = judge_rows(rows, with_phase=True)
    phase, cause = shares([line for line in lines if line.named])
    assert phase >= 0.9 and cause >= 0.9
    phase, cause = shares(lines)
    assert phase >= 0.9 and cause >= 0.9


def test_from_message_context_and_model_alone_nine_of_ten_are_right(rows):
    phase, cause = shares([line for line in judge_rows(rows) if line.named])
    assert phase >= 0.9 and cause >= 0.9


def test_the_script_prints_the_table(data_dir, capsys):
    assert main([str(data_dir / "memory" / "oom_messages.csv")]) == 0
    assert "right cause first" in capsys.readouterr().out


def test_the_script_says_where_the_table_is_missing(tmp_path, refused):
    refused([tmp_path / "none.csv"], "KVTWIN_DATA", by=main)
