"""A deployment in vLLM with the draft and the chain of a profile of the runtime. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import Deployment
from autotune.documents.draft_kinds import TOKEN_DRAFTS
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.documents.subnet import Subnet
from autotune.engines.model_files import CONFIG, find_model_files, served_draft, served_target
from autotune.engines.vllm import vllm_arguments
from autotune.errors import UserError
from autotune.files import require_writable
from autotune.modeling.loading import bundled_models
from autotune.trees.chain import ChainPolicy


def chain_of(profile: DecodingProfile, draft_tokens: int | None, program: str, console: Console) -> ChainPolicy:
    """The point's chain, or one of ``draft_tokens`` tokens, as another program runs it, which lacks the point's other
    settings.

    Raises:
        UserError: the point drafts trees.
    """
    draft, tree = profile.point.draft, profile.point.tree
    chain = tree if draft_tokens is None else ChainPolicy(depth=draft_tokens)
    if chain is not None and chain.is_chain and not isinstance(chain, ChainPolicy):
        chain = ChainPolicy(depth=chain.size.depth)
    if draft is None or not isinstance(chain, ChainPolicy):
        raise UserError(
            f"the profile of {profile.target.id} drafts trees, and {program} verifies chains; give the chain's length with --draft-tokens, or "
            "let autotune search --backend vllm find it"
        )
    differences = {
        f"speed in {program} was not measured: autotune search --backend vllm measures vLLM's": True,
        f"the profile's point runs {draft.subnet.label}; {program} runs the full draft": draft.subnet != Subnet(),
        f"the profile's point is lossy; {program} verifies losslessly": not profile.point.verification.is_lossless,
    }
    for note, is_so in differences.items():
        if is_so:
            console.say(f"- {note}")
    return chain


def vllm_deployment(
    profile: DecodingProfile, console: Console, *, draft_tokens: int | None, models: Path
) -> Deployment:
    """The deployment in vLLM of a profile's point. Models that vLLM does not load as they are get written below
    ``models`` in a form that it loads.

    Args:
        profile: located, see ``DecodingProfile.located``.
        draft_tokens: length of the chain; None: the depth of the point's chain.

    Raises:
        UserError: the point has no chain, or vLLM does not load the target or draft with its draft.
    """
    target, draft = profile.target.id, profile.point.draft
    if draft is None or draft.kind in TOKEN_DRAFTS:
        raise UserError(
            f"the profile of {target} decodes without a draft model, so there is nothing to export; tune vLLM's own speculation by autotune "
            "search --backend vllm"
        )
    require_writable(models / CONFIG, "--models")
    depth = chain_of(profile, draft_tokens, "vLLM", console).depth
    if (files := find_model_files(target, local_only=False)) is None:
        raise UserError(
            f"{target}: vLLM loads a folder with config.json and safetensors; tune this file in llama.cpp by autotune search --backend "
            "llama.cpp"
        )
    kind, path = served_draft(draft.id, target, models)
    (option,) = OPTIONS[kind]
    speculation = Speculation(type=kind, options={option: depth}, model=str(path))
    served = served_target(files.folder, models)
    model = str(bundled_models().get(target, target)) if served == files.folder else str(served)
    words = ["vllm", "serve", model, "--dtype", profile.dtype, *vllm_arguments(speculation)]
    return Deployment(backend="vllm", model=profile.target, command=words, speculation=speculation, build="")
