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
from autotune.modeling.vision_timing import timed_vision, vision_parts
from autotune.runtime.load import load
from autotune.trees.policy import parse_policy
from autotune.workloads.prompt import WorkloadPrompt
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

    Perplexities are computed where an arm or a point is lossy.

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
    is_lossy = any(map(is_lossy_arm, names or ())) or not all(point.lossless for point in decoder.profile.points)
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
        failure: str | None = None
        note: str | None = None
        has_draft = decoder.draft is not None or (arms.draft_of is not None and name in NAMED)
        if not has_draft and (name in NAMED or name == HF_ASSISTED):
            failure = "the profile decodes without a draft"
        elif name in NAMED and not parse_policy(NAMED[name].tree).is_chain and has_states:
            failure = "recurrent or convolution states follow one path, so that only chains are decoded"
        elif name == HF_ASSISTED:
            failure, note = try_assisted(arms, prompts)
        elif name == HF and decoder.mode != EAGER:
            note = f"generate runs eagerly, so that gains over it include that of mode {decoder.mode}; gains over {AR} do not"
        if failure is not None:
            chosen.unavailable[name] = failure
            continue
        if note is not None:
            chosen.notes[name] = note
        chosen.arms.append(ARMS[name](arms))
    return chosen


def try_assisted(arms: RuntimeArms, prompts: Workload) -> tuple[str | None, str | None]:
    """Try Hugging Face's assisted generation on the first prompt with an image and the first without.

    Returns why it cannot run, or None, and a limitation to report, or None. In half precision rounding can flip the
    argmax of a near tie, so only in float32 an output that differs from ``generate`` alone is a failure.
    """
    assistant = assistant_of(arms)
    if assistant is None:
        return "the profile's draft is no model that generate takes as its assistant_model", None
    note = None
    first_of_kind: dict[bool, WorkloadPrompt] = {}
    for prompt in prompts.prompts:
        first_of_kind.setdefault(bool(prompt.pixels), prompt)
    for prompt in first_of_kind.values():
        try:
            with timed_vision(assistant) as vision:
                answer = ARMS[HF_ASSISTED](arms).decode(prompt)
        except Exception as error:  # whatever transformers raises for models it does not support
            first_line = next(iter(str(error).strip().splitlines()), "no message")
            return f"on {prompt.name} generate raised {type(error).__name__}: {first_line}", None
        is_exact = arms.decoder.target.text.is_exact and prompt.settings.temperature == 0
        if is_exact and answer.tokens != ARMS[HF](arms).decode(prompt).tokens:
            return f"on {prompt.name} its output differs from generate alone", None
        if prompt.pixels and vision_parts(assistant) and vision.num_forwards == 0:
            note = "generate gives the draft no image, so that it drafts blind"
    return None, note


def assistant_of(arms: RuntimeArms) -> Any | None:
    """The draft as an ``assistant_model`` of Hugging Face's generate; None if the draft is not a whole model."""
    draft = arms.decoder.draft
    return None if draft is None else draft.standalone_model
