"""Published drafters and the models they belong to, for `paceline drafters`.

A list to find a pair by, not a promise that it fits: the checkpoint's own fields decide that on loading.
Sources: README and model collection of the DFlash 0.1.0 package, the DeepSpec README, the checkpoints' cards.
"""

from __future__ import annotations

from dataclasses import dataclass

DFLASH_COLLECTION = "https://huggingface.co/collections/z-lab/dflash"


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    """`target` and `drafter` are Hugging Face ids; `drafter` is None where only the collection is known.

    `family`: the target's `model_type` where this engine may run it, else a plain word for what it is.
    `draft_tokens`: the most tokens one draft was trained for, where known.
    """

    target: str
    drafter: str | None
    method: str
    family: str
    draft_tokens: int | None = None
    note: str = ""


def _zlab(name: str, drafter: str, family: str, draft_tokens: int | None = None, note: str = "") -> KnownDrafter:
    return KnownDrafter(name, f"z-lab/{drafter}", "dflash", family, draft_tokens, note)


KNOWN_DRAFTERS: tuple[KnownDrafter, ...] = (
    _zlab("Qwen/Qwen3-4B", "Qwen3-4B-DFlash-b16", "qwen3", 15, "trained without thinking"),
    _zlab("Qwen/Qwen3-8B", "Qwen3-8B-DFlash-b16", "qwen3", 15, "trained without thinking"),
    _zlab("meta-llama/Llama-3.1-8B-Instruct", "LLaMA3.1-8B-Instruct-DFlash-UltraChat", "llama", 9),
    _zlab("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder-30B-A3B-DFlash", "qwen3_moe"),
    _zlab("Qwen/Qwen3-Coder-Next", "Qwen3-Coder-Next-DFlash", "qwen3_next"),
    _zlab("Qwen/Qwen3.5-4B", "Qwen3.5-4B-DFlash", "qwen3_5", 15),
    _zlab("Qwen/Qwen3.5-9B", "Qwen3.5-9B-DFlash", "qwen3_5", 15),
    _zlab("Qwen/Qwen3.5-27B", "Qwen3.5-27B-DFlash", "qwen3_5", 15),
    _zlab("Qwen/Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B-DFlash", "qwen3_5_moe", 15),
    _zlab("Qwen/Qwen3.5-122B-A10B", "Qwen3.5-122B-A10B-DFlash", "qwen3_5_moe"),
    _zlab("Qwen/Qwen3.5-397B-A17B", "Qwen3.5-397B-A17B-DFlash", "qwen3_5_moe"),
    _zlab("Qwen/Qwen3.6-27B", "Qwen3.6-27B-DFlash", "qwen3_5", 15),
    _zlab("Qwen/Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-DFlash", "qwen3_5_moe"),
    _zlab("google/gemma-4-12B-it", "gemma4-12B-it-DFlash", "gemma4"),
    _zlab("google/gemma-4-31B-it", "gemma-4-31B-it-DFlash", "gemma4", 15),
    _zlab("google/gemma-4-26B-A4B-it", "gemma-4-26B-A4B-it-DFlash", "gemma4_moe"),
    _zlab("openai/gpt-oss-20b", "gpt-oss-20b-DFlash", "gpt_oss", 7),
    _zlab("openai/gpt-oss-120b", "gpt-oss-120b-DFlash", "gpt_oss"),
    _zlab("MiniMaxAI/MiniMax-M2.5", "MiniMax-M2.5-DFlash", "minimax_m2"),
    _zlab("MiniMaxAI/MiniMax-M2.7", "MiniMax-M2.7-DFlash", "minimax_m2"),
    _zlab("moonshotai/Kimi-K2.5", "Kimi-K2.5-DFlash", "kimi_k25"),
    _zlab("moonshotai/Kimi-K2.6", "Kimi-K2.6-DFlash", "kimi_k25"),
    KnownDrafter("moonshotai/Kimi-K2.7-Code", None, "dflash", "kimi_k25", note=f"see {DFLASH_COLLECTION}"),
    KnownDrafter("zai-org/GLM-5.1", None, "dflash", "glm", note=f"see {DFLASH_COLLECTION}"),
    _zlab("z-lab/Alpamayo-1.5-10B", "Alpamayo-1.5-10B-DFlash", "alpamayo", note="vision"),
    _zlab("z-lab/Alpamayo-R1-10B", "Alpamayo-R1-10B-DFlash", "alpamayo", note="vision"),
    KnownDrafter("Qwen/Qwen3.5-0.8B", "Moonlight556/Qwen3.5-0.8B-DFlash", "dflash", "qwen3_5", 15, "community, maths"),
    KnownDrafter("Qwen/Qwen3-4B", "deepseek-ai/dflash_qwen3_4b_block7", "dflash", "qwen3", 7),
    KnownDrafter("Qwen/Qwen3-8B", "deepseek-ai/dflash_qwen3_8b_block7", "dflash", "qwen3", 7),
    KnownDrafter("Qwen/Qwen3-14B", "deepseek-ai/dflash_qwen3_14b_block7", "dflash", "qwen3", 7),
    KnownDrafter("google/gemma-4-12B-it", "deepseek-ai/dflash_gemma4_12b_block7", "dflash", "gemma4", 7),
    KnownDrafter("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", "dflash2", "qwen3_5", 7),
    KnownDrafter("meta-models/Muse-Glimmer-30B", "z-lab/Muse-Glimmer-30B-DFlash2", "dflash2", "muse_glimmer", 15),
    KnownDrafter(
        "meta-models/Muse-Glimmer-30B",
        "meta-models/Muse-Glimmer-30B-assistant",
        "dflash",
        "muse_glimmer",
        15,
        "its own",
    ),
    KnownDrafter("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", "dspark", "qwen3", 7),
    KnownDrafter("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", "dspark", "qwen3", 7),
    KnownDrafter("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", "dspark", "qwen3", 7),
    KnownDrafter("google/gemma-4-12B-it", "deepseek-ai/dspark_gemma4_12b_block7", "dspark", "gemma4", 7),
    KnownDrafter("openbmb/MiniCPM5-2B", "openbmb/MiniCPM5-2B-DSpark", "dspark", "minicpm", 7),
    KnownDrafter("LiquidAI/LFM2.5-1.2B-Instruct", "LiquidAI/LFM2.5-1.2B-Instruct-DSpark", "dspark", "lfm2", 9),
    KnownDrafter("LiquidAI/LFM2.5-2.6B", "LiquidAI/LFM2.5-2.6B-DSpark", "dspark", "lfm2", 9),
    KnownDrafter("LiquidAI/LFM2.5-8B-A1B", "LiquidAI/LFM2.5-8B-A1B-DSpark", "dspark", "lfm2_moe", 9),
    KnownDrafter("LiquidAI/LFM2.5-24B-A2B", "LiquidAI/LFM2.5-24B-A2B-DSpark", "dspark", "lfm2_moe", 9),
)
