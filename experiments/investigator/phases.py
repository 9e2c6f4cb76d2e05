"""Which phase a text shows: frames of a traceback, lines of a log, words of a report.

A traceback is the strongest: the failing call stands in it. Of its frames the outermost telling one decides, because
profiling, capture and warm-up all call the same forward pass. Without one, the last line before the failure decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .diagnosis import Phase

_FRAME = re.compile(
    r'^[^\w\n]*(?:\([^)\n]*\)[^\w\n]*)?(?:[A-Z]+ [\d-]+ [\d:.,]+ \[[^\]\n]*\][^\w\n]*)?File "(?P<file>[^"]+)", line \d+, in (?P<name>\S+)',
    re.MULTILINE,
)

# Functions, the telling one first: earlier rows win over later ones when both are on the stack.
_FUNCTIONS: tuple[tuple[Phase, str], ...] = (
    (
        Phase.AFTER_RELEASE,
        r"\b(?:wake_up|resume_memory_occupation|release_memory_occupation|sleep_mode|_self_check|check_memory)\b",
    ),
    (
        Phase.SAMPLER_WARM_UP,
        r"\b_?dummy_sampler_run\b|\bwarm(?:ing)?[_ ]?up[_ ]?(?:the[_ ])?sampler\b|\b_dummy_pooler_run\b",
    ),
    (
        Phase.GRAPH_CAPTURE,
        r"\bcapture_model\b|\bcapture_graph|\bcapture_one_batch_size\b|\bcapture_end\b|\b_capture_cudagraphs\b|"
        r"cuda_graph_runner\b|\bcapture_cuda_graphs?\b|\binit_(?:device|cuda)_graphs?\b",
    ),
    (
        Phase.PROFILING,
        r"\bprofile_run\b|\bdetermine_available_memory\b|\bdetermine_num_available_blocks\b|"
        r"\bprofile_num_available_blocks\b|\b_?profile_multimodal\b|\bprofile_max_num_token\b",
    ),
    (
        Phase.LOADING,
        r"\bload_model\b|\bload_weights\b|\bcreate_weights\b|\bweight_loader\b|\bprocess_weights_after_loading\b|"
        r"\bfrom_pretrained\b|\binitialize_model\b|\bdefault_loader\b|\b_load_state_dict\w*|\bmake_layers\b|"
        r"model_executor/models/\w+\.py __init__\b",
    ),
    (
        Phase.START_UP,
        r"\binitialize_kv_caches?\b|\b_initialize_kv_caches\b|\binitialize_from_config\b|\b_allocate_kv_cache\w*|"
        r"\binit_memory_pool\b|\binitialize_cache\b|\bcompile_or_warm_up_model\b|\bwarmup\b|\binit_model\b",
    ),
    (
        Phase.COMMUNICATION,
        r"\brearrange_expert_weights\w*|\beplb\w*|\bncclCommInit\w*|\binit_process_group\b|\bbatch_isend_irecv\b|"
        r"\ball_to_all\w*",
    ),
    (
        Phase.SAMPLING,
        r"\b\w*prompt_logprobs?\w*|\bcompute_logits\b|\b_get_logits\b|\blogits_processor\.py\b|\bcompute_logprobs\b|\bgather_logprobs\b|"
        r"\bapply_top_k_top_p\b|\btopk_topp_sampler\b|\brejection_sampl\w*|\bsampler?\.py\b|\bsample_tokens\b|"
        r"\b_sample\b|\bapply_penalties\b",
    ),
    (
        Phase.PREFILL,
        r"\bforward_extend\b|\bprefill\w*\b|\bPrefill\b|\bforward_batch_generation_extend\b|\bprocess_batch_prefill\b",
    ),
    (Phase.DECODE, r"\bforward_decode\b|\bdecode_step\b|\bgenerate_token\b|\brun_decode\w*"),
    (Phase.COMMUNICATION, r"\ball_reduce\b|\ball_gather\w*|\breduce_scatter\w*|\bpynccl\b"),
    (
        Phase.SERVING,
        r"\bexecute_model\b|\bstep_with_batch_queue\b|\brun_busy_loop\b|\bevent_loop_\w+|"
        r"\bforward_batch_generation\b|\bgenerate\b",
    ),
)

# Lines of logs. The last one before the failure decides. A line that reports the end of a phase names the next.
_LINES: tuple[tuple[Phase, str], ...] = (
    (
        Phase.LOADING,
        r"Starting to load model|Loading (?:safetensors|pt) checkpoint shards|Loading (?:model )?weights(?! took)|"
        r"Load weight begin|Loading checkpoint shards",
    ),
    (
        Phase.PROFILING,
        r"Model loading took|Loading (?:model )?weights took|Load weight end|Encoder cache will be initialized|"
        r"profil(?:ed|ing) with \d+ \w+ items",
    ),
    (
        Phase.START_UP,
        r"Memory profiling takes|Available KV cache memory|GPU KV cache size|# (?:GPU|cuda) blocks:|KV Cache is "
        r"allocated|Memory pool end|Starting (?:to )?(?:init|initialize) the (?:KV )?memory pool",
    ),
    (
        Phase.GRAPH_CAPTURE,
        r"Capturing (?:the model for )?CUDA ?graphs?|Capturing cudagraphs|Capture (?:cuda|hip) graph begin|"
        r"Capturing batches|CUDA graph shapes",
    ),
    (Phase.START_UP, r"Graph capturing finished|Capture cuda graph end|init engine .* took"),
    (
        Phase.SERVING,
        r"Application startup complete|Uvicorn running|Started server process|The server is fired up|Running: \d+ "
        r"reqs|Avg prompt throughput|POST /(?:v1|generate)|Added request|Received request",
    ),
    (Phase.PREFILL, r"Prefill batch[.,]|Method Prefill encountered|\bin prefill\b.*error|\}:prefill:prefill\{"),
    (Phase.DECODE, r"Decode batch[.,]|Method Decode encountered|\}:decode:decode\{"),
    (Phase.PROFILING, r"Method Warmup encountered"),
)

# Words of people. Earlier rows win.
_WORDS: tuple[tuple[Phase, str], ...] = (
    (Phase.SAMPLER_WARM_UP, r"warm(?:ing|s|ed)?[ -]?up (?:of )?(?:the )?sampler|sampler warm[ -]?up|dummy sampler"),
    (
        Phase.GRAPH_CAPTURE,
        r"(?:captur\w+|during|while|in|at) (?:the )?(?:cuda |hip )?graphs?(?: captur\w+)?\b|graph captur\w+|"
        r"cudagraph captur\w+",
    ),
    (
        Phase.AFTER_RELEASE,
        r"\basleep\b|sleep mode|\bidle\b|after (?:the )?(?:release|abort|cancel\w*|unload\w*|sleep)|wak(?:e|ing)[ -]?up",
    ),
    (
        Phase.PROFILING,
        r"\bprofil(?:e|ing)\b(?: run| pass)?(?! needs)|memory profiling|dummy (?:image|video|multimodal)",
    ),
    (
        Phase.LOADING,
        r"(?:weight|model|checkpoint|shard)s?[ -]load(?:ing)?|(?:while|when|during|on) loading|loading (?:the "
        r")?(?:model|weights|checkpoint)|load(?:ing)? time",
    ),
    (Phase.COMMUNICATION, r"\bNCCL\b|all[- ]?reduce|expert (?:re)?balanc\w+|\bEPLB\b|point-to-point"),
    (
        Phase.START_UP,
        r"start[ -]?up|(?:KV|cache|pool)[ -](?:cache )?(?:pool )?(?:alloc\w+|init\w*|creation|sizing)|warm[ -]?up|"
        r"torch\.compile|on boot|at boot|while starting|when starting|fails to start|does not start|prealloc\w*|"
        r"initiali[sz]\w+",
    ),
    (Phase.PREFILL, r"prompt_?logprobs|\bprefill\w*|long prompts?|attention (?:forward|scores)"),
    (Phase.SAMPLING, r"\bsampling\b|top[-_ ]?[pk] sort|logprobs"),
    (Phase.DECODE, r"\bdecod(?:e|ing)\b(?<!speculative decoding)"),
    (
        Phase.SERVING,
        r"at run ?time|(?<![.\w])runtime\b(?!\.| error)|\bserving\b|\bgenerat(?:e|ion|ing)\b|max_new_tokens|under (?:\w+ )?(?:load|"
        r"stress|traffic)|after (?:\w+ )?(?:minutes|hours|days)|concurrent requests|speculative decoding|in "
        r"production",
    ),
)

_COMPILED_FUNCTIONS = tuple((phase, re.compile(pattern)) for phase, pattern in _FUNCTIONS)
_COMPILED_LINES = tuple((phase, re.compile(pattern, re.IGNORECASE)) for phase, pattern in _LINES)
_COMPILED_WORDS = tuple((phase, re.compile(pattern, re.IGNORECASE)) for phase, pattern in _WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One sign of a phase."""

    phase: Phase
    """What it is a sign of."""
    sign: str
    """The text that was seen."""
    source: str
    """`traceback`, `log` or `words`."""

    @property
    def sentence(self) -> str:
        """For the evidence."""
        seen = {
            "traceback": "the traceback passes through",
            "log": "the last telling log line is",
            "words": "the text says",
        }
        return f"phase {self.phase}: {seen[self.source]} “{self.sign}”"


def read_mark(text: str, failure_line: int | None) -> Mark | None:
    """The strongest sign of a phase in `text`, given the line of the failure (None: the end of the text)."""
    lines = text.split("\n")
    until = len(lines) if failure_line is None else min(failure_line, len(lines))
    stack = list(_FRAME.finditer(text))
    frames = "\n".join(f"{match['file']} {match['name']}" for match in stack)
    if frames and (mark := _first(frames, _COMPILED_FUNCTIONS, "traceback")):
        return mark
    for line in reversed(lines[:until]):
        for phase, pattern in reversed(_COMPILED_LINES):
            if match := pattern.search(line):
                return Mark(phase=phase, sign=match[0], source="log")
    # Reports name functions outside tracebacks too, as in `compile_or_warm_up_model -> _dummy_sampler_run`.
    return _first(text, _COMPILED_FUNCTIONS, "words", least=2) or _first(text, _COMPILED_WORDS, "words")


def _first(text: str, table: tuple[tuple[Phase, re.Pattern[str]], ...], source: str, least: int = 0) -> Mark | None:
    """The sign of the first row of `table` that `text` shows; `least=2` asks for names that only code has (with `_`)."""
    for phase, pattern in table:
        for match in pattern.finditer(text):
            if least and "_" not in match[0]:
                continue
            return Mark(phase=phase, sign=match[0].strip(), source=source)
    return None
