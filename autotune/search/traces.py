"""The stage that records traces: of every draft variant that the search continues with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autotune.documents.configuration import DraftVariant, variants_json
from autotune.recording.traces import agreement_table, record_traces
from autotune.replay.trace import Trace
from autotune.search import thresholds
from autotune.search.plan import Plan
from autotune.search.tuning import Tuning


def record(tuning: Tuning, plan: Plan, variants: Sequence[DraftVariant]) -> list[Trace]:
    """Traces of the variants on the tuning prompts that are recorded in time, which become those of the search."""
    again = partial(
        record_traces,
        tuning.pool,
        variants,
        folder=tuning.folder,
        console=tuning.console,
        bounds=tuning.bounds,
        jobs=tuning.settings.jobs,
    )
    longest_s = plan.rates.answer_s(max(prompt.settings.max_new_tokens for prompt in tuning.tune.prompts))
    traces = again(
        workload=tuning.tune,
        answer_s=longest_s,
        deadline=tuning.clock.deadline_of("traces"),
        answers_share=thresholds.ANSWERS_SHARE,
        limit=tuning.clock.limit_of("traces"),
        num_least=thresholds.MIN_TRACED_PROMPTS,
    )
    documents = [variants_json(variants), tuning.tune_key, tuning.bounds.model_dump()]
    num_prompts = tuning.decided("num_prompts", documents, lambda: traces[0].num_prompts)
    tuning.tune = tuning.tune.cut(num_prompts)
    if traces[0].num_prompts != num_prompts:  # another worker or run had time for more or fewer
        traces = again(workload=tuning.tune)
    tuning.console.show(agreement_table(traces))
    return traces
