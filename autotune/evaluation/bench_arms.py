"""Arms that a profile of the runtime is compared with in ``autotune bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from autotune.console import Console
from autotune.documents.decoding_profile import AR, HF, TUNED
from autotune.documents.published_defaults import COMPARED, HF_ASSISTED, NAMED, PROMPT_LOOKUP
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.bench import BenchArms
from autotune.evaluation.runtime_arms import DecoderArm, HuggingFaceArm, RuntimeArms
from autotune.modeling.loading import Dtype
from autotune.runtime.load import load
from autotune.workloads.workload import Workload


def published(arms: RuntimeArms, name: str) -> Arm:
    """Decodes by a published configuration.

    Raises:
        UserError: there is no draft, or it and the target decode chains only.
    """
    if arms.decoder.draft is None and arms.draft_of is None:
        raise UserError("the profile decodes without a draft; name a --draft")
    return arms.arm(name, NAMED[name])


def assisted(arms: RuntimeArms) -> Arm:
    """Hugging Face's assisted generation by the profile's draft.

    Raises:
        UserError: the draft is no whole model.
    """
    if arms.decoder.draft is None or (assistant := arms.decoder.draft.standalone_model) is None:
        raise UserError("the profile has no draft that generate takes as its assistant_model")
    if arms.decoder.target.ranks is not None:
        raise UserError("assisted generation of transformers drafts in every process; start it without torchrun")
    return HuggingFaceArm(HF_ASSISTED, arms, assistant)


ARMS: dict[str, Callable[[RuntimeArms], Arm]] = {
    AR: lambda arms: arms.plain,
    HF: lambda arms: HuggingFaceArm(HF, arms),
    HF_ASSISTED: assisted,
    PROMPT_LOOKUP: RuntimeArms.prompt_lookup,
    **{name: partial(published, name=name) for name in NAMED},
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
    """
    decoder = load(profile, device=device, dtype=dtype, context_tokens=0, console=console)  # warm-ups capture
    prompts = prompts.fitting(decoder.processor, decoder.target.max_context, console.say)
    given_draft = None if draft is None else load_draft(draft, decoder.target)
    assert decoder.profile is not None
    verifications = [
        decoder.profile.point.verification,
        *(NAMED[name].verification for name in names or () if name in NAMED),
    ]
    is_lossy = not all(verification.is_lossless for verification in verifications)
    draft_of = None if given_draft is None else lambda configuration: given_draft
    makes = RuntimeArms(decoder, with_perplexity=is_lossy, draft_of=draft_of)
    chosen = choose_arms((AR, *(COMPARED if names is None else names)), makes, prompts)
    if decoder.draft is not None:
        chosen.arms.append(DecoderArm(TUNED, decoder, makes))
    return chosen, str(decoder.target.device)


def choose_arms(names: Sequence[str], arms: RuntimeArms, prompts: Workload) -> BenchArms:
    """The arms of these names that can run, each once, in this order."""
    chosen = BenchArms([], prompts)
    for name in dict.fromkeys(names):
        try:
            chosen.arms.append(ARMS[name](arms))
        except UserError as error:
            chosen.unavailable[name] = str(error)
    return chosen
