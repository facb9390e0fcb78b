"""vLLM: chains, as the JSON of ``--speculative-config``. Its ``num_speculative_tokens`` k is a chain's depth: k draft
tokens per round without the root, one draft forward pass each, and a verification of k + 1 tokens.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.documents.draft_kinds import KINDS, Served
from autotune.export.model_files import (
    Conversion,
    ModelFiles,
    has_short_vision_names,
    text_part,
    with_long_vision_names,
)

NAME, VERSION = "vllm", "0.32.0"
"""The engine, and the version whose rules these settings were checked against."""
SETTINGS_FILE = "speculative-config.json"
LOSSLESS = (
    "rejection_sample_method standard, as exported, preserves the target's distribution at any temperature (block does too, synthetic "
    "does not); at temperature 0 these are the target's own tokens, except for near ties in reduced precision; above 0 the sampled tokens "
    "differ from autotune's, whose noise is keyed by seed and position"
)
NOTE = (
    "accepted lengths assume that drafts propose their most probable token (vLLM's default, draft_sample_method greedy)"
)
SERVED: Mapping[str, Served] = {name: kind.served[NAME] for name, kind in KINDS.items() if NAME in kind.served}
"""The kinds of drafts that vLLM serves."""


@dataclass(frozen=True)
class Pair:
    """The models to serve, by the names or folders that the engine is given."""

    target: str
    draft: str
    draft_kind: str
    target_files: ModelFiles | None = None
    """None if the model is not on this machine."""
    draft_files: ModelFiles | None = None
    dtype: str | None = None
    """For the engine's ``--dtype``; None: its own choice, which may be 16 bits for models in float32."""


def pair_refusal(pair: Pair) -> str | None:
    """Why vLLM would refuse the pair, by the files of the two models, as far as they are on this machine; or None."""
    target, draft = pair.target_files, pair.draft_files
    if draft is None or not KINDS[pair.draft_kind].is_complete_model:
        return None
    if draft.has_mrope:
        return "the draft has M-RoPE positions, which vLLM's draft_model does not run; choose a draft without"
    sizes = (None if target is None else target.vocab_size, draft.vocab_size)
    if None not in sizes and sizes[0] != sizes[1]:
        return (
            f"the draft's vocabulary has {sizes[1]} tokens and the target's has {sizes[0]}; choose a draft with the target's "
            "vocabulary"
        )
    return None


def caveats(pair: Pair) -> Sequence[str]:
    """Limitations of vLLM with this pair."""
    if not KINDS[pair.draft_kind].is_complete_model:
        return ()
    notes = [
        "vLLM shows a draft_model no image: it reads the placeholders as text, and predictions replay a trace recorded so; a draft "
        "that is a vision-language model is exported as its text part"
    ]
    if pair.target_files is not None and pair.target_files.has_mrope:
        notes.append(
            "the target has M-RoPE positions, and vLLM gives the draft their first axis, on which an image's tokens share a position; "
            "the trace counts every token, so predictions for prompts with images are off"
        )
    return notes


def loadable(pair: Pair, folder: Path) -> tuple[Pair, Sequence[Conversion]]:
    """The pair with models that vLLM loads, and the checkpoints in ``folder`` that have to be written for it: the text
    part of a draft, and a vision tower whose weights have the names that vLLM knows.

    Raises:
        UserError: a model cannot be converted.
    """
    target, draft, conversions = pair.target, pair.draft, []
    if pair.target_files is not None and has_short_vision_names(pair.target_files):
        conversions.append(with_long_vision_names(pair.target_files, folder / "target"))
        target = str(folder / "target")
    if KINDS[pair.draft_kind].is_complete_model and pair.draft_files and "vision_config" in pair.draft_files.config:
        conversions.append(text_part(pair.draft_files, folder / "draft", pair.draft))
        draft = str(folder / "draft")
    return dataclasses.replace(pair, target=target, draft=draft), conversions


def settings(pair: Pair, depth: int) -> dict[str, Any]:
    own = {"num_speculative_tokens": depth, "rejection_sample_method": "standard"}
    return {"method": SERVED[pair.draft_kind].method, "model": pair.draft} | own


def command(pair: Pair, settings: Mapping[str, Any]) -> str:
    """The command that starts vLLM with these settings."""
    config = json.dumps(settings)
    dtype = [] if pair.dtype is None else ["--dtype", pair.dtype]
    return shlex.join(["vllm", "serve", pair.target, *dtype, "--speculative-config", config])
