"""Arms that a profile of the runtime is compared with in ``autotune bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import AR, HF, TUNED
from autotune.documents.execution import EAGER
from autotune.documents.published_defaults import COMPARED, HF_ASSISTED, NAMED, PROMPT_LOOKUP
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.bench_settings import BenchArms
from autotune.evaluation.bench_tables import is_lossy_arm
from autotune.evaluation.runtime_arms import DecoderArm, HuggingFaceArm, RuntimeArms
from autotune.modeling.loading import Dtype
from autotune.runtime.load import load
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload

ARMS: dict[str, Callable[[RuntimeArms], Arm]] = {
    AR: lambda arms: arms.plain,
    HF: lambda arms: HuggingFaceArm(HF, arms),
    HF_ASSISTED: lambda arms: HuggingFaceArm(HF_ASSISTED, arms, assistant_of(arms)),
    PROMPT_LOOKUP: RuntimeArms.prompt_lookup,
    **{name: partial(RuntimeArms.arm, name=name, configuration=tree) for name, tree in NAMED.items()},
}
"""Makers of the arms that a profile can be compared with, by the names in ``ARM_NAMES``."""


def runtime_arms(
    profile: Path,
    prompts: Workload,
    console: Console,
    *,
    names: Sequence[str] | None = None,
    draft: str | None = None,
    device: str = "auto",
    dtype: Dtype | None = None,
) -> tuple[BenchArms, str]:
    """Load a profile, and make plain decoding, the named arms and the profile itself; returns the device too.

    Perplexities are computed where an arm or the profile is lossy.

    Args:
        names: in ``ARM_NAMES``; None compares with those of ``COMPARED`` that can run.
        draft: of the published configurations; None: the profile's.
        dtype: of the target; None: the profile's.

    Raises:
        UserError: a published configuration was asked for without a draft.
    """
    decoder = load(profile, device=device, dtype=dtype, context_tokens=0, console=console)  # warm-ups capture
    prompts = prompts.fitting(decoder.processor, decoder.target.max_context, console.say)
    if decoder.draft is None and draft is None and any(name in NAMED for name in names or ()):
        raise UserError(
            "this profile decodes without a draft, so trees cannot be compared with it; "
            f"bench it --arms {AR},{HF},{PROMPT_LOOKUP}, or name a --draft"
        )
    own_draft = None if draft is None else load_draft(draft, decoder.target)
    assert decoder.profile is not None
    is_lossy = any(map(is_lossy_arm, names or ())) or not decoder.profile.point.lossless
    draft_of = None if own_draft is None else lambda configuration: own_draft
    makes = RuntimeArms(decoder, with_perplexity=is_lossy, draft_of=draft_of)
    chosen = choose_arms((AR, *(COMPARED if names is None else names)), makes, prompts)
    if decoder.draft is not None:
        chosen.arms.append(DecoderArm(TUNED, decoder, makes))
    return chosen, str(decoder.target.device)


def choose_arms(names: Sequence[str], arms: RuntimeArms, prompts: Workload) -> BenchArms:
    """The arms of these names that can run, each once, in this order."""
    chosen, decoder = BenchArms([], prompts), arms.decoder
    has_states = decoder.target.has_states or (decoder.draft is not None and decoder.draft.has_states)
    for name in dict.fromkeys(names):
        has_draft = decoder.draft is not None or (arms.draft_of is not None and name in NAMED)
        if not has_draft and (name in NAMED or name == HF_ASSISTED):
            chosen.unavailable[name] = "the profile decodes without a draft"
        elif name in NAMED and not parse_policy(NAMED[name].tree).is_chain and has_states:
            states = "recurrent or convolution states follow one path, so that only chains are decoded"
            chosen.unavailable[name] = states
        elif name == HF_ASSISTED and assistant_of(arms) is None:
            chosen.unavailable[name] = "the profile's draft is no model that generate takes as its assistant_model"
        else:
            chosen.arms.append(ARMS[name](arms))
    if HF in names and decoder.mode != EAGER:
        eager = f"generate runs eagerly, so that gains over it include that of mode {decoder.mode}"
        chosen.notes[HF] = f"{eager}; gains over {AR} do not"
    return chosen


def assistant_of(arms: RuntimeArms) -> Any | None:
    """The draft as an ``assistant_model`` of Hugging Face's generate; None if the draft is not a whole model."""
    draft = arms.decoder.draft
    return None if draft is None else draft.standalone_model
