"""The catalogue of models: shapes by name, so that nothing has to be downloaded to plan for a well-known model.

Every value is a fact of the model's published `config.json`; the comment above an entry says where it was read.
`model_shape` is the one door: a catalogue name, an alias, or a path to a configuration file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sim.core.config import ConfigError

from .hf_config import read_config
from .hub_names import hub_aliases
from .layers import AttentionShape, MoeShape
from .naming import look_up
from .shape import ModelShape


def _llama(
    name: str, layers: int, heads: int, kv_heads: int, hidden: int, wide: int, vocabulary: int, length: int,
    *, head_dim: int = 128, architecture: str = "llama", dtype: str = "bfloat16", tied: bool = False,
    qkv_bias: bool = False, qk_norm: bool = False, moe: MoeShape | None = None, encoder: int = 0,
) -> ModelShape:  # fmt: skip
    """A decoder of the Llama family: one kind of attention, gated MLP, two norms a layer."""
    return ModelShape(
        name=name, architecture=architecture, num_layers=layers, hidden_size=hidden, intermediate_size=wide, vocab_size=vocabulary,
        max_position_embeddings=length, attention=(AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim),),
        dtype=dtype, tie_word_embeddings=tied, qkv_bias=qkv_bias, qk_norm=qk_norm, moe=moe,
        encoder_parameters=encoder,
    )  # fmt: skip


def _opt(name: str, layers: int, heads: int, hidden: int) -> ModelShape:
    """A decoder of the OPT family: as many KV heads as query heads, two feed-forward matrices, four times as wide."""
    return ModelShape(
        name=name,
        architecture="opt",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        vocab_size=50272,
        max_position_embeddings=2048,
        attention=(AttentionShape(num_heads=heads, num_kv_heads=heads, head_dim=128),),
        dtype="float16",
        tie_word_embeddings=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        notes=("the table of learned positions and the biases of norms are not counted: 0.1 % of the weights",),
    )


def _qwen2(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    wide: int,
    vocabulary: int,
    head_dim: int = 128,
    tied: bool = False,
) -> ModelShape:
    return _llama(
        name,
        layers,
        heads,
        kv_heads,
        hidden,
        wide,
        vocabulary,
        32768,
        head_dim=head_dim,
        architecture="qwen2",
        tied=tied,
        qkv_bias=True,
    )


def _qwen3(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    wide: int,
    tied: bool = False,
    moe: MoeShape | None = None,
) -> ModelShape:
    architecture = "qwen3" if moe is None else "qwen3_moe"
    return _llama(
        name,
        layers,
        heads,
        kv_heads,
        hidden,
        wide,
        151936,
        40960,
        architecture=architecture,
        tied=tied,
        qk_norm=True,
        moe=moe,
    )


def _mla(heads: int, q_lora_rank: int | None) -> AttentionShape:
    """The latent attention of DeepSeek-V2, -V3 and Kimi-K2: rank 512, rotary part 64, heads of 128."""
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        kv_lora_rank=512,
        q_lora_rank=q_lora_rank,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


_SHAPES = (
    # Meta, config.json of meta-llama/Llama-2-*-hf. (Some tables list a vocabulary of 32768 for the 7B: padded, not the model's.)
    _llama("llama-2-7b", 32, 32, 32, 4096, 11008, 32000, 4096, dtype="float16"),
    _llama("llama-2-13b", 40, 40, 40, 5120, 13824, 32000, 4096, dtype="float16"),
    _llama("llama-2-70b", 80, 64, 8, 8192, 28672, 32000, 4096, dtype="float16"),
    # Meta, config.json of facebook/opt-13b and opt-66b, and table 1 of Zhang et al. 2022 for 175b: learned positions, biases, tied
    # embeddings.
    _opt("opt-13b", 40, 40, 5120),
    _opt("opt-66b", 64, 72, 9216),
    _opt("opt-175b", 96, 96, 12288),
    # Meta, config.json of codellama/CodeLlama-7b-hf.
    _llama("codellama-7b", 32, 32, 32, 4096, 11008, 32016, 16384),
    # Meta, config.json of meta-llama/Meta-Llama-3-* and Llama-3.1-*; 3.3-70B has the shape of 3.1-70B.
    _llama("llama-3-8b", 32, 32, 8, 4096, 14336, 128256, 8192),
    _llama("llama-3-70b", 80, 64, 8, 8192, 28672, 128256, 8192),
    _llama("llama-3.1-8b", 32, 32, 8, 4096, 14336, 128256, 131072),
    _llama("llama-3.1-70b", 80, 64, 8, 8192, 28672, 128256, 131072),
    _llama("llama-3.1-405b", 126, 128, 8, 16384, 53248, 128256, 131072),
    _llama("llama-3.2-1b", 16, 32, 8, 2048, 8192, 128256, 131072, head_dim=64, tied=True),
    _llama("llama-3.2-3b", 28, 24, 8, 3072, 8192, 128256, 131072, tied=True),
    # Mistral AI, config.json of mistralai/Mistral-7B-Instruct-v0.2 and -v0.3 (no window), Mistral-Nemo-Instruct-2407, Mixtral-8x7B-v0.1.
    _llama("mistral-7b", 32, 32, 8, 4096, 14336, 32000, 32768, architecture="mistral"),
    _llama("mistral-7b-v0.3", 32, 32, 8, 4096, 14336, 32768, 32768, architecture="mistral"),
    # LLaVA, config.json of llava-hf/llava-v1.6-mistral-7b-hf: CLIP ViT-L/14 at 336 pixels (303.5 million parameters) and a
    # two-layer projector of 21 million beside Mistral-7B.
    _llama("llava-v1.6-mistral-7b", 32, 32, 8, 4096, 14336, 32064, 32768, architecture="mistral", dtype="float16", encoder=324_500_000),
    _llama("mistral-nemo-12b", 40, 32, 8, 5120, 14336, 131072, 1024000, architecture="mistral"),
    _llama(
        "mixtral-8x7b", 32, 32, 8, 4096, 14336, 32000, 32768, architecture="mixtral",
        moe=MoeShape(num_experts=8, experts_per_token=2, intermediate_size=14336),
    ),
    # Alibaba, config.json of Qwen/Qwen2.5-* (a window is stated there, with use_sliding_window false). Qwen2-7B has the 2.5-7B shape.
    _qwen2("qwen2.5-0.5b", 24, 14, 2, 896, 4864, 151936, head_dim=64, tied=True),
    _qwen2("qwen2.5-1.5b", 28, 12, 2, 1536, 8960, 151936, tied=True),
    _qwen2("qwen2.5-7b", 28, 28, 4, 3584, 18944, 152064),
    _qwen2("qwen2.5-14b", 48, 40, 8, 5120, 13824, 152064),
    _qwen2("qwen2.5-32b", 64, 40, 8, 5120, 27648, 152064),
    _qwen2("qwen2.5-72b", 80, 64, 8, 8192, 29568, 152064),
    # Alibaba, config.json of Qwen/Qwen3-*.
    _qwen3("qwen3-0.6b", 28, 16, 8, 1024, 3072, tied=True),
    _qwen3("qwen3-1.7b", 28, 16, 8, 2048, 6144, tied=True),
    _qwen3("qwen3-4b", 36, 32, 8, 2560, 9728, tied=True),
    _qwen3("qwen3-8b", 36, 32, 8, 4096, 12288),
    # DeepSeek, config.json of deepseek-ai/DeepSeek-R1-0528-Qwen3-8B: Qwen3-8B with positions stretched fourfold.
    replace(_qwen3("deepseek-r1-0528-qwen3-8b", 36, 32, 8, 4096, 12288), max_position_embeddings=131072),
    _qwen3("qwen3-14b", 40, 40, 8, 5120, 17408),
    _qwen3("qwen3-32b", 64, 64, 8, 5120, 25600),
    _qwen3("qwen3-30b-a3b", 48, 32, 4, 2048, 6144, moe=MoeShape(num_experts=128, experts_per_token=8, intermediate_size=768)),
    _qwen3("qwen3-235b-a22b", 94, 64, 4, 4096, 12288, moe=MoeShape(num_experts=128, experts_per_token=8, intermediate_size=1536)),
    # IBM, config.json of ibm-granite/granite-3.1-8b-instruct.
    _llama("granite-3.1-8b", 40, 32, 8, 4096, 12800, 49155, 131072, architecture="granite", tied=True),
    # Microsoft, config.json of microsoft/phi-4.
    _llama("phi-4", 40, 40, 10, 5120, 17920, 100352, 16384, architecture="phi3"),
    # OpenAI, config.json of openai/gpt-oss-*: layers alternate window 128 and full; published in MXFP4.
    *(
        ModelShape(
            name=name, architecture="gpt_oss", num_layers=layers, hidden_size=2880, intermediate_size=2880, vocab_size=201088,
            max_position_embeddings=131072, quantization="mxfp4", qkv_bias=True, out_bias=True, attention_sinks=True,
            attention=(
                AttentionShape(num_heads=64, num_kv_heads=8, head_dim=64, window=128),
                AttentionShape(num_heads=64, num_kv_heads=8, head_dim=64),
            ),
            attention_of_layer=(0, 1) * (layers // 2),
            moe=MoeShape(num_experts=experts, experts_per_token=4, intermediate_size=2880, expert_bias=True, router_bias=True),
        )
        for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128))
    ),
    # DeepSeek, config.json of deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V3, without its
    # multi-token-prediction layer; R1 has the same shape.
    ModelShape(
        name="deepseek-v2-lite", architecture="deepseek_v2", num_layers=27, hidden_size=2048, intermediate_size=10944, vocab_size=102400,
        max_position_embeddings=163840, attention=(_mla(16, None),), rotary_dim=64,
        moe=MoeShape(
            num_experts=64, experts_per_token=6, intermediate_size=1408, shared_intermediate_size=2 * 1408,
            first_dense_layers=1,
        ),
    ),
    ModelShape(
        name="deepseek-v3", architecture="deepseek_v3", num_layers=61, hidden_size=7168, intermediate_size=18432, vocab_size=129280,
        max_position_embeddings=163840, attention=(_mla(128, 1536),), rotary_dim=64, quantization="fp8_block",
        moe=MoeShape(
            num_experts=256, experts_per_token=8, intermediate_size=2048, shared_intermediate_size=2048,
            first_dense_layers=3, router_bias=True,
        ),
    ),
    # Moonshot AI, config.json of moonshotai/Kimi-K2-Instruct.
    ModelShape(
        name="kimi-k2", architecture="kimi_k2", num_layers=61, hidden_size=7168, intermediate_size=18432, vocab_size=163840,
        max_position_embeddings=131072, attention=(_mla(64, 1536),), rotary_dim=64, quantization="fp8_block",
        moe=MoeShape(
            num_experts=384, experts_per_token=8, intermediate_size=2048, shared_intermediate_size=2048,
            first_dense_layers=1, router_bias=True,
        ),
    ),
    # Google, config.json of google/gemma-2-9b: four norms a layer, layers alternate window 4096 and full.
    ModelShape(
        name="gemma-2-9b", architecture="gemma2", num_layers=42, hidden_size=3584, intermediate_size=14336, vocab_size=256000,
        max_position_embeddings=8192, tie_word_embeddings=True, norms_per_layer=4,
        attention=(
            AttentionShape(num_heads=16, num_kv_heads=8, head_dim=256, window=4096),
            AttentionShape(num_heads=16, num_kv_heads=8, head_dim=256),
        ),
        attention_of_layer=(0, 1) * 21,
    ),
    # Google, config.json of google/gemma-4-26B-A4B: five window layers, then a full one with fewer, wider heads.
    ModelShape(
        name="gemma-4-26b-a4b", architecture="gemma4", num_layers=30, hidden_size=2816, intermediate_size=2112, vocab_size=262144,
        max_position_embeddings=262144, tie_word_embeddings=True, norms_per_layer=4, qk_norm=True,
        attention=(
            AttentionShape(num_heads=16, num_kv_heads=8, head_dim=256, window=1024),
            AttentionShape(num_heads=16, num_kv_heads=2, head_dim=512),
        ),
        attention_of_layer=(0, 0, 0, 0, 0, 1) * 5,
        moe=MoeShape(num_experts=128, experts_per_token=8, intermediate_size=704, shared_intermediate_size=2112),
        notes=("gemma-4-26b-a4b: KV bytes are exact; the parameter count is an estimate, its source lacks the dense branch",),
    ),
    # Made for this project's own tests: small enough for a CPU, shaped like Llama.
    _llama("tiny-llama-test", 2, 4, 2, 64, 128, 256, 4096, head_dim=16, dtype="float32"),
    # Likewise, shaped like a Qwen3 with `layer_types`: three window layers, in two groups, beside a group of two full ones.
    ModelShape(
        name="tiny-hybrid-test", architecture="qwen3", num_layers=5, hidden_size=64, intermediate_size=128, vocab_size=256,
        max_position_embeddings=4096, dtype="float32", qk_norm=True,
        attention=(
            AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, window=40),
            AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16),
        ),
        attention_of_layer=(0, 1, 0, 1, 0),
    ),
)  # fmt: skip

MODELS = {shape.name: shape for shape in _SHAPES}
"""Every shape by its canonical name."""

MODEL_ALIASES = hub_aliases(MODELS)
"""Other spellings, lower case: names on the Hugging Face hub with and without the owner."""


def model_shape(name: str | Path) -> ModelShape:
    """The shape called `name`: a catalogue name, a hub name, or the path of a `config.json` (or of its folder).

    Raises:
        ConfigError: no such model (with the nearest names), or a file that cannot be read (with the key at fault).
    """
    text = str(name)
    path = Path(text)
    if text in MODELS:
        return MODELS[text]
    if isinstance(name, Path) or text.endswith(".json") or path.is_dir():
        return read_config(path / "config.json" if path.is_dir() else path)
    if path.is_file() or text.startswith(("./", "../", "/", "~")) or text.endswith("/"):
        what = "a file, and no config.json" if path.is_file() else "no folder"
        raise ConfigError(
            f"{text}: {what}; a model is a catalogue name, or the path of a config.json or of the folder that has one"
        )
    return look_up("model", text, MODELS, MODEL_ALIASES, advice="Any other model: give the path of its config.json.")
