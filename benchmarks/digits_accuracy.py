"""How well a model of the bundled pair answers on held-out scans: the share of right numbers, task by task, free-running.

python benchmarks/digits_accuracy.py [--model digits/target] [--prompts 200]
"""

from __future__ import annotations

import re

import click
import torch

from autotune.digits import TASKS, make_example
from autotune.models import BUNDLED_TARGET, load_model, load_processor
from autotune.runtime.decoder import Decoder
from autotune.workload import Prompt, WorkloadPrompt

NUMBERS = re.compile(r"\d+|nowhere|[a-f](?=\d)")


def share_right(answer: str, reference: str) -> tuple[int, int]:
    """Numbers at the same place in both texts that are equal, of the reference's numbers."""
    expected, found = NUMBERS.findall(reference), NUMBERS.findall(answer)
    return sum(a == b for a, b in zip(expected, found, strict=False)), len(expected)


@click.command()
@click.option("--model", default=BUNDLED_TARGET, show_default=True)
@click.option("--prompts", default=40, show_default=True, help="Prompts of each task.")
def main(model: str, prompts: int) -> None:
    from PIL import Image

    decoder, processor = Decoder(load_model(model)), load_processor(model)
    with torch.inference_mode():
        for task in TASKS:
            if task in ("describe", "continue"):
                continue  # no one right answer
            right = total = 0
            for index in range(prompts):
                example = make_example("held-out", task, 200_000 + index)
                assert example.image is not None
                prompt = WorkloadPrompt(task, Prompt(prompt=example.prompt), (Image.fromarray(example.image),))
                output = decoder.generate(**prompt.inputs(processor), max_new_tokens=250)
                text = processor.decode(output.sequences[0, output.stats.prompt_tokens :], skip_special_tokens=True)
                if task == "read":  # digits only: not the sizes and row numbers around them
                    rows = re.compile(r"reads ([\d, ]+)\.")
                    text, reference = (" ".join(rows.findall(t)) for t in (text, example.answer))
                else:
                    reference = example.answer
                found, expected = share_right(text, reference)
                right, total = right + found, total + expected
            print(f"{task:10} {100 * right / total:6.2f} % of {total} numbers", flush=True)


if __name__ == "__main__":
    main()
