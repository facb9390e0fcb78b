"""Runs a whole default search on a simulated GPU, and compares its winner with random configurations there.

The device is rehearsed on the CPU and has a clock (``tests/simulated_device.py``): the tiny text pair of the tests
takes the time of Llama-3.1-8B and Llama-3.2-1B in bfloat16, and proposes and accepts what it does anyway. The plan, the
shares of the stages and the number of prompts that decide are those of a search on such a machine. Prints the search's
own output, then stages, prompts, captures and regret. Takes about 16 minutes.

    PYTHONPATH=. python benchmarks/simulated_search.py [--gpu h100] [--budget 5m] [--random 200] [--decoded 6]
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from autotune.cli.options import DURATION
from autotune.console import Console
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import DecodingProfile
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import arms_of_pool
from autotune.evaluation.summary import ms_per_token
from autotune.files import read_lines
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.loading import RETRIEVAL, load_model
from autotune.replay.evaluator import Evaluator
from autotune.runtime import model_pool
from autotune.runtime.model_pool import ModelPool
from autotune.search import pipeline
from autotune.study.document import load_study
from autotune.study.search_settings import SearchSettings
from autotune.study.spaces import load_space
from autotune.study.storage import RUNS
from autotune.workloads.workload import Workload, load_workload
from benchmarks.predictions import random_configurations, random_variants
from tests.sample_documents import write_workload
from tests.simulated_device import SimulatedDevice, SimulatedSize
from tests.tiny_models import llama_pair

LLAMA_8B = SimulatedSize(num_layers=32, layer_bytes=13.96e9, head_bytes=1.05e9)
LLAMA_1B = SimulatedSize(num_layers=16, layer_bytes=1.95e9, head_bytes=0.53e9)
PROMPTS_OF_A_SPLIT, ANSWER_TOKENS = 240, 125


def write_pair(folder: Path) -> tuple[str, str]:
    """Folders of target and draft in the precision that is usual on GPUs, in which answers are not decoded in
    batches.
    """
    made = llama_pair(folder)
    for model, path in ((made.target, made.target_folder), (made.draft, made.draft_folder)):
        model.to(torch.bfloat16).save_pretrained(path)
    return str(made.target_folder), str(made.draft_folder)


def write_prompts(folder: Path) -> str:
    """A workload of rows of digits, which the target continues at random."""
    rng = random.Random(0)
    lines = [
        {
            "prompt": " ".join(
                f"Row {row} reads {rng.randrange(10)}, {rng.randrange(10)}." for row in range(1, rng.randrange(4, 24))
            ),
            "split": split,
            "max_new_tokens": ANSWER_TOKENS,
        }
        for _ in range(PROMPTS_OF_A_SPLIT)
        for split in ("tune", "evaluate")
    ]
    return str(write_workload(folder, lines))


def simulated_pool(device: SimulatedDevice, draft: str) -> type[ModelPool]:
    """A pool whose models have the simulated sizes as soon as they are loaded."""

    class SimulatedPool(ModelPool):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            text = self.target.text
            device.simulate(LLAMA_8B, text.layers, self.target.model)
            model = self.drafts[draft].standalone_model
            assert model is not None
            device.simulate(LLAMA_1B, model.model.layers, model)

    return SimulatedPool


def decoded_ms_per_token(
    pool: ModelPool, evaluator: Evaluator, c: list[Configuration], prompts: Workload
) -> list[float]:
    """Simulated time per token of each configuration, decoded in turns."""
    runtime = arms_of_pool(pool, evaluator.table)
    arms = [runtime.arm(configuration.key, configuration) for configuration in c]
    runs = race(runtime.runner(), [runtime.plain, *arms], prompts.prompts, Everyone()).runs
    return [ms_per_token(runs[arm.name]) for arm in arms]


@click.command()
@click.option("--gpu", default="h100", show_default=True, help="Device with a datasheet in profiles/devices.")
@click.option("--budget", "budget_s", type=DURATION, default="5m", show_default=True)
@click.option("--random", "num_random", default=200, show_default=True, help="Random configurations that are replayed.")
@click.option(
    "--decoded", "num_decoded", default=6, show_default=True, help="The fastest of them, which are decoded too."
)
@click.option(
    "--prompts", "num_prompts", default=6, show_default=True, help="Held-out prompts on which they are decoded."
)
def main(gpu: str, budget_s: float, num_random: int, num_decoded: int, num_prompts: int) -> None:
    """Run a default search on a simulated GPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, draft = write_pair(folder / "pair")
        load_model(target)  # what transformers does when it first loads a model is not rehearsed
        settings = SearchSettings(
            target=target,
            drafts=(draft, RETRIEVAL),
            workload=write_prompts(folder),
            budget_s=budget_s,
            folder=folder / "studies",
            output=folder / "profile.json",
        )
        simulate(settings, gpu, num_random, num_decoded, num_prompts)


def simulate(settings: SearchSettings, gpu: str, num_random: int, num_decoded: int, num_prompts: int) -> None:
    """Run a search on a simulated device, and report what it did."""
    made: list[Any] = []

    class KeptEvaluator(Evaluator):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    with SimulatedDevice(gpu) as device:
        pool_type = simulated_pool(device, settings.drafts[0])

        class KeptPool(pool_type):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                made.append((device.now_s(), self))

        model_pool.ModelPool, pipeline.Evaluator = KeptPool, KeptEvaluator  # type: ignore[misc]
        pipeline.tune_trees = device.charged(pipeline.tune_trees)
        torch.set_num_threads(1)
        profile = pipeline.search(settings, Console())
        (loaded_s, pool), evaluator = made[:2]
        report_search(profile, settings.folder, device.now_s() - loaded_s, device)
        prompts = load_workload(settings.workload, "evaluate", num_prompts=num_prompts)
        report_regret(profile, pool, evaluator, num_random, num_decoded, prompts)


def report_search(profile: DecodingProfile, folder: Path, seconds: float, device: SimulatedDevice) -> None:
    """Print what the search did."""
    (study_folder,) = (path for path in folder.iterdir() if path.is_dir())
    study = load_study(study_folder)
    assert study is not None
    memory = graph_memory(torch.device("cuda", 0))
    measured = profile.point.measured
    figures = {
        "simulated seconds": round(seconds, 1),
        "device busy": round(device.busy_s, 1),
        "stages": {name: round(value, 1) for name, value in study.stage_seconds.items()},
        "finalists": [[f.num_runs, round(f.speedup, 2), f.is_eliminated] for f in study.finalists],
        "defaults": [[d.name, d.num_runs, round(d.speedup, 2), d.is_eliminated] for d in study.defaults],
        "tokens per run": token_counts(study_folder / RUNS),
        "held-out prompts and tokens": None if measured is None else [measured.num_prompts, measured.num_tokens],
        "captures": device.counts.captures,
        "limit of captures": memory.limit,
    }
    print(json.dumps(figures, indent=1))


def token_counts(path: Path) -> dict[str, float]:
    """Quantiles of the tokens of all measured runs."""
    tokens = [line["new_tokens"] for line in read_lines(path)]
    return {f"{q} %": float(np.percentile(tokens, q)) for q in (5, 50, 95)} | {"runs": len(tokens)}


def report_regret(
    profile: DecodingProfile,
    pool: ModelPool,
    evaluator: Evaluator,
    num_random: int,
    num_decoded: int,
    prompts: Workload,
) -> None:
    """Print the winner's time over the best of random configurations."""
    rng = random.Random(0)
    space = load_space("quick").without_images()
    count = -(-num_random // len(space.trees))
    pairs = [(p, v) for p, v in random_variants(space, pool, count, rng) if v in evaluator.traces]
    configurations = random_configurations(space, evaluator, pairs, rng)[:num_random]
    candidates = sorted((evaluator.evaluate(c) for c in configurations), key=lambda candidate: candidate.rank)
    winner = configuration_of(profile.point)
    assert winner is not None, "plain decoding was chosen"
    fastest = [evaluator.with_fallback(candidate).configuration for candidate in candidates[:num_decoded]]
    winner_ms, *others = decoded_ms_per_token(pool, evaluator, [winner, *fastest], prompts)
    print(
        json.dumps({"replayed": len(configurations), "winner": winner_ms, "fastest random": sorted(others)}, indent=1)
    )
    print(f"the winner takes {winner_ms / min(others):.3f} times as long as the best random configuration")


if __name__ == "__main__":
    main()
