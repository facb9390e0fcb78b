"""The decoding profile of a search: predicted for another device, or measured on this one."""

from __future__ import annotations

from autotune.documents.configuration import Configuration
from autotune.documents.contention import Contention
from autotune.documents.decoding_profile import (
    AR,
    TUNED,
    DecodingProfile,
    DraftChoice,
    Evidence,
    OperatingPoint,
    Predicted,
    WorkloadReference,
)
from autotune.documents.provenance import stamp
from autotune.recording.traces import degenerate_in
from autotune.search.evidence import Evaluation
from autotune.search.finalists import Finalists, choose_finalists, confirmable
from autotune.search.plan import Plan
from autotune.search.tree_search import TreeSearchResult
from autotune.search.tuning import Tuning
from autotune.search.tuning_prompts import TuningPrompts, speedup_interval
from autotune.trees.policy import parse_policy

EXECUTION = "precision", "capture_sizes", "mode", "attention_backends", "threads", "prefill_threads"
"""Fields of a cost table that its profiles have, too."""


def predicted_profile(tuning: Tuning, plan: Plan, prompts: TuningPrompts, trees: TreeSearchResult) -> DecodingProfile:
    """The profile for another device, which decodes plainly where no configuration is predicted to be faster."""
    (fastest,) = choose_finalists(confirmable(trees.fastest), prompts.confirming, 1)
    chosen = None
    if fastest.speedup >= 1.0:
        chosen = prompts.full.with_fallback(prompts.full.evaluate(fastest.configuration)).configuration
    evidence = Evidence(configurations_replayed=trees.num_replayed)
    return _profile(tuning, plan, prompts, _point(tuning, prompts, chosen), evidence)


def measured_profile(
    tuning: Tuning,
    plan: Plan,
    trees: TreeSearchResult,
    finalists: Finalists,
    evaluation: Evaluation,
    contention: Contention | None,
) -> DecodingProfile:
    """The profile for this device, which decodes plainly where that is faster than the winner."""
    winner, prompts = finalists.winner, finalists.prompts
    is_faster = evaluation.summaries[TUNED].speedup >= 1.0
    name = TUNED if is_faster else AR
    point = _point(tuning, prompts, winner.configuration if is_faster else None)
    evidence = Evidence(
        configurations_replayed=trees.num_replayed,
        num_deciding=winner.num_runs,
        differences=evaluation.differences if is_faster else None,
        **evaluation.evidence(name),
    )
    point = point.model_copy(update={"measured": evaluation.measured(name)})
    return _profile(tuning, plan, prompts, point, evidence, contention)


def _profile(
    tuning: Tuning,
    plan: Plan,
    prompts: TuningPrompts,
    point: OperatingPoint,
    evidence: Evidence,
    contention: Contention | None = None,
) -> DecodingProfile:
    """The profile of a search with this way to decode."""
    table, tune, settings = prompts.full.table, prompts.workload, tuning.settings
    any_trace = next(iter(prompts.full.traces.values()))
    return DecodingProfile(
        provenance=stamp(contention, tuning.settings.key),
        target=tuning.pool.target_reference,
        workload=WorkloadReference(
            name=tune.name,
            tune_sha256=tune.sha256,
            evaluate_sha256=tuning.held_out.sha256,
            num_tune_prompts=len(tune.prompts),
            num_evaluate_prompts=len(tuning.held_out.prompts),
            max_new_tokens=plan.max_new_tokens or settings.max_new_tokens,
            temperature=settings.temperature,
        ),
        chat_template_kwargs=settings.chat_template_kwargs or {},
        hardware=table.device if tuning.device is None else tuning.pool.device,
        **{name: getattr(table, name) for name in EXECUTION},
        point=point,
        evidence=evidence.model_copy(update={"degenerate": degenerate_in(any_trace, tune)}),
    )


def _point(tuning: Tuning, prompts: TuningPrompts, configuration: Configuration | None) -> OperatingPoint:
    """The operating point of a configuration, or of plain decoding, with what replay predicts for tuning prompts."""
    pool, evaluator, predicted = tuning.pool, prompts.full, None
    estimated = evaluator.table.estimated
    if configuration is None:
        ms = evaluator.ar_ms_per_token
        predicted = Predicted(speedup=1.0, ms_per_token=ms, tokens_per_round=None, estimated=estimated)
        return OperatingPoint(draft=None, tree=None, predicted=predicted, measured=None)
    if evaluator.can_replay(configuration):
        speed = evaluator.evaluate(configuration).model_dump(include={"speedup", "ms_per_token", "tokens_per_round"})
        interval90 = speedup_interval(evaluator, configuration, other_prompts=True)
        predicted = Predicted(**speed, interval90=interval90, estimated=estimated)
    known = pool.references[configuration.draft or next(iter(pool.references))]
    kind, subnet = pool.drafts[known.id].kind, configuration.subnet
    return OperatingPoint(
        draft=DraftChoice(kind=kind, id=known.id, sha256=known.sha256, subnet=subnet),
        tree=parse_policy(configuration.tree),
        fallback=configuration.fallback,
        predicted=predicted,
        measured=None,
    )
