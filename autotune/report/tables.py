"""Tables that a report makes from several documents of a search."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from autotune.documents.configuration import configuration_of
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.documents.subnet import Subnet
from autotune.errors import reading
from autotune.replay.evaluator import Candidate
from autotune.replay.reference_replay import count_acceptance
from autotune.report.sources import Sources
from autotune.study.records import ScreenedSubnet
from autotune.study.storage import RUNS
from autotune.table import Table, number, percent, times
from autotune.trees.acceptance_counts import AcceptanceCounts

DIMENSIONS = ("visual tokens", "heads", "injection layer", "draft")
"""Dimensions of a screened subnet, in the order in which the ablation frees them."""


def heads_label(subnet: Subnet) -> str:
    """Share of heads kept: ``75 %``, or ``100 % / 50 % / 50 %`` if the blocks differ."""
    shares = subnet.head_shares
    return " / ".join(f"{100 * share:g} %" for share in (shares[:1] if len(set(shares)) == 1 else shares))


def decoding_table(profile: DecodingProfile) -> Table:
    """How the profile decodes, with its predicted and measured speedups."""
    point, configuration = profile.point, configuration_of(profile.point)
    facts = {
        "backend": profile.backend,
        "output": "lossless: it equals the target's own, token for token"
        if point.verification.is_lossless
        else f"LOSSY, not the target's own: {point.verification.kind} verification",
    }
    if (deployment := point.deployment) is not None:
        facts |= {
            "model": deployment.model.id,
            "speculation": deployment.label,
            "command": f"{' '.join(deployment.command)} (build {deployment.build})",
        }
    elif configuration is not None and point.draft is not None:
        facts |= {
            "draft": f"{point.draft.id} ({point.draft.kind})",
            "subnet": point.draft.subnet.label or "all of it",
            "tree": configuration.tree_label,
        }
    else:
        facts["draft"] = "none: no draft was faster on this device"
    if (price := point.fallback) is not None:
        costs = f"{number(price.round_steps)}, a draft level {number(price.level_steps)}, a node {number(price.node_steps, 3)}"
        facts["fallback"] = f"plain steps, while rounds are slower; in plain steps a round costs {costs}"
    if (predicted := point.predicted) is not None:
        source = "estimated from a datasheet" if predicted.estimated else "by replay of the tuning prompts"
        facts["predicted speedup"] = f"{times(predicted.speedup)}, {source}"
    if (measured := point.measured) is not None:
        outputs = f"{measured.identical_outputs} of {measured.num_prompts} outputs equal plain decoding"
        facts["measured speedup"] = f"{times(measured.speedup)} on held-out prompts; {outputs}"
    return Table("How the profile decodes", ["", ""], [list(fact) for fact in facts.items()])


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that no other one beats in both predicted time and nodes per round, smallest trees first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.nodes_per_round, *c.rank)):
        if not front or candidate.ms_per_token < front[-1].ms_per_token:
            front.append(candidate)
    return front


def front_table(candidates: Iterable[Candidate]) -> Table:
    """The Pareto front of speed against tree size."""
    rows = [
        [
            candidate.configuration.label,
            number(candidate.nodes_per_round),
            number(candidate.ms_per_token),
            times(candidate.speedup),
            number(candidate.tokens_per_round),
        ]
        for candidate in pareto_front(candidates)
    ]
    return Table("Pareto front", ["configuration", "nodes per round", "ms per token", "speedup", "M"], rows)


def cumulative_ablation(sources: Sources) -> dict[str, ScreenedSubnet]:
    """The best screened subnet as the dimensions are freed one by one, by the dimension that was freed last, starting
    from the full draft that the user named first. Steps that add no subnet are left out.

    The defaults are all heads, the last injection layer, and the share of visual tokens of the published default of
    the draft's kind, or the largest share if that one was not screened.
    """
    kinds = {reference.id: kind for reference, kind in sources.drafts}
    screened = {s.draft for s in sources.screened}
    first = next((draft for draft in kinds if draft in screened), None)
    is_default: list[tuple[bool, ...]] = []
    for s in sources.screened:
        subnets = [other.subnet for other in sources.screened if other.draft == s.draft]
        published = PUBLISHED_DEFAULTS.get(kinds.get(s.draft, ""))
        keeps = {subnet.visual_keep for subnet in subnets}
        keep = (
            published.subnet.visual_keep
            if published is not None and published.subnet.visual_keep in keeps
            else max(keeps)
        )
        heads = max(subnet.head_shares for subnet in subnets)
        layer = max(subnet.injection_layer or 0 for subnet in subnets)
        choices = s.subnet.visual_keep == keep, s.subnet.head_shares == heads, (s.subnet.injection_layer or 0) == layer
        is_default.append((*choices, s.draft == first))
    steps: dict[str, ScreenedSubnet] = {}
    num_before = 0
    for freed, label in enumerate(["full draft", *(f"+ {dimension}" for dimension in DIMENSIONS)]):
        allowed = [s for s, defaults in zip(sources.screened, is_default, strict=True) if all(defaults[freed:])]
        if len(allowed) > num_before:
            steps[label] = min(allowed, key=lambda s: s.ms_per_token)
            num_before = len(allowed)
    return steps


def ablation_table(sources: Sources) -> Table:
    """The gain of each dimension of a subnet; without rows where none was searched."""
    rows = [
        [label, f"{s.draft} {s.subnet.label}".strip(), times(s.speedup)]
        for label, s in cumulative_ablation(sources).items()
    ]
    return Table(
        "The best chain, as the dimensions of the subnet are freed one by one",
        ["dimension", "subnet", "predicted speedup"],
        rows if len(rows) > 1 else [],
    )


def acceptance_tables(sources: Sources) -> list[Table]:
    """Accepted of offered tokens by depth and rank, replayed on tuning prompts and counted in the runs of the profile's
    evidence; none for plain decoding.

    Raises:
        UserError: a run is damaged.
    """
    profile, measured = sources.profile, AcceptanceCounts()
    if profile is None or profile.point.tree is None:
        return []
    with reading(f"{sources.folder}: a run is damaged", f"remove its line of {RUNS}"):
        for run in sources.evidence_runs:
            measured.add(AcceptanceCounts.from_json(run["acceptance_counts"]))
    prompts = range(0 if sources.trace is None else sources.trace.num_prompts)
    replayed = count_acceptance(itertools.chain.from_iterable(map(sources.rounds_of, prompts)))
    tables = []
    for kind, both in (
        ("depth", (replayed.by_depth[1:], measured.by_depth[1:])),
        ("rank", (replayed.by_rank, measured.by_rank)),
    ):
        rows = [
            [
                str(place),
                *(
                    f"{accepted} of {offered} ({percent(accepted / offered, 0)})" if offered else "-"
                    for offered, accepted in row
                ),
            ]
            for place, row in enumerate(zip(*both, strict=True), start=1)
            if any(offered for offered, _ in row)
        ]
        tables.append(
            Table(
                f"Accepted of offered tokens by {kind}",
                [
                    kind,
                    f"replayed, {len(prompts)} tuning prompts",
                    f"measured, {len(sources.evidence_runs)} held-out prompts",
                ],
                rows,
            )
        )
    return tables


def subnet_tables(screened: Iterable[ScreenedSubnet]) -> list[Table]:
    """For each draft and injection layer: the predicted speedup of the best chain by heads and visual tokens, each by
    the fastest ranking of visual tokens.
    """
    ordered = sorted(
        screened, key=lambda s: (s.draft, s.subnet.injection_layer or 0, [-h for h in s.subnet.head_shares])
    )
    keeps = sorted({s.subnet.visual_keep for s in ordered})
    tables = []
    for (draft, layer), group in itertools.groupby(ordered, key=lambda s: (s.draft, s.subnet.injection_layer)):
        speedups: dict[str, dict[float, float]] = {}
        for s in group:
            of_heads = speedups.setdefault(heads_label(s.subnet), {})
            of_heads[s.subnet.visual_keep] = max(s.speedup, of_heads.get(s.subnet.visual_keep, 0.0))
        rows = [[heads, *(times(of_heads.get(keep)) for keep in keeps)] for heads, of_heads in speedups.items()]
        tables.append(
            Table(
                draft if layer is None else f"{draft}, layer {layer} of the target",
                ["heads", *(f"{percent(keep, 0)} of visual tokens" for keep in keeps)],
                rows,
            )
        )
    return tables


def provenance_tables(sources: Sources) -> list[Table]:
    """The models, and the device, prompts and versions of all figures."""
    profile, study, prices = sources.profile, sources.study, sources.table
    models = [[reference.id, f"draft, {kind}", reference.sha256 or "none"] for reference, kind in sources.drafts]
    facts: dict[str, str] = {}
    if target := sources.target:
        models.insert(0, [target.id, "target", target.sha256 or "none"])
    if device := sources.hardware:
        facts |= {
            "device": f"{device.model} ({device.kind}), {device.num_cores or 'unknown'} cores",
            "memory, driver": f"{device.memory_bytes / 2**30:.1f} GiB, {device.driver or '-'}",
            "fingerprint": device.key,
        }
    if profile:
        workload, sizes = profile.workload, ", ".join(map(str, profile.capture_sizes))
        facts |= {
            "precision, mode, capture sizes": f"{profile.precision}, {profile.mode}, {sizes or 'none'}",
            "CPU threads per step": str(profile.threads or "torch's default"),
            "workload": workload.name,
            "tuning prompts": f"{workload.num_tune_prompts}, SHA-256 {workload.tune_sha256}",
            "held-out prompts": f"{workload.num_evaluate_prompts}, SHA-256 {workload.evaluate_sha256}",
        }
    if study:
        seconds = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in study.stage_seconds.items())
        facts |= {"search space": study.space, "times of stages": seconds}
    if prices:
        facts["cost table"] = f"{prices.num_samples:,} timed steps; content hash {prices.content_hash}"
    for name, document in (("profile", profile), ("cost table", prices), ("study", study)):
        if document is not None:
            made = document.provenance
            versions = f"Python {made.python}, torch {made.torch}, transformers {made.transformers}"
            facts[f"{name} written by"] = f"autotune {made.autotune}, {made.created}, {versions}"
    return [
        Table("Models", ["model", "role", "SHA-256 of weights and config"], models),
        Table("Device, workload and versions", ["", ""], [list(fact) for fact in facts.items()]),
    ]
