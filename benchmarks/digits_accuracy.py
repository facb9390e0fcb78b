"""Measures the accuracy of a model of the bundled pair on held-out scans: the share of right numbers in its answers, by
task.

Takes about 5 minutes.

    python benchmarks/digits_accuracy.py [--model digits/target] [--prompts 200]
"""

from __future__ import annotations

import re

import click
import torch

from autotune.modeling.loading import BUNDLED_TARGET, load_model, load_processor
from autotune.runtime.decoder import Decoder
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from drafts.digits.make.digits import TASKS, make_example


def claims(task: str, text: str) -> list[tuple[object, ...]]:
    """The numbers of a text with their positions, so that one wrong number does not shift the others."""
    if task == "read":
        rows = re.findall(r"Row (\d) reads ([\d, ]+)\.", text)
        return [(row, variant, digit) for row, digits in rows for variant, digit in enumerate(digits.split(", "))]
    if task == "count":
        parts = re.findall(r"Digit (\d) is (?:at ([a-f\d, ]+)|nowhere): (\d+)", text)
        variants = [(digit, variant) for digit, listed, _ in parts for variant in listed.split(", ") if variant]
        return [*variants, *((digit, "times", count) for digit, _, count in parts)]
    sentences = [re.findall(r"\d+", sentence) for sentence in text.split(".")]
    return [(number, variant, value) for number, values in enumerate(sentences) for variant, value in enumerate(values)]


@click.command()
@click.option("--model", default=BUNDLED_TARGET, show_default=True)
@click.option("--prompts", default=40, show_default=True, help="Prompts of each task.")
def main(model: str, prompts: int) -> None:
    from PIL import Image

    decoder, processor = Decoder(load_model(model)), load_processor(model)
    with torch.inference_mode():
        for task in TASKS:
            if task in ("describe", "continue"):
                continue  # several answers are right
            right = total = 0
            for index in range(prompts):
                example = make_example("held-out", task, 200_000 + index)
                assert example.image is not None
                prompt = WorkloadPrompt(task, Prompt(prompt=example.prompt), (Image.fromarray(example.image),))
                output = decoder.generate(**prompt.inputs(processor), max_new_tokens=250)
                text = processor.decode(output.sequences[0, output.stats.prompt_tokens :], skip_special_tokens=True)
                expected = claims(task, example.answer)
                right, total = right + len(set(expected) & set(claims(task, text))), total + len(expected)
            print(f"{task:10} {100 * right / total:6.2f} % of {total} numbers", flush=True)


if __name__ == "__main__":
    main()
