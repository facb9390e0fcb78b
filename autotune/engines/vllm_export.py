"""``autotune export``: the command that starts vLLM with the draft and the chain of a profile."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile, DraftChoice
from autotune.documents.draft_kinds import TOKEN_DRAFTS
from autotune.documents.engine_profile import OPTIONS, Speculation
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.engines.model_files import (
    CONFIG,
    Conversion,
    find_model,
    has_short_vision_names,
    served_draft,
    text_part,
    with_long_vision_names,
)
from autotune.errors import UserError
from autotune.files import content_key, require_writable
from autotune.modeling.loading import bundled_models
from autotune.trees.chain import ChainPolicy


def vllm_arguments(speculations: Sequence[Speculation]) -> list[str]:
    """Arguments of vLLM for one type; none switch speculation off. vLLM counts the layers of MiMo's heads by the
    target's config.
    """
    words = []
    for one in speculations:
        model = {"model": one.model} if one.model else {}
        words += ["--speculative-config", json.dumps({"method": one.type, **model, **one.options})]
        words += ["--hf-overrides", json.dumps({"num_nextn_predict_layers": 1})] if one.type == "mtp" else []
    return words


def export_profile(source: Path, console: Console, *, draft_tokens: int | None = None, output: Path) -> str:
    """The command that starts vLLM with the draft of a profile's last point, which serves all requests. Models that
    vLLM does not load as they are get written into ``output`` in a form that it loads.

    Args:
        draft_tokens: length of the chain; None: the depth of the point's chain.

    Raises:
        UserError: the profile cannot be read, its point has no chain, or vLLM does not draft with its draft.
    """
    profile = DecodingProfile.load(source).located(source)
    draft, depth = profile.point.draft, draft_tokens
    if draft is None or draft.kind in TOKEN_DRAFTS:
        raise UserError(
            f"{source}: decodes {'without a draft' if draft is None else f'with {draft.kind}'}, so there is no draft model to export; serve "
            "the target alone, or tune vLLM's n-grams by autotune search --engine vllm"
        )
    if depth is None and isinstance(profile.point.tree, ChainPolicy):
        depth = profile.point.tree.depth
    if depth is None:
        raise UserError(
            f"{source}: its drafts are trees, and vLLM verifies chains; give the chain's length with --draft-tokens, or let autotune search "
            f"--engine vllm --draft {draft.id} measure it"
        )
    require_writable(output / CONFIG)
    target, speculation, conversions = _served(profile.target, draft, depth, output)
    for conversion in conversions:
        conversion.write()
    for note in (*(conversion.note for conversion in conversions), *_differences(profile, draft)):
        console.say(f"- {note}")
    words = ["vllm", "serve", target, "--dtype", profile.dtype, *vllm_arguments([speculation])]
    return shlex.join(words)


def _served(
    target: ModelReference, draft: DraftChoice, depth: int, output: Path
) -> tuple[str, Speculation, Sequence[Conversion]]:
    """The target's folder, the settings, and the checkpoints that have to be written into ``output`` for them: other
    models have other folders.
    """
    kind, folder = served_draft(draft.id, target.id, output)
    served, found, conversions = find_model(target.id), find_model(str(folder)), list[Conversion]()
    assert served is not None and found is not None
    model = str(bundled_models().get(target.id, target.id))
    written = [
        output / f"{name}-{content_key([one.id, one.sha256])}" for name, one in (("target", target), ("draft", draft))
    ]
    if kind == "draft_model" and found.has_mrope:
        raise UserError(
            f"{draft.id}: the draft has M-RoPE positions, which vLLM's draft_model does not run; choose a draft without"
        )
    if has_short_vision_names(served):
        conversions.append(with_long_vision_names(served, written[0]))
        model = str(written[0])
    if kind == "draft_model" and "vision_config" in found.config:
        conversions.append(text_part(found, written[1], draft.id))
        folder = written[1]
    (option,) = OPTIONS[kind]
    return model, Speculation(type=kind, options={option: depth}, model=str(folder)), conversions


def _differences(profile: DecodingProfile, draft: DraftChoice) -> Iterator[str]:
    """Notes on what vLLM does otherwise than the profile."""
    yield "speed in vLLM was not measured: autotune search --engine vllm measures it for prompts of text"
    if len(profile.points) > 1:
        yield f"the profile has {len(profile.points)} points and vLLM runs one: this is the last"
    if draft.subnet != Subnet():
        yield f"the profile's point runs {draft.subnet.label}; vLLM runs the full draft"
    if not profile.point.lossless:
        yield "the profile's point is lossy; vLLM verifies losslessly"
