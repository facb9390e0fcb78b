"""The command that starts vLLM with the draft and the chain of a profile of the runtime. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.draft_kinds import TOKEN_DRAFTS
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.documents.subnet import Subnet
from autotune.engines.model_files import CONFIG, find_model_files, served_draft, served_target
from autotune.engines.vllm import vllm_arguments
from autotune.errors import UserError
from autotune.files import require_writable
from autotune.modeling.loading import bundled_models
from autotune.trees.chain import ChainPolicy


def vllm_command(profile: DecodingProfile, console: Console, *, draft_tokens: int | None, output: Path) -> list[str]:
    """The command for a profile's point. Models that vLLM does not load as they are get written below ``output`` in a
    form that it loads.

    Args:
        profile: located, see ``DecodingProfile.located``.
        draft_tokens: length of the chain; None: the depth of the point's chain.

    Raises:
        UserError: the point has no chain, or vLLM does not load the target or draft with its draft.
    """
    target, draft, tree = profile.target.id, profile.point.draft, profile.point.tree
    if draft is None or draft.kind in TOKEN_DRAFTS:
        reason = "without a draft" if draft is None else f"with {draft.kind}"
        raise UserError(
            f"the profile of {target} decodes {reason}, so there is no draft model to export; tune vLLM's own speculation by autotune "
            "search --backend vllm"
        )
    depth = tree.depth if draft_tokens is None and isinstance(tree, ChainPolicy) else draft_tokens
    if depth is None:
        raise UserError(
            f"the profile of {target} drafts trees, and vLLM verifies chains; give the chain's length with --draft-tokens, or let autotune "
            f"search --backend vllm --set vllm:draft={draft.id} measure it"
        )
    if (files := find_model_files(target, local_only=False)) is None:
        raise UserError(
            f"{target}: vLLM loads a folder with config.json and safetensors; tune this file in llama.cpp by autotune search --backend "
            "llama.cpp"
        )
    require_writable(output / CONFIG)
    kind, path = served_draft(draft.id, target, output)
    (option,) = OPTIONS[kind]
    speculation = Speculation(type=kind, options={option: depth}, model=str(path))
    served = served_target(files.folder, output)
    model = str(bundled_models().get(target, target)) if served == files.folder else str(served)
    differences = {
        "speed in vLLM was not measured: autotune search --backend vllm measures it": True,
        f"the profile's point runs {draft.subnet.label}; vLLM runs the full draft": draft.subnet != Subnet(),
        "the profile's point is lossy; vLLM verifies losslessly": not profile.point.lossless,
    }
    for note, is_so in differences.items():
        if is_so:
            console.say(f"- {note}")
    return ["vllm", "serve", model, "--dtype", profile.dtype, *vllm_arguments(speculation)]
