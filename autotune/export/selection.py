"""The part of a profile that an engine is to run: one operating point, and a draft that the engine serves."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from autotune.acceptance.trace import Trace
from autotune.documents.decoding_profile import DecodingProfile, Predicted
from autotune.errors import UserError
from autotune.export.search_documents import SearchDocuments, find_search_documents
from autotune.export.vllm import NAME, SERVED


@dataclass(frozen=True)
class Selection:
    """The last operating point of a profile, for all requests, with a draft for one engine and the documents of its search."""

    profile: DecodingProfile
    documents: SearchDocuments
    kind: str
    """The draft's kind."""
    trace: Trace
    """The trace of the full draft as the engine shows it images."""

    @functools.cached_property
    def tuned(self) -> Predicted:
        """The prediction of the profile's own point on the same prompts."""
        return self.documents.predict(self.profile.point, self.trace)


def select_for_export(source: Path, *, study: Path | None = None, draft: str | None = None) -> Selection:
    """Choose the draft of an export; see ``export_profile`` for the arguments.

    Raises:
        UserError: the profile or its study cannot be read, there is no such draft, the engine does not serve the draft, or the draft
            was not recorded as the engine shows it images.
    """
    profile = DecodingProfile.load(source)
    point = profile.point
    if draft is None:
        if point.draft is None:
            raise UserError(f"{source}: decodes without a draft, so there is nothing to export; serve the target alone")
        draft = point.draft.id
    found = find_search_documents(profile, source, study)
    documents = next((candidate for candidate in found if candidate.reproduces(point)), found[0])
    kind = _served_kind(documents, profile, draft)
    return Selection(profile, documents, kind, _engine_trace(documents, profile, draft, kind))


def _served_kind(documents: SearchDocuments, profile: DecodingProfile, draft: str) -> str:
    """The kind of a draft that was recorded and that the engine serves."""
    recorded = {one.draft.id: one.draft_kind for one in documents.headers.values()}
    kinds = recorded | {point.draft.id: point.draft.kind for point in profile.points if point.draft is not None}
    if served := [name for name in recorded if kinds[name] in SERVED]:
        advice = f"export a recorded one: --draft {' or '.join(served)}"
    else:
        advice = f"search again with a kind that it serves: {' or '.join(SERVED)}"
    if draft not in kinds:
        raise UserError(f"--draft {draft}: {documents.folder} has traces of {', '.join(recorded)}; {advice}")
    if kinds[draft] not in SERVED:
        raise UserError(f"{NAME} cannot serve {draft}, a draft of kind {kinds[draft]}; {advice}")
    return kinds[draft]


def _engine_trace(documents: SearchDocuments, profile: DecodingProfile, draft: str, kind: str) -> Trace:
    """The trace of the draft as the engine runs it and shows it images."""
    vision = SERVED[kind].images
    if (trace := documents.engine_trace(draft, vision)) is not None:
        return trace
    shown, option = "with every visual token", ""
    if vision == "placeholders":
        shown, option = "and shows it image placeholders as text", " --visual-input placeholders"
    prompts = profile.workload
    option += "" if prompts.max_new_tokens is None else f" --max-new-tokens {prompts.max_new_tokens}"
    option += "" if prompts.temperature is None else f" --temperature {prompts.temperature:g}"
    raise UserError(
        f"{NAME} runs the full draft {shown}; {documents.folder} has no such trace of {draft}; record it: autotune record "
        f"--target {profile.target.id} --draft {draft} --visual-keep 1{option} --workload {prompts.name} --prompts "
        f"{prompts.num_tune_prompts} -o {documents.folder}"
    )
