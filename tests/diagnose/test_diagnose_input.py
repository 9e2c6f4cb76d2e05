"""Whatever is given, the answer is a diagnosis or one clear error; the document and the exit codes are the contract's."""

import io
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.cli import main
from experiments.investigator import Cause, DiagnoseError, diagnose, diagnose_text, run_diagnose
from experiments.investigator.render import print_diagnosis
from sim.core.config import ConfigError

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 22.36 GiB of which "
    "120.88 MiB is free."
)
KEYS = ("phase", "cause", "confidence", "evidence", "ruled_out", "fixes", "next_to_record")


def put(tmp_path, content):
    path = tmp_path / "given"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty file"),
        (b" \n\n", "empty file"),
        (b"\x7fELF\x02\x01\x01\x00\x00\x00", "binary data"),
        (pickle.dumps({"segments": []}), "pickle"),
        ("a_ms,b_ms\n1,2\n3,4\n5,6\n", "known are memory curves"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_error_that_names_it(tmp_path, content, problem):
    path = put(tmp_path, content)
    with pytest.raises(DiagnoseError, match=problem) as error:
        diagnose([path])
    assert str(path) in str(error.value)


def test_a_pickle_is_refused_and_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with pytest.raises(DiagnoseError, match="pickle"):
        diagnose([put(tmp_path, pickle.dumps(Bomb()))])
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_a_folder_and_no_file_are_errors(tmp_path):
    for paths in ([tmp_path / "absent"], [tmp_path], []):
        with pytest.raises(DiagnoseError):
            diagnose(paths)


@pytest.mark.parametrize(
    "text", ["Dear all, the meeting is on Monday.", "error: exit status 1\nmake: *** [all] Error 2\n", "time,flies\n"]
)
def test_other_programs_text_is_answered_with_cannot_tell(tmp_path, text):
    diagnosis = diagnose([put(tmp_path, text)])
    assert (diagnosis.cause, diagnosis.confidence) == (Cause.UNKNOWN, 0.0)
    assert diagnosis.next_to_record


def test_words_without_figures_are_answered_with_cannot_tell():
    assert diagnose_text("my server had an OOM after the upgrade, weights 64.38 GiB").cause is Cause.UNKNOWN


@given(st.text(max_size=300))
def test_any_text_gets_a_diagnosis(text):
    diagnosis = diagnose_text(text)
    assert 0.0 <= diagnosis.confidence <= 1.0
    json.dumps(diagnosis.as_document())


@given(st.integers(min_value=0, max_value=len(MESSAGE)), st.text(max_size=20))
def test_a_message_with_rubbish_in_it_gets_a_diagnosis(at, rubbish):
    json.dumps(diagnose_text(MESSAGE[:at] + rubbish + MESSAGE[at:]).as_document())


def test_bytes_that_are_no_text_do_not_stop_a_log_from_being_read(tmp_path):
    assert diagnose([put(tmp_path, b"\xff\xfe\x80 noise\n"[2:] + MESSAGE.encode())]).cause is not Cause.UNKNOWN


def test_an_unknown_repository_costs_precision_and_is_said(tmp_path):
    diagnosis = diagnose_text(MESSAGE, model="somebody/their-own-9b")
    assert any("somebody/their-own-9b" in note for note in diagnosis.notes)


def test_a_name_that_is_neither_known_nor_a_repository_is_a_slip(tmp_path, refused):
    refused(["diagnose", str(put(tmp_path, MESSAGE)), "--model", "lama-3.1-8b"], "unknown model 'lama-3.1-8b'")


@pytest.mark.parametrize(
    "table",
    [
        "request_id,arrival_s,input_tokens,output_tokens\nr1,0,100,10\nr2,1,-5,10\n",
        "time_s,running,waiting,used_blocks,free_blocks\n0,1,1,5,5\n1,1,1,-5,15\n",
        "time_s,allocated_mib,sequences\n0,100,1\n1,100,-5\n2,100,1\n3,100,1\n4,100,1\n",
    ],
)
def test_a_negative_count_is_refused_with_its_line_and_column(tmp_path, table):
    with pytest.raises(DiagnoseError, match=r":3: column '\w+' is -5; a count of 0 or more was expected"):
        diagnose([put(tmp_path, table)])


def test_an_unknown_gpu_is_an_error():
    with pytest.raises(ConfigError, match="unknown GPU"):
        diagnose_text(MESSAGE, gpu="h1000")


@pytest.mark.parametrize("share", [0.0, 1.5, -0.1, math.nan])
def test_a_utilization_that_is_no_share_is_an_error(share):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        diagnose_text(MESSAGE, gpu_memory_utilization=share)


def test_a_gpu_of_the_text_that_has_another_size_is_not_believed():
    # A laptop's 5090 has 24 GB; the desktop's, which the catalogue knows, 32.
    diagnosis = diagnose_text(f"RTX 5090 Laptop\n{MESSAGE}")
    assert any("22.36 GiB" in sentence for sentence in diagnosis.evidence)


def test_json_is_one_document_with_the_documented_keys(tmp_path, capsys):
    assert run_diagnose([put(tmp_path, MESSAGE)], json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(KEYS) <= set(document)
    assert all({"change", "effect_gib", "effect_tokens"} <= set(fix) for fix in document["fixes"])


def test_the_terminal_shows_verdict_evidence_and_fixes(tmp_path, capsys):
    assert run_diagnose([put(tmp_path, MESSAGE)], model="llama-3.1-8b") == 0
    shown = capsys.readouterr().out
    for words in ("phase", "cause", "Evidence", "Fixes", "--gpu-memory-utilization"):
        assert words in shown


def test_cannot_tell_is_an_answer_and_exits_0(tmp_path, capsys):
    assert run_diagnose([put(tmp_path, "hello\n")]) == 0
    assert "cannot tell from this" in capsys.readouterr().out


def test_several_files_are_judged_together(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("Capturing CUDA graphs: 40%\n", encoding="utf-8")
    assert diagnose([log, put(tmp_path, MESSAGE)]).cause is Cause.CUDA_GRAPHS


def test_markup_in_a_message_is_shown_as_it_is(capsys):
    print_diagnosis(diagnose_text(f"[red]{MESSAGE}[/red]"))
    assert "diagnosis" in capsys.readouterr().out


def test_fixes_use_the_ledger_when_model_and_gpu_are_known():
    told = diagnose_text(
        "max_num_seqs=1024 _dummy_sampler_run\nCUDA out of memory. Tried to allocate 502.00 MiB. GPU 0 has a total capacity of 79.19 GiB "
        "of which 310.00 MiB is free.",
        model="llama-3.1-8b",
        gpu="h100",
    )
    tokens = {fix.change: fix.effect_tokens for fix in told.fixes}
    assert tokens["--max-num-seqs 512"] > 0
    lower = next(fix for fix in told.fixes if "utilization" in fix.change)
    # 0.01 x 79.19 GiB in tokens of 131,072 bytes
    assert lower.effect_tokens == -round(0.01 * round(lower.effect_gib / 0.7919) * 79.19 * 2**30 / 131072)


def test_a_snapshot_is_read_by_the_reader_that_is_given(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({}))
    blocks = [{"size": 200 << 20, "state": "active_pending_free"}]
    read = {"segments": [{"total_size": 200 << 20, "segment_pool_id": (0, 0), "blocks": blocks}]}
    message = tmp_path / "message"
    message.write_text(
        f"{MESSAGE} Of the allocated memory 20.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
    )
    assert diagnose([path, message], read_snapshot=lambda path: read).cause is Cause.PENDING_FREES


def test_a_snapshot_that_is_none_is_an_error():
    with pytest.raises(TypeError, match="segments"):
        diagnose_text(MESSAGE, snapshot=[1, 2])


def test_a_long_log_is_read_where_it_matters_and_its_line_numbers_stay(tmp_path):
    request = 'INFO: 10.0.0.1:2333 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    log = (
        "gpu_memory_utilization=0.97\n"
        + request * 30_000
        + "Capturing CUDA graphs: 40%\n"
        + MESSAGE
        + "\n"
        + request * 3000
    )
    diagnosis = diagnose([put(tmp_path, log)])
    assert diagnosis.cause is Cause.CUDA_GRAPHS
    assert any("line 30003" in sentence for sentence in diagnosis.evidence)
    assert diagnosis.fixes[0].change == "--gpu-memory-utilization 0.96"
    assert any("is long" in note for note in diagnosis.notes)


def test_a_message_can_be_piped_in(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("ValueError: No available memory for the cache blocks."))
    assert main(["diagnose", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["category"] == "KV capacity"


@pytest.mark.parametrize(
    ("raw", "says"),
    [(b"", "found an empty file"), (b"a\0b" * 9, "found binary data"), (pickle.dumps([1]), "found a pickle")],
)
def test_what_is_piped_in_is_judged_like_a_file(raw, says, monkeypatch, refused):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    refused(["diagnose", "-"], says)


def test_a_piped_message_may_hold_bytes_that_are_no_text(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x80 noise\r" + MESSAGE.encode())))
    assert main(["diagnose", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["category"] != "cannot tell from this"


def test_a_quotation_mark_that_is_never_closed_makes_no_table(tmp_path):
    assert diagnose([put(tmp_path, 'time_s,allocated_bytes\n"' + "x" * 200_000)]).cause is Cause.UNKNOWN


def test_memory_beyond_any_device_is_a_wrong_unit(tmp_path):
    rows = "".join(f"{second},1e300\n" for second in range(9))
    with pytest.raises(DiagnoseError, match="1e\\+300 bytes in line 2, more than any device has"):
        diagnose([put(tmp_path, f"time_s,allocated_bytes\n{rows}")])
