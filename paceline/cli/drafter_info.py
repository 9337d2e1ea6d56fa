"""`paceline info` of a drafter: what was recognised, from which fields, and whether it fits a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.cli.options import count

if TYPE_CHECKING:
    from paceline.models.config import DecoderConfig
    from paceline.models.drafter_config import DFlashConfig
    from paceline.weights.checkpoint import Checkpoint


def describe_drafter(drafter: Checkpoint, target: Checkpoint | None) -> dict[str, Any]:
    """Facts of a drafter's files; with a target, whether it was made for it. Raises ConfigError for what is no
    drafter of a known family."""
    from paceline.models.drafter_config import read_drafter_config
    from paceline.models.target import read_config
    from paceline.models.views import assistant_view
    from paceline.speculation.calibration import read_calibration

    c = read_drafter_config(drafter.config, str(drafter.path))
    drafter = assistant_view(drafter) if c.packaging == "transformers" else drafter
    folder = drafter.path if drafter.path.is_dir() else drafter.path.parent
    facts: dict[str, Any] = {
        "path": str(drafter.path),
        "family": c.family,
        "packaging": c.packaging,
        "recognised_by": list(c.evidence),
        "method": c.family,
        "num_speculative_tokens": c.max_drafts,
        "block_size": c.block_size,
        "slots": "from the anchor on: each predicts the next token"
        if c.anchor_first
        else "behind the anchor: each predicts the token at its own position",
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
        "num_layers": c.decoder.num_layers,
        "hidden_size": c.decoder.hidden_size,
        "layers": [_layer(c, i) for i in range(c.decoder.num_layers)],
        "vocab_size": None if c.packaging == "transformers" else c.decoder.vocab_size,
        "drafts_from": _vocabulary(c, drafter),
        "heads": _heads(c),
        "calibrated": bool(read_calibration(folder).temperatures) if c.confidence is not None else None,
        "parameters": sum(math.prod(drafter.shape(name)) for name in drafter.names()),
        "target": None if target is None else str(target.path),
        "fits": None,
        "misfit": None,
    }
    if target is not None:
        facts["misfit"] = _misfit(c, drafter, read_config(target))
        facts["fits"] = facts["misfit"] is None
    return facts


def _layer(c: DFlashConfig, index: int) -> str:
    window = c.decoder.windows[index]
    reach = f"window of {window:,}" if window else "whole context"
    return f"{reach}, slots see {'earlier ones' if c.causal[index] else 'each other'}"


def _vocabulary(c: DFlashConfig, drafter: Checkpoint) -> str:
    from paceline.models.drafter_weights import read_head_rows

    if c.draft_vocab_size is not None:
        return f"{c.draft_vocab_size:,} tokens listed by d2t, with a head of its own"
    rows = read_head_rows(drafter.path if drafter.path.is_dir() else drafter.path.parent, c.decoder.vocab_size)
    return "the whole vocabulary" if rows is None else f"{len(rows):,} tokens listed by head_rows"


def _heads(c: DFlashConfig) -> list[str]:
    out = []
    if c.markov is not None:
        out.append(f"Markov head, {c.markov.kind}, rank {c.markov.rank}")
    if c.confidence is not None:
        out.append("confidence head" + (" that reads the token before" if c.confidence else ""))
    if c.selector is not None:
        s = c.selector
        out.append(f"local convolutions of {s.kernel} rows, groups of {s.group}")
        out.append(f"candidate selector, {s.top_k} of each slot, rank {s.rank}")
    return out


def _misfit(c: DFlashConfig, drafter: Checkpoint, target: DecoderConfig) -> str | None:
    """What does not fit, in words."""
    from paceline.models.drafter_config import misfit

    found = misfit(c, target)
    if found is not None:
        name, value, expected = found
        return f"{name} = {value}, the model has {expected}"
    wanted = (c.decoder.hidden_size, len(c.target_layer_ids) * c.decoder.hidden_size)
    if "fc.weight" not in drafter:
        return "tensor fc.weight is missing"
    if drafter.shape("fc.weight") != wanted:
        return f"tensor fc.weight has shape {list(drafter.shape('fc.weight'))}, {list(wanted)} is needed"
    return None


def drafter_text(facts: dict[str, Any]) -> str:
    """The facts for people."""
    layers = [f"{i}: {text}" for i, text in enumerate(facts["layers"])]
    if len(set(facts["layers"])) == 1:
        layers = [f"all {len(layers)}: {facts['layers'][0]}"]
    if facts["fits"] is None:
        fits = "not checked; give --target MODEL"
    else:
        fits = f"yes, {facts['target']}" if facts["fits"] else f"no, {facts['target']}: {facts['misfit']}"
    drafts = count(facts["num_speculative_tokens"], "token")
    rows = [
        ("drafter", f"{facts['family']}, as {facts['packaging']} packages it"),
        ("recognised by", "; ".join(facts["recognised_by"])),
        ("path", facts["path"]),
        ("use", f'--speculative-config \'{{"method": "{facts["method"]}", "model": "{facts["path"]}"}}\''),
        ("drafts", f"up to {drafts}, block size {facts['block_size']}, mask token {facts['mask_token_id']}"),
        ("slots", facts["slots"]),
        ("reads", f"outputs of the model's layers {', '.join(map(str, facts['target_layer_ids']))}"),
        ("layers", "; ".join(layers)),
        ("drafts from", facts["drafts_from"]),
        *(("has", head) for head in facts["heads"]),
        ("parameters", f"{facts['parameters'] / 1e6:,.1f} M, width {facts['hidden_size']:,}"),
        ("fits", fits),
    ]
    if facts["calibrated"] is not None:
        rows.insert(-1, ("calibration", "fitted" if facts["calibrated"] else "none; see paceline train calibrate"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)
