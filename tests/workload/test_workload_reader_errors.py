"""A bad trace gives one message: file, line, column, what was found, what was expected."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sim.workload import TraceError, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
LENGTHS = "arrival_time_ns,input_toks,output_toks,prefix_hit_blocks16\n"
OWN = "request_id,arrival_s,input_tokens,output_tokens_requested,priority\n"
LLM_D = "prompt_tokens,generation_tokens,ttft,generation_time,launch_time,finish_time\n"


def moon(**changes):
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2], **changes}
    return json.dumps({key: value for key, value in row.items() if value is not ...}) + "\n"


def bench(**changes):
    document = {
        "total_input_tokens": 5,
        "request_throughput": 1.0,
        "input_lens": [5, 6],
        "output_lens": [1, 2],
        "start_times": [0.0, 1.0],
        **changes,
    }
    return json.dumps({key: value for key, value in document.items() if value is not ...})


CASES = [
    # Azure
    (
        AZURE + "2023-11-16 18:15:47,-5,44\n",
        ":3: column 'ContextTokens': found '-5'; expected a whole number of tokens, at least 1",
    ),
    (AZURE + "2023-11-16 18:15:47,0,44\n", ":3: column 'ContextTokens': found '0'"),
    (AZURE + "2023-11-16 18:15:47,3.5,44\n", ":3: column 'ContextTokens': found '3.5'"),
    (AZURE + "2023-11-16 18:15:47,12,nan\n", ":3: column 'GeneratedTokens': found 'nan'"),
    (AZURE + "2023-11-16 18:15:47,12,inf\n", ":3: column 'GeneratedTokens': found 'inf'"),
    (AZURE + "2023-11-16 18:15:47,12,\n", ":3: column 'GeneratedTokens': found nothing"),
    (AZURE + "2023-11-16 18:15:47,12,many\n", ":3: column 'GeneratedTokens': found 'many'"),
    (AZURE + "yesterday,12,5\n", ":3: column 'TIMESTAMP': found 'yesterday'; expected a time such as"),
    (AZURE + "2023-02-30 18:15:47,12,5\n", ":3: column 'TIMESTAMP': found '2023-02-30 18:15:47' (day is out of range"),
    (
        AZURE + "\n2023-11-16 18:15:47,12\n",
        ":4: found 2 values in '2023-11-16 18:15:47,12'; expected 3, as in the header",
    ),
    (AZURE + "1970-01-01 00:00:00,12,5\n2023-11-16 18:15:49,12,5\n", ":3: found an arrival time 19678 days away"),
    (AZURE.split("\n")[0] + "\n", ": found no request; expected at least one data row of Azure CSV"),
    (
        "TIMESTAMP,ContextToken,GeneratedTokens\n",
        ":1: found no column 'ContextTokens', did you mean 'ContextToken'?; expected the columns",
    ),
    (
        "TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n",
        ":1: column 'ContextTokens': found it 2 times; expected each column once",
    ),
    # Mooncake
    (moon() + "{not json}\n", ":2: found malformed JSON at character 2"),
    (moon() + "[1, 2]\n", ":2: found [1, 2]; expected a JSON object"),
    (moon() + moon(input_length=-3), ":2: column 'input_length': found -3"),
    (moon() + moon(output_length=0), ":2: column 'output_length': found 0"),
    (moon() + moon(output_length=True), ":2: column 'output_length': found True"),
    (moon() + moon(input_length=None), ":2: column 'input_length': found None"),
    (
        moon() + moon(timestamp=float("nan")),
        ":2: column 'timestamp': found nan; expected a finite number of milliseconds",
    ),
    (
        moon() + moon(timestamp=-1),
        ":2: column 'timestamp': found -1; expected a finite number of milliseconds, at least 0",
    ),
    (
        moon() + moon(output_length=...),
        ":2: found no key 'output_length', did you mean 'input_length'?; expected an object with",
    ),
    (moon() + moon(hash_ids="abc"), ":2: column 'hash_ids': found 'abc'; expected a list of ids"),
    (moon() + moon(hash_ids=[1, [2]]), ":2: column 'hash_ids': found [2]"),
    (
        moon() + moon() + moon(hash_ids=[1, 2, 3]),
        ":3: column 'hash_ids': found 3 ids for input_length 1000; expected 2 (512-token blocks) or 63 (16-",
    ),
    (moon(timestamp=...), ":1: found no key 'timestamp'; expected an object with"),
    # BurstGPT
    (BURST + "5,GPT-4,0,8,8,API log\n", ":2: column 'Request tokens': found '0'"),
    (
        BURST + "5,GPT-4,5,-8,8,API log\n",
        ":2: column 'Response tokens': found '-8'; expected a whole number of tokens, at least 0",
    ),
    (
        BURST + "soon,GPT-4,5,8,8,API log\n",
        ":2: column 'Timestamp': found 'soon'; expected a finite number of seconds, at least 0",
    ),
    (
        BURST + "5,GPT-4,5,0,5,API log\n",
        ": found no request (1 failed rows (0 response tokens) dropped); expected at least one data row",
    ),
    # ours
    (OWN + "a,0,5,5,0\na,1,5,5,0\n", ":3: found request_id 'a' again (first on line 2); expected each id once"),
    (OWN + "a,0,5,5,high\n", ":2: column 'priority': found 'high'; expected a whole number"),
    (OWN + ",0,5,5,0\n", ":2: column 'request_id': found nothing; expected an id"),
    (OWN + "a,-1,5,5,0\n", ":2: column 'arrival_s': found '-1'; expected a finite number of seconds, at least 0"),
    (OWN + 'a,0,5,5,"0\n', ":2: found 'a,0,5,5,\"0' (unexpected end of data)"),
    # vLLM bench
    (
        bench(start_times=...),
        ": column 'start_times': found no such array; expected input_lens, output_lens, start_times: run `vllm bench serve` with",
    ),
    (bench(input_lens=..., output_lens=...), ": column 'input_lens': found no such array"),
    (
        bench(start_times=[0.0]),
        ": found arrays of different lengths {'input_lens': 2, 'output_lens': 2, 'start_times': 1}",
    ),
    (bench(input_lens=[5, -1]), ":1: column 'input_lens[1]': found -1"),
    (bench(input_lens={"a": 1}), ": column 'input_lens': found {'a': 1}; expected an array"),
    ('{\n  "input_lens": [1, 2],\n  oops\n}\n', ":3: found malformed JSON at character 3"),
    # llmservingsim
    (
        LENGTHS + "0,160,5,0\n1,160,5,11\n",
        ":3: column 'prefix_hit_blocks16': found 11; expected at most 10, the whole blocks of 160 prompt tokens",
    ),
    (LENGTHS + "0,160,5,-1\n", ":2: column 'prefix_hit_blocks16': found '-1'"),
    # llm-d
    (LLM_D + "5,5,0.1,1,inf,2\n", ":2: column 'launch_time': found 'inf'"),
    (LLM_D + "5,5,,1,1,2\n", ":2: column 'ttft': found nothing"),
    # nothing we know
    (
        "a,b,c\n1,2,3\n",
        ":1: found a header with 'a, b, c'; expected one of the formats Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens); Mooncake",
    ),
    ('{"prompt": "hello"}\n', ":1: found an object with 'prompt'; expected one of the formats"),
    ("", ": found an empty file; expected a trace with at least one request"),
    ("\n \n", ": found an empty file"),
]


@pytest.mark.parametrize(("text", "message"), CASES, ids=[message[:50] for _, message in CASES])
def test_a_bad_file_gives_one_message_with_its_place(tmp_path, text, message):
    path = tmp_path / "bad.trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_what_is_no_text_file_is_named(tmp_path):
    with pytest.raises(TraceError, match="no such file; expected a trace file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match="found a folder; expected a trace file"):
        read_trace(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    with pytest.raises(TraceError, match=r"found binary data \(a zero byte at offset 8\)"):
        read_trace(binary)
    latin = tmp_path / "latin"
    latin.write_bytes(AZURE.encode() + b"2023-11-16 18:15:47,caf\xe9,5\n")
    with pytest.raises(TraceError, match=r":3: found byte 0xe9 at position 23; expected text in UTF-8"):
        read_trace(latin)


HEADS = [
    AZURE,
    moon(),
    BURST + "5,GPT-4,7,8,15,API log\n",
    OWN + "a,0,5,5,0\n",
    bench(),
    LENGTHS + "0,160,5,3\n",
    LLM_D + "5,5,0.1,1,1,2\n",
    "",
]


@given(head=st.sampled_from(HEADS), cut=st.integers(0, 200), tail=st.text(max_size=60) | st.binary(max_size=60))
@example(head="", cut=0, tail="{" * 50)
@example(head="", cut=0, tail='{"timestamp": ' + "[" * 40)
def test_no_damage_makes_anything_but_a_trace_or_one_message(tmp_path_factory, head, cut, tail):
    path = tmp_path_factory.getbasetemp() / "damaged"
    damage = tail if isinstance(tail, bytes) else tail.encode("utf-8", "surrogatepass")
    path.write_bytes(head.encode()[: len(head) - cut % (len(head) + 1)] + damage)
    try:
        trace = read_trace(path)
    except TraceError as error:
        message = str(error)
    else:
        assert trace.requests
        return
    assert re.match(rf"{re.escape(str(path))}(:\d+)?: ", message)
    assert "\n" not in message
    assert "expected" in message
