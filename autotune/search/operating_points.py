"""Proposes operating points from replay: conditions under which another candidate than the winner is faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.documents.condition import Condition
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.point_selection import (
    by_context_tokens,
    by_image,
    by_prompt_tokens,
    by_temperature,
    by_workload,
    choose_points,
    context_boundaries,
)
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


def propose_points(
    candidates: Sequence[Candidate], evaluator: Evaluator, tune: Workload, *, seed: int
) -> list[tuple[Condition, Candidate]]:
    """Conditions under which another candidate is predicted to be faster than the first one, which comes last.

    A request is switched by context length only between candidates with the first one's draft and visual tokens.

    Args:
        tune: the recorded prompts.
    """
    configurations = [candidate.configuration for candidate in candidates]
    common, trace = configurations[0], next(iter(evaluator.traces.values()))
    boundaries = context_boundaries(trace.prompt_length, np.diff(trace.answer_start) - 1)
    points = choose_points(
        evaluator.prompt_ms(configurations),
        [
            by_workload(evaluator.tasks),
            by_temperature([prompt.settings.temperature or 0.0 for prompt in tune.prompts]),
            by_image(trace.num_visual_tokens > 0),
            *by_prompt_tokens(trace.prompt_length),
            *by_context_tokens(
                boundaries,
                evaluator.band_ms(configurations, boundaries),
                np.array([(one.draft, one.subnet) == (common.draft, common.subnet) for one in configurations]),
            ),
        ],
        common=0,
        seed=seed,
    )
    return [(point.condition, candidates[point.configuration]) for point in points]


def prompts_of(condition: Condition, evaluator: Evaluator, tune: Workload) -> tuple[WorkloadPrompt, ...]:
    """The recorded prompts that meet a condition, at some context length of their answers."""
    trace, contexts = next(iter(evaluator.traces.values())), condition.context_tokens
    found = []
    for p, (prompt, num_tokens) in enumerate(zip(tune.prompts, np.diff(trace.answer_start).tolist(), strict=True)):
        length = int(trace.prompt_length[p])
        meets = condition.of_request.matches(
            temperature=prompt.settings.temperature or 0.0,
            prompt_tokens=length,
            has_image=bool(trace.num_visual_tokens[p] > 0),
            workload=prompt.settings.task,
        )
        if meets and (contexts is None or contexts.overlaps(range(length, length + max(1, num_tokens - 1)))):
            found.append(prompt)
    return tuple(found)
