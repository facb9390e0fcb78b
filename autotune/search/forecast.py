"""The forecast of a search (``autotune search --plan``): what would be tried, in which time and memory. No weights are
loaded but those of EAGLE-3 heads, whose sizes stand nowhere else.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from statistics import fmean

from autotune.console import Console
from autotune.machine.device import free_memory, gib
from autotune.measuring.bandwidth import copy_gb_per_second
from autotune.modeling.target import Target
from autotune.search.plan import Plan, Rates, SearchSize, make_plan, size_of
from autotune.search.thresholds import STAGES
from autotune.search.tuning import UNTIMED_STAGES, Tuning
from autotune.study.search_settings import SearchSettings

LAYER_S = 1e-4  # of a layer's kernel launches
READ_TOKENS = 16  # of a prompt, which take as long as a plain step


def forecast(settings: SearchSettings, console: Console) -> list[str]:
    """The lines of ``autotune search --plan``.

    Raises:
        UserError: the models, prompts or space of the settings cannot be searched.
    """
    tuning = Tuning.load(settings, console, sizes_alone=True)
    pool, size, device = tuning.pool, size_of(tuning), tuning.pool.device_name
    num_tokens = [prompt.most_tokens(pool.processor) for prompt in tuning.tune.prompts]
    num_read = fmean(num_tokens) - fmean(size.answer_tokens)
    sizes = {"target": pool.target_bytes, "drafts": pool.draft_bytes}
    shapes = [pool.target.shape, *(pool.draft(name).shape for name in pool.references)]
    sizes[f"caches of {max(num_tokens)} tokens"] = max(num_tokens) * sum(shape.kv_bytes_per_token for shape in shapes)
    total = size.num_processes * sum(sizes.values())
    plan = make_plan(
        size, estimated_rates(pool.target, num_read, copy_gb_per_second(device)), seconds=settings.budget_s
    )
    lines = [
        f"target: {settings.target}",
        *(
            f"draft: {name}, {number} {'choice' if number == 1 else 'choices'} of it"
            for name, number in Counter(name for name, _ in tuning.variants).items()
        ),
        f"space: {tuning.space.name}, with the policies {', '.join(tuning.space.trees)}",
        f"tried: {size.num_variants} choices of drafts, of which {size.num_survivors} get a search of their trees",
        f"prompts: {settings.workload}, {len(tuning.tune.prompts)} to tune and {len(tuning.held_out.prompts)} to judge",
        f"memory on {device}: {', '.join(f'{name} {gib(number)}' for name, number in sizes.items())}",
        f"memory in all: {gib(total)} in {size.num_processes} process{'es' * (size.num_processes > 1)}; "
        f"{gib(free_memory(device))} are free",
        "time, by a rough estimate from the models' sizes and the memory's bandwidth:",
        *(f"  {stage}: {seconds:.0f} s" for stage, seconds in stage_seconds(plan, size).items()),
        *plan.describe(size).split("\n"),
        "nothing was started; leave --plan out to search",
    ]
    return [part for line in lines for part in textwrap.wrap(line, 80, break_on_hyphens=False, break_long_words=False)]


def estimated_rates(target: Target, num_read: float, gb_per_second: float) -> Rates:
    """Times of plain decoding after ``num_read`` tokens if a step reads all weights at this bandwidth, and launches the
    kernels of all layers.
    """
    shape = target.shape
    step_s = shape.text_parameters * shape.bytes_per_parameter / (1e9 * gb_per_second) + shape.num_layers * LAYER_S
    return Rates(prefill_s=step_s * (1 + num_read / READ_TOKENS), step_s=step_s)


def stage_seconds(plan: Plan, size: SearchSize) -> Mapping[str, float]:
    """The time of every stage: what is kept for it, and its share of the rest."""
    stages = [stage for stage in STAGES if size.is_measured or stage in UNTIMED_STAGES]
    shares = {stage: STAGES[stage] for stage in stages} | {"screening": plan.screening_share}
    free_s = max(0.0, plan.seconds - sum(plan.kept_s.values()))
    return {
        stage: plan.kept_s.get(stage, 0.0) + free_s * share / sum(shares.values()) for stage, share in shares.items()
    }
