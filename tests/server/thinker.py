"""A tiny random model with the tags and the chat template of a model that reasons and calls tools."""

from __future__ import annotations

import json
from pathlib import Path

from models.tiny import Shape, write_target
from tokenizers import AddedToken, Tokenizer

SHAPE = Shape(vocab=300, hidden=48, inner=64, heads=4, kv_heads=2, head_dim=16, context=2048, sharp=1.5)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
OPEN, CLOSE, CALL, END_CALL = range(290, 294)  # ids of the tags
EOS = SHAPE.vocab - 1

# As Qwen3's: thinking is on unless the switch is off; with `open` the prompt begins the reasoning, as DeepSeek's does.
TEMPLATE = (
    "{% if tools %}<|start|>system\nTools, to be called in <tool_call></tool_call>: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif open %}<think>\n{% endif %}{% endif %}"
)


def write_thinker(folder: Path) -> Path:
    write_target(folder, SHAPE, tokenizer=True)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab = state["model"]["vocab"]
    for i, tag in zip((OPEN, CLOSE, CALL, END_CALL), TAGS, strict=True):
        del vocab[next(text for text, token in vocab.items() if token == i)]
        vocab[tag] = i
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(str(path))
    settings = {"eos_token": "<|end|>", "bos_token": "<|start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
