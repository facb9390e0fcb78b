"""A file of answered prompts, for ``autotune train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from autotune.files import write_bytes
from autotune.modeling.loading import BUNDLED_TARGET, load_processor
from drafts.digits.make.batches import TASK_SHARES
from drafts.digits.make.digits import PASSAGE_TOKENS, Split, make_example

FIRST_EXAMPLE = 10_000_000_000  # the target and its independent draft are trained on examples before it


def write_examples(folder: Path, num_train: int, num_held_out: int) -> Path:
    """Write ``examples.jsonl`` and its images into a folder; returns the file."""
    tokenizer = load_processor(BUNDLED_TARGET).tokenizer
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = [_line(folder, "train", number, tokenizer) for number in range(num_train)]
    lines += [_line(folder, "held-out", number, tokenizer) for number in range(num_held_out)]
    write_bytes(folder / "examples.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    return folder / "examples.jsonl"


def _line(folder: Path, split: Split, number: int, tokenizer: Any) -> dict[str, Any]:
    shares = np.array([*TASK_SHARES.values()])
    task = np.random.default_rng([number, split == "train"]).choice([*TASK_SHARES], p=shares / shares.sum())
    example = make_example(split, str(task), FIRST_EXAMPLE + number)
    answer = f" {example.answer}"
    if task == "continue":  # a passage has no end
        answer = tokenizer.decode(tokenizer(answer, add_special_tokens=False).input_ids[:PASSAGE_TOKENS])
    images = []
    if example.image is not None:
        images = [f"images/{split}-{number}.png"]
        Image.fromarray(example.image[:, :, 0]).save(folder / images[0])
    of_split = "train" if split == "train" else "evaluate"
    return {"prompt": example.prompt, "images": images, "task": example.task, "split": of_split, "answer": answer}
