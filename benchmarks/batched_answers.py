"""How fast a target writes answers to train on: 64 at a time, beside transformers' ``generate`` with as many padded
rows. Takes about 3 minutes.

    python benchmarks/batched_answers.py [--target smollm2] [--tokens 64] [--passes 3]
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import click
import torch

from autotune.modeling.loading import load_model, load_processor
from autotune.modeling.target import Target
from autotune.modeling.target_defaults import default_workload
from autotune.recording.answers import AnswerRecorder
from autotune.training.examples import ROWS
from autotune.workloads.workload import load_workload


@click.command()
@click.option("--target", default="smollm2", show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Of every answer.")
@click.option("--passes", default=3, show_default=True, help="Over both, in turns.")
def main(target: str, tokens: int, passes: int) -> None:
    model, processor = load_model(target), load_processor(target)
    recorder = AnswerRecorder(Target(model), processor)
    prompts = [
        prompt for split in ("tune", "evaluate") for prompt in load_workload(default_workload(target), split).prompts
    ][:ROWS]
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    rows = [prompt.inputs(processor)["input_ids"][0] for prompt in prompts]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": tokens, "temperature": temperature}
        asked = [
            replace(p, settings=p.settings.model_copy(update={**options, "seed": n})) for n, p in enumerate(prompts)
        ]
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        seconds: dict[str, list[float]] = {"autotune": [], "transformers": []}
        for _ in range(passes):
            began = time.perf_counter()
            recorder.write_together(asked, min_new_tokens=tokens)
            seconds["autotune"].append(time.perf_counter() - began)
            began = time.perf_counter()
            with torch.inference_mode():
                model.generate(**padded, max_new_tokens=tokens, min_new_tokens=tokens, top_k=0, **sampling)
            seconds["transformers"].append(time.perf_counter() - began)
        ratios = sorted(b / a for a, b in zip(*seconds.values(), strict=True))
        rates = ", ".join(
            f"{name} {len(rows) * tokens / median(times):,.0f} tokens/s" for name, times in seconds.items()
        )
        print(f"temperature {temperature:g}: {rates}, ratio {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
