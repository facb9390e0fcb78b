"""All that the page speaks of: documents, and the numbers found in them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost.roofline import DeviceLimits
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance, stamp
from autotune.report.ablation import Ablation, PolicyBest, Rung, dimension_worth, ladder, policies
from autotune.report.acceptance import Acceptance, acceptance
from autotune.report.chosen import ChosenPoint, Comparison, chosen_points, comparison
from autotune.report.findings import (
    Grid,
    Importance,
    PlaceBest,
    fastest_by_place,
    fastest_by_size,
    front,
    grids,
    importance,
)
from autotune.report.prices import Curve, curves, limits_of, middle_kv_length
from autotune.report.prompts import TokenTexts, find_prompts
from autotune.report.samples import Sample, samples
from autotune.report.sources import Sources
from autotune.search.evaluator import Candidate


@dataclass(frozen=True)
class Content:
    """What is not known is None or empty: the page says so, and how to make it."""

    sources: Sources
    made: Provenance
    """Of the report."""
    target: ModelReference | None
    hardware: Fingerprint | None
    is_estimated: bool
    """Predictions stand on a datasheet."""
    points: list[ChosenPoint]
    comparison: Comparison | None
    front: list[Candidate]
    by_size: dict[str, list[Candidate]]
    places: list[PlaceBest]
    worth: list[Ablation]
    ladder: list[Rung]
    policies: list[PolicyBest]
    importance: list[Importance]
    acceptance: list[Acceptance]
    samples: list[Sample]
    has_tokenizer: bool
    curves: list[Curve]
    kv_length: int | None
    limits: DeviceLimits | None
    grids: list[Grid]
    models: list[tuple[ModelReference, str]]
    """Drafts, with their kinds."""
    facts: list[tuple[str, str]]


def gather(sources: Sources, *, workload: str | None = None) -> Content:
    """Everything that the sources allow.

    Raises:
        UserError: a workload that the user names is not the search's.
    """
    profile, table, study = sources.profile, sources.table, sources.study
    document = profile or study
    target = document.target if document else table.target if table else None
    tokens = TokenTexts(target.id if target else "")
    predicted = [one.predicted for one in profile.points if one.predicted] if profile else []
    return Content(
        sources=sources,
        made=stamp(),
        target=target,
        hardware=document.hardware if document else table.device if table else None,
        is_estimated=table.estimated if table else any(one.estimated for one in predicted),
        points=chosen_points(sources),
        comparison=comparison(profile) if profile and profile.evidence.compared else None,
        front=front(sources.candidates),
        by_size=fastest_by_size(sources.candidates),
        places=fastest_by_place(sources),
        worth=dimension_worth(sources),
        ladder=ladder(sources),
        policies=policies(sources),
        importance=importance(sources.trials),
        acceptance=acceptance(sources),
        samples=samples(sources, find_prompts(sources, workload), tokens),
        has_tokenizer=tokens.is_known,
        curves=curves(table, study) if table else [],
        kv_length=middle_kv_length(table) if table else None,
        limits=limits_of(table) if table else None,
        grids=grids(sources.screened),
        models=_models(sources),
        facts=_facts(sources),
    )


def _models(sources: Sources) -> list[tuple[ModelReference, str]]:
    """Every draft once: those that took part, or those that the profile names."""
    if sources.study is not None:
        return [(one.reference, one.kind) for one in sources.study.drafts]
    points = sources.profile.points if sources.profile is not None else []
    named = {p.draft.id: ModelReference(id=p.draft.id, sha256=p.draft.sha256) for p in points if p.draft is not None}
    named |= {trace.header.draft.id: trace.header.draft for trace in sources.traces}
    return [(reference, sources.kinds.get(draft, "")) for draft, reference in named.items()]


def _facts(sources: Sources) -> list[tuple[str, str]]:
    """Device, workload and versions, by name."""
    found: list[tuple[str, str]] = []
    profile, study, table = sources.profile, sources.study, sources.table
    device = profile.hardware if profile else study.hardware if study else table.device if table else None
    if device is not None:
        found += [
            ("device", f"{device.model} ({device.kind})"),
            ("cores", str(device.num_cores) if device.num_cores else "not known"),
            ("memory", f"{device.memory_bytes / 2**30:.1f} GiB"),
            ("driver", device.driver or "-"),
            ("fingerprint", device.key),
        ]
    if profile is not None:
        workload = profile.workload
        found += [
            ("precision", profile.precision),
            ("sizes of forwards", ", ".join(map(str, profile.capture_sizes)) or "every size as it is"),
            ("CPU threads of a step", str(profile.threads or "as many as torch uses")),
            ("workload", workload.name),
            ("tuning prompts", f"{workload.num_tune_prompts}, SHA-256 {workload.tune_sha256}"),
            ("held-out prompts", f"{workload.num_evaluate_prompts}, SHA-256 {workload.evaluate_sha256}"),
        ]
    if study is not None:
        found.append(("search space", study.space))
    stamps = {"profile": profile, "cost table": table, "study": study}
    for name, document in stamps.items():
        if document is not None:
            made = document.provenance
            said = f"autotune {made.autotune}, {made.created}, Python {made.python}, torch {made.torch}, transformers {made.transformers}"
            found.append((f"{name} made by", said))
    if table is not None:
        found.append(("cost table", f"{table.num_samples:,} steps timed; content {table.content}"))
    return found
