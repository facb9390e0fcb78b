"""The part of a profile that an engine is to run: one operating point, a draft that the engine serves, and the recorded prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.trace import Trace
from autotune.documents.decoding_profile import DecodingProfile, OperatingPoint, Predicted
from autotune.errors import UserError
from autotune.export.engine import Engine
from autotune.export.search_documents import SearchDocuments, find_search_documents
from autotune.study.folder import points_of_prompts


@dataclass(frozen=True)
class Selection:
    """One operating point of a profile for one engine, with the documents of its search."""

    profile: DecodingProfile
    number: int
    """Index of the operating point."""
    documents: SearchDocuments
    kind: str
    """The draft's kind."""
    trace: Trace
    """The trace of the full draft as the engine shows it images."""
    prompts: NDArray[np.bool_]
    """[prompts]: which recorded prompts are replayed."""

    @property
    def point(self) -> OperatingPoint:
        return self.profile.points[self.number]

    @functools.cached_property
    def tuned(self) -> Predicted:
        """The prediction of the profile's own point on the same prompts."""
        return self.documents.predict(self.point, self.trace, self.prompts)


def select_for_export(
    engine: Engine, source: Path, *, study: Path | None = None, point: int | None = None, draft: str | None = None
) -> Selection:
    """Choose the point, draft and prompts of an export; see ``export_profile`` for the arguments.

    Raises:
        UserError: the profile or its study cannot be read, there is no such point or draft, the engine does not serve the draft, the
            draft was not recorded as the engine shows it images, or no prompt is left.
    """
    profile = DecodingProfile.load(source)
    last = len(profile.points) - 1
    number = last if point is None else point
    if not 0 <= number <= last:
        raise UserError(f"--point {point}: {source} has points 0 to {last}; give one of them, or leave --point out")
    selected = profile.points[number]
    if draft is None:
        if selected.draft is None:
            raise UserError(
                f"{source}: point {number} decodes without a draft, so there is nothing to export; serve the target alone"
            )
        draft = selected.draft.id
    found = find_search_documents(profile, source, study)
    documents = next((candidate for candidate in found if candidate.reproduces(selected)), found[0])
    kind = _served_kind(documents, profile, engine, draft)
    trace = _engine_trace(engine, documents, profile, draft, kind)
    prompts = _prompts(engine, profile, trace, kind, point)
    return Selection(profile, number, documents, kind, trace, prompts)


def _served_kind(documents: SearchDocuments, profile: DecodingProfile, engine: Engine, draft: str) -> str:
    """The kind of a draft that was recorded and that the engine serves."""
    methods, recorded = engine.served, {one.draft.id: one.draft_kind for one in documents.headers.values()}
    kinds = recorded | {point.draft.id: point.draft.kind for point in profile.points if point.draft is not None}
    if served := [name for name in recorded if kinds[name] in methods]:
        advice = f"export a recorded one: --draft {' or '.join(served)}"
    else:
        advice = f"search again with a kind that it serves: {' or '.join(methods)}"
    if draft not in kinds:
        raise UserError(f"--draft {draft}: {documents.folder} has traces of {', '.join(recorded)}; {advice}")
    if kinds[draft] not in methods:
        raise UserError(f"{engine.name} cannot serve {draft}, a draft of kind {kinds[draft]}; {advice}")
    return kinds[draft]


def _engine_trace(engine: Engine, documents: SearchDocuments, profile: DecodingProfile, draft: str, kind: str) -> Trace:
    """The trace of the draft as the engine runs it and shows it images."""
    vision = engine.served[kind].images
    if (trace := documents.engine_trace(draft, vision)) is not None:
        return trace
    shown, option = "with every visual token", ""
    if vision == "placeholders":
        shown, option = "and shows it image placeholders as text", " --visual-input placeholders"
    prompts = profile.workload
    option += "" if prompts.max_new_tokens is None else f" --max-new-tokens {prompts.max_new_tokens}"
    option += "" if prompts.temperature is None else f" --temperature {prompts.temperature:g}"
    raise UserError(
        f"{engine.name} runs the full draft {shown}; {documents.folder} has no such trace of {draft}; record it: autotune record "
        f"--target {profile.target.id} --draft {draft} --visual-keep 1{option} --workload {prompts.name} --prompts "
        f"{prompts.num_tune_prompts} -o {documents.folder}"
    )


def _prompts(engine: Engine, profile: DecodingProfile, trace: Trace, kind: str, point: int | None) -> NDArray[np.bool_]:
    """The prompts that ``point`` decodes, or all; without images where the engine shows the draft something unknown."""
    prompts = np.ones(trace.num_prompts, bool)
    if point is not None:
        prompts = points_of_prompts(profile, trace) == point
        if not prompts.any():
            raise UserError(
                f"--point {point}: no tuning prompt meets its condition, {profile.points[point].when.label}; leave --point out"
            )
    if engine.served[kind].images == "text":
        prompts &= trace.num_visual_tokens == 0
        if not prompts.any():
            raise UserError(
                f"{engine.name}: a draft of kind {kind} is exported for prompts without images, because what the engine shows it of an "
                "image is not what autotune records, and every tuning prompt has one; export to another engine, or search with text"
            )
    return prompts
