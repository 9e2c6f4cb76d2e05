"""Every public format is recognised by its content and read back exactly."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.workload import read_trace

REQUESTS_HEADER = (
    "request_id,arrival_s,input_tokens,output_tokens_requested,output_tokens,priority,outcome,finish_reason,reason,retry_after_s,"
    "degraded,queued_s,scheduled_s,first_token_s,finished_s,ttft_s,tpot_s,e2el_s,prefix_hit_tokens,preemptions,recomputed_tokens,"
    "peak_blocks,kv_block_seconds\n"
)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


# Writers of each format: rows are (arrival in ms, input tokens, output tokens).
def azure(rows):
    lines = [
        f"2023-11-16 23:{ms // 60000 % 60:02d}:{ms // 1000 % 60:02d}.{ms % 1000:03d}0000,{i},{o}\n" for ms, i, o in rows
    ]
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines)


def azure_week(rows):
    lines = [
        f"2024-05-10 00:{ms // 60000 % 60:02d}:{ms // 1000 % 60:02d}.{ms % 1000:03d}000+00:00,{i},{o}\n"
        for ms, i, o in rows
    ]
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines)


def mooncake(rows):
    return jsonl(
        {"timestamp": ms, "input_length": i, "output_length": o, "hash_ids": list(range(-(-i // 512)))}
        for ms, i, o in rows
    )


def mooncake_without_ids(rows):
    return jsonl({"timestamp": ms, "input_length": i, "output_length": o} for ms, i, o in rows)


def burstgpt(rows):
    lines = [f"{ms / 1e3!r},ChatGPT,{i},{o},{i + o},Conversation log\n" for ms, i, o in rows]
    return "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(lines)


def burstgpt_with_sessions(rows):
    lines = [f"{ms / 1e3!r},12,0.5,GPT-4,{i},{o},{i + o},API log\n" for ms, i, o in rows]
    return "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
        lines
    )


def requests_csv(rows):
    lines = [
        f'r{n},{ms / 1e3!r},{i},{o},0,3,rejected,,"too long, by 3 tokens"{"," * 14}\n'
        for n, (ms, i, o) in enumerate(rows)
    ]
    return REQUESTS_HEADER + "".join(lines)


def vllm_bench(rows):
    return json.dumps(
        {
            "date": "20260101-000000",
            "request_rate": "inf",
            "total_input_tokens": 1,
            "request_throughput": 2.0,
            "input_lens": [i for _, i, _ in rows],
            "output_lens": [o for _, _, o in rows],
            "start_times": [1e5 + ms / 1e3 for ms, _, _ in rows],
            "errors": ["" for _ in rows],
        },
    )


def vllm_bench_indented(rows):
    return json.dumps(json.loads(vllm_bench(rows)), indent=2)


def llmservingsim_requests(rows):
    return jsonl(
        {
            "request_id": f"bench-{n}",
            "input_toks": i,
            "output_toks": o,
            "arrival_time": 1.7e9 + ms / 1e3,
            "queued_ts": 0.0,
        }
        for n, (ms, i, o) in enumerate(rows)
    )


def llmservingsim_lengths(rows):
    return "arrival_time_ns,input_toks,output_toks,prefix_hit_blocks16\n" + "".join(
        f"{ms * 10**6},{i},{o},0\n" for ms, i, o in rows
    )


def llm_d(rows):
    lines = [f"{i},{o},0.17,14.6,{1.7e9 + ms / 1e3!r},{1.7e9 + ms / 1e3 + 15!r}\n" for ms, i, o in rows]
    return "prompt_tokens,generation_tokens,ttft,generation_time,launch_time,finish_time\n" + "".join(lines)


WRITERS = {
    azure: "Azure CSV",
    azure_week: "Azure CSV",
    mooncake: "Mooncake JSONL",
    mooncake_without_ids: "Mooncake JSONL",
    burstgpt: "BurstGPT CSV",
    burstgpt_with_sessions: "BurstGPT CSV",
    requests_csv: "requests.csv",
    vllm_bench: "vLLM bench JSON",
    vllm_bench_indented: "vLLM bench JSON",
    llmservingsim_requests: "llmservingsim requests.jsonl",
    llmservingsim_lengths: "llmservingsim lengths.csv",
    llm_d: "llm-d CSV",
}
ROWS = st.lists(
    st.tuples(st.integers(0, 3_599_999), st.integers(1, 200_000), st.integers(1, 5000)), min_size=1, max_size=30
)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
@given(rows=ROWS, crlf=st.booleans(), bom=st.booleans())
def test_what_is_written_is_read_back(writer, rows, crlf, bom):
    rows = sorted(rows, key=lambda row: row[0])
    text = writer(rows)
    data = (b"\xef\xbb\xbf" if bom else b"") + (text.replace("\n", "\r\n") if crlf else text).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a-name-that-says-nothing"
        path.write_bytes(data)
        trace = read_trace(path, spread_ticks=False)
    assert trace.format == WRITERS[writer]
    assert trace.name == path.name
    assert [(spec.input_tokens, spec.output_tokens) for spec in trace.requests] == [row[1:] for row in rows]
    assert [spec.arrival_s for spec in trace.requests] == pytest.approx(
        [(row[0] - rows[0][0]) / 1e3 for row in rows], abs=1e-6
    )
    assert trace.requests[0].arrival_s == 0.0
    assert all(spec.max_tokens == spec.output_tokens for spec in trace.requests)


def write(folder, text):
    path = folder / "trace"
    path.write_text(text)
    return path


def test_ids_and_priorities_of_the_file_are_kept(tmp_path):
    trace = read_trace(write(tmp_path, requests_csv([(0, 5, 6), (9, 7, 8)])))
    assert [(spec.request_id, spec.priority) for spec in trace.requests] == [("r0", 3), ("r1", 3)]
    trace = read_trace(write(tmp_path, llmservingsim_requests([(0, 5, 6), (9, 7, 8)])))
    assert [spec.request_id for spec in trace.requests] == ["bench-0", "bench-1"]


def test_rows_out_of_order_are_sorted_and_said_so(tmp_path):
    trace = read_trace(write(tmp_path, azure([(5000, 1, 1), (1000, 2, 2), (5000, 3, 3)])))
    assert [(spec.arrival_s, spec.input_tokens, spec.request_id) for spec in trace.requests] == [
        (0.0, 2, "0"),
        (4.0, 1, "1"),
        (4.0, 3, "2"),
    ]
    assert "1 of 3 rows were earlier than the row before (first: line 3); all rows were sorted" in trace.notes[0]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (burstgpt([(0, 5, 6), (1000, 5, 0), (2000, 5, 0)]), "2 failed rows (0 response tokens) dropped"),
        (
            llm_d([(0, 5, 6)]) + "5,6,0.0,0.0,1700000001.0,1700000001.0\n5,1,-1,0.0,1700000002.0,1700000002.0\n",
            "2 failed rows (ttft <= 0) dropped",
        ),
        (vllm_bench([(0, 5, 6), (1, 5, 0)]), "1 failed requests dropped"),
    ],
)
def test_failed_requests_are_dropped_and_counted(tmp_path, text, note):
    trace = read_trace(write(tmp_path, text))
    assert len(trace.requests) == 1
    assert note in trace.notes


@pytest.mark.parametrize(("block_tokens", "rounding"), [(512, "up"), (512, "down"), (16, "up"), (16, "down")])
def test_tokens_of_a_hash_id_are_inferred(tmp_path, block_tokens, rounding):
    rows = []
    for n, length in enumerate((700, 40, 5000)):
        blocks = -(-length // block_tokens) if rounding == "up" else length // block_tokens
        rows.append({"timestamp": 7.5 * n, "input_length": length, "output_length": 4, "hash_ids": list(range(blocks))})
    trace = read_trace(write(tmp_path, jsonl(rows)))
    assert trace.requests[0].content_block_tokens == block_tokens
    assert [spec.content_ids for spec in trace.requests] == [tuple(row["hash_ids"]) for row in rows]
    assert f"one hash id stands for {block_tokens} tokens" in trace.notes[0]


def hit_blocks(requests, block_tokens=16):
    seen, hits = set(), []
    for spec in requests:
        prompt = spec.content_ids[: spec.input_tokens // block_tokens]
        hit = 0
        while hit < len(prompt) and prompt[: hit + 1] in seen:
            hit += 1
        hits.append(hit)
        seen.update(spec.content_ids[: k + 1] for k in range(len(spec.content_ids)))
    return hits


def test_recorded_prefix_hits_become_content_ids_that_reproduce_them(tmp_path):
    text = "arrival_time_ns,input_toks,output_toks,prefix_hit_blocks16\n0,100,60,0\n1,200,5,6\n2,170,5,10\n3,70,5,4\n4,900,5,50\n"
    trace = read_trace(write(tmp_path, text))
    assert hit_blocks(trace.requests) == [0, 6, 10, 4, 12]
    assert "4 requests were given content ids that reproduce their recorded prefix hits" in trace.notes[0]
    assert trace.notes[1].startswith("38 recorded hit blocks could not be reproduced")


def test_only_the_first_rows_are_read_when_asked(tmp_path):
    path = write(tmp_path, azure([(ms, 5, 5) for ms in range(10)]) + "this line is never reached\n")
    assert len(read_trace(path, max_requests=10).requests) == 10


def test_real_files_are_read_whole_and_fast(data_dir):
    expected = {
        "traces/azure2023/AzureLLMInferenceTrace_conv.csv": ("Azure CSV", 19_366, 5.53),
        "traces/azure2023/AzureLLMInferenceTrace_code.csv": ("Azure CSV", 8_819, 2.57),
        "traces/mooncake/conversation_trace.jsonl": ("Mooncake JSONL", 12_031, 3.40),
        "traces/mooncake/synthetic_trace.jsonl": ("Mooncake JSONL", 3_993, 3.91),
        "traces/bench/t1000.moon.jsonl": ("Mooncake JSONL", 1_000, 6.66),
        "runs/llmservingsim/rtx4090-llama-3.1-8b/requests.jsonl": ("llmservingsim requests.jsonl", 300, 10.27),
        "runs/llmservingsim/workloads/sharegpt-llama-3.1-8b-300-sps10.lengths.csv": (
            "llmservingsim lengths.csv",
            300,
            10.26,
        ),
        "runs/llm-d-benchmark/exp-0_llama-3.1-70b_2xA100/qps_0.84.csv": ("llm-d CSV", 252, 0.84),
    }
    for path, (format_name, rows, rate_per_s) in expected.items():
        begin = time.perf_counter()
        trace = read_trace(data_dir / path)
        assert time.perf_counter() - begin < 3.0, (
            path
        )  # 0.2 s on an idle machine; a quadratic reader would take minutes
        assert (trace.format, len(trace.requests)) == (format_name, rows)
        assert trace.rate_per_s == pytest.approx(rate_per_s, rel=0.01)


def test_real_prefix_hits_are_those_of_the_recording(data_dir):
    trace = read_trace(data_dir / "runs/llmservingsim/workloads/sharegpt-llama-3.1-8b-300-sps10.lengths.csv")
    lines = (
        (data_dir / "runs/llmservingsim/workloads/sharegpt-llama-3.1-8b-300-sps10.lengths.csv")
        .read_text()
        .splitlines()[1:]
    )
    assert hit_blocks(trace.requests) == [int(line.split(",")[3]) for line in lines]
