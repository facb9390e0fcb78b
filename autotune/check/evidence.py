"""The evidence of a profile about the prompts that a check decodes. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.check.settings import CheckSettings
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import NotComparable
from autotune.workloads.workload import Workload

if TYPE_CHECKING:
    from autotune.runtime.answer_keys import AnswerKeys


def evidence_for(
    profile: DecodingProfile, workload: Workload, settings: CheckSettings, keys: AnswerKeys | None = None
) -> list[Decoded] | str:
    """The profile's evidence about the workload's first prompts, or why there is none.

    Args:
        keys: of the target that is loaded; None where an engine loads it.

    Raises:
        NotComparable: the evidence is about other prompts of this workload, or other files of the target; or about
            another workload, without another gate.
    """
    source = settings.profile
    evidence = profile.evidence.prompts[: len(workload.prompts)]
    if not evidence:
        return (
            f"{source} was not measured: no evidence to compare counts with; search on this device, or give --against"
        )
    pairs = [*zip(workload.prompts, evidence, strict=False)]
    changed = [prompt.name for prompt, known in pairs if prompt.sha256 != known.prompt_sha256]
    if not changed:
        changed = [prompt.name for prompt, known in pairs if keys and known.answer_key not in ("", keys.of(prompt))]
        if keys is None or not changed:
            return evidence
        difference = (
            f"{source}: the target's files make other tokens, pixels or generation settings of {len(changed)} of "
            f"{len(pairs)} prompts than at the search (first: {changed[0]}): its chat template, tokenizer, processor or "
            "generation config has changed"
        )
        if "strftime_now" in str(getattr(keys.processor, "chat_template", "")):
            return f"{difference}, or the date that its chat template writes"
        raise NotComparable(f"{difference}; restore the files, or search again")
    searched = profile.workload.name
    if workload.name != searched and (settings.against is not None or settings.min_speedup is not None):
        return f"the profile's evidence is about {searched}, not about this workload"
    difference = f"its evidence is about {searched}"
    if workload.name == searched:
        difference = f"{len(changed)} of the first {len(evidence)} prompts have changed"
    raise NotComparable(
        f"{source} has no evidence about these prompts of {workload.name}: {difference} (first: {changed[0]}); check the "
        "workload of the search, or search again"
    )
