"""All content of the page: documents, and the results computed from them."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable

from autotune.cost.roofline import find_limits
from autotune.documents.answer import answer_of
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.provenance import ModelReference, stamp
from autotune.report.ablation import cumulative_ablation
from autotune.report.acceptance import acceptance
from autotune.report.analysis import pareto_front, subnet_grids
from autotune.report.cost_curves import cost_curves, middle_kv_length
from autotune.report.examples import decoded_example
from autotune.report.points import EvaluationArms
from autotune.report.prompts import TokenTexts, find_prompts
from autotune.report.sources import Sources


class Content:
    """The variables of the page's template. Unavailable content is None or empty; the page then says how to
    obtain it.
    """

    def __init__(self, sources: Sources, *, workload: str | None = None) -> None:
        profile, table, study = sources.profile, sources.table, sources.study
        document = profile or study
        self.sources = sources
        self.provenance = stamp()
        self.target = document.target if document else table.target if table else None
        self.hardware = document.hardware if document else table.device if table else None
        self.point = profile.point if profile else None
        predicted = self.point.predicted if self.point else None
        self.is_estimated = table.estimated if table else predicted is not None and predicted.estimated
        self.configuration = configuration_of(self.point) if self.point else None
        self.arms = EvaluationArms(profile) if profile and profile.evidence.compared else None
        self.answer = answer_of(profile, sources.profile_path) if profile and sources.profile_path else []
        self.front = pareto_front(sources.candidates)
        self.cumulative = cumulative_ablation(sources)
        self.acceptance = acceptance(sources)
        tokens = TokenTexts(self.target.id if self.target else "")
        self.example = decoded_example(sources, find_prompts(sources, workload), tokens)
        self.has_tokenizer = tokens.has_tokenizer
        self.curves = cost_curves(table, study) if table else []
        self.kv_length = middle_kv_length(table) if table else None
        self.limits = find_limits(table.device.name) if table else None
        self.grids = subnet_grids(sources.screened)
        self.drafts = _drafts(sources)
        chosen = [] if self.configuration is None else [self.configuration]
        finalists = [finalist.configuration for finalist in (study.finalists if study else [])]
        front = [candidate.configuration for candidate in self.front]
        self.configurations = _lettered([*chosen, *finalists, *front])
        keeps = [configuration.visual_keep for configuration in self.configurations.values()]
        self.has_images = min(keeps, default=1.0) < 1.0 or any(
            trace.num_visual_tokens.any() for trace in sources.traces
        )
        self.letters = {configuration.label: letter for letter, configuration in self.configurations.items()}


def _lettered(configurations: Iterable[Configuration]) -> dict[str, Configuration]:
    """Distinct configurations by letter: A to Z, then AA, AB, ..."""
    distinct = {configuration.label: configuration for configuration in configurations}
    pairs = itertools.product(["", *string.ascii_uppercase], string.ascii_uppercase)
    return dict(zip(("".join(pair) for pair in pairs), distinct.values(), strict=False))


def _drafts(sources: Sources) -> list[tuple[ModelReference, str]]:
    """Each draft of the search, or of the profile, with its kind."""
    if sources.study is not None:
        return [(entry.reference, entry.kind) for entry in sources.study.drafts]
    draft = sources.profile.point.draft if sources.profile else None
    return [] if draft is None else [(ModelReference(id=draft.id, sha256=draft.sha256), draft.kind)]
