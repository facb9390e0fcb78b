"""The forecast of a search (``autotune search --plan``): what would be tried, in which time and memory. No weights are
loaded but those of EAGLE-3 heads, whose sizes stand nowhere else.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from functools import partial
from statistics import fmean

from autotune.device import choose_device, free_memory, gib, usable_threads
from autotune.documents.draft_kinds import TOKEN_DRAFTS, is_eagle3
from autotune.drafters.checkpoint import LoadedDraft, load_draft, read_config
from autotune.measuring.bandwidth import copy_gb_per_second
from autotune.modeling.loading import META, MTP_SUFFIX, load_model
from autotune.modeling.quantization import weight_bytes
from autotune.modeling.target import Target
from autotune.search.cost_tables import priced_variants
from autotune.search.model_pool import variants_of, workers_for
from autotune.search.plan import UNTIMED_STAGES, Plan, Rates, SearchSize, make_plan
from autotune.search.settings import SearchSettings, device_for
from autotune.search.space import load_space
from autotune.search.thresholds import STAGES
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload

LAYER_S = 1e-4  # of a layer's kernel launches
READ_TOKENS = 16  # of a prompt, which take as long as a plain step
TOKEN_CHARACTERS = 4
IMAGE_TOKENS = 600


def forecast(settings: SearchSettings) -> list[str]:
    """The lines of ``autotune search --plan``.

    Raises:
        UserError: the models, prompts or space of the settings cannot be searched.
    """
    read = partial(load_workload, settings.workload, format=settings.workload_format)
    tune = read("tune", num_prompts=settings.num_tune_prompts)
    evaluate = read("evaluate", num_prompts=settings.num_evaluate_prompts)
    tune = tune.cut(len(tune.prompts), settings.max_new_tokens)
    is_measured = device_for(settings.gpu, settings.device) is not None
    device = choose_device(settings.device)
    target = Target(load_model(settings.target, device=META, dtype=settings.dtype, random_weights=True))
    drafts = {name: _without_weights(name, target) for name in settings.drafts}
    space = load_space(settings.space, settings.changes)
    if not any(prompt.pixels for prompt in (*tune.prompts, *evaluate.prompts)):
        space = space.without_images()
    if target.has_states or any(draft.has_states for draft in drafts.values()):
        space = space.chains()
    variants = variants_of(space, drafts)
    sizes = {"target": weight_bytes(target.model), "drafts": sum(draft.weight_bytes for draft in drafts.values())}
    is_cpu = not device.startswith("cuda")
    num_processes = 1 + (workers_for(settings.jobs or usable_threads(), sum(sizes.values())) if is_cpu else 0)
    size = SearchSize(
        num_priced=len(priced_variants(variants)),
        num_variants=len(variants),
        num_survivors=min(len(variants), max(space.survivors, len(drafts))),
        num_drafts=len(drafts),
        answer_tokens=[prompt.settings.max_new_tokens for prompt in tune.prompts],
        num_evaluate_prompts=len(evaluate.prompts),
        num_processes=num_processes,
        is_measured=is_measured,
    )
    of_drafts = Counter(name for name, _ in variants)
    longest = round(max(map(_prompt_tokens, tune.prompts))) + max(size.answer_tokens)
    shapes = [target.shape, *(draft.shape for draft in drafts.values())]
    sizes[f"caches of {longest} tokens"] = longest * sum(shape.kv_bytes_per_token for shape in shapes)
    free = free_memory(device)
    total = num_processes * sum(sizes.values())
    rates = estimated_rates(target, tune, copy_gb_per_second(device))
    plan = make_plan(size, rates, seconds=settings.budget_s)
    return [
        f"target: {settings.target}",
        *(
            f"draft: {name}, {number} {'choice' if number == 1 else 'choices'} of it"
            for name, number in of_drafts.items()
        ),
        f"space: {space.name}, with the policies {', '.join(space.trees)}",
        f"tried: {size.num_variants} choices of drafts, of which {size.num_survivors} keep their trees",
        f"prompts: {settings.workload}, {len(tune.prompts)} to tune and {len(evaluate.prompts)} to judge",
        f"memory on {device}: {', '.join(f'{name} {gib(number)}' for name, number in sizes.items())}",
        f"memory in all: {gib(total)} in {num_processes} process{'es' * (num_processes > 1)}; {gib(free)} are free",
        "time, by a rough estimate from the sizes of the models and the memory's bandwidth:",
        *(f"  {stage}: {seconds:.0f} s" for stage, seconds in stage_seconds(plan, size).items()),
        *(line for text in plan.describe(size).splitlines() for line in textwrap.wrap(text, 80)),
        "nothing was started; leave --plan out to search",
    ]


def _without_weights(name: str, target: Target) -> LoadedDraft:
    """A draft with sizes alone."""
    has_config = name not in TOKEN_DRAFTS and not name.endswith(MTP_SUFFIX)
    read = read_config(name, random_weights=True) if has_config else None
    return load_draft(name, target, random_weights=read is None or not is_eagle3(read[1]))


def _prompt_tokens(prompt: WorkloadPrompt) -> float:
    return len(prompt.settings.prompt) / TOKEN_CHARACTERS + IMAGE_TOKENS * len(prompt.pixels)


def estimated_rates(target: Target, workload: Workload, gb_per_second: float) -> Rates:
    """Times of plain decoding if a step reads all weights at this bandwidth, and launches the kernels of all layers."""
    shape = target.shape
    step_s = shape.text_parameters * shape.bytes_per_parameter / (1e9 * gb_per_second) + shape.num_layers * LAYER_S
    return Rates(prefill_s=step_s * (1 + fmean(map(_prompt_tokens, workload.prompts)) / READ_TOKENS), step_s=step_s)


def stage_seconds(plan: Plan, size: SearchSize) -> Mapping[str, float]:
    """The time of every stage: what is kept for it, and its share of the rest."""
    stages = [stage for stage in STAGES if size.is_measured or stage in UNTIMED_STAGES]
    shares = {stage: STAGES[stage] for stage in stages} | {"screening": plan.screening_share}
    free_s = max(0.0, plan.seconds - sum(plan.kept_s.values()))
    return {
        stage: plan.kept_s.get(stage, 0.0) + free_s * share / sum(shares.values()) for stage, share in shares.items()
    }
