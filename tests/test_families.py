"""The models of ``families.py`` behave like trained models; otherwise the contract tests over them would prove little.

They change only with ``families.py`` and transformers, so all but two families are tested nightly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families import FAMILIES, LOGITS, Prompt, encode, load, load_processor, random_picture, random_prompts, save

NUM_PROMPTS = 6  # of each kind
MAX_NEW_TOKENS = 24
EVERY_CHANGE = ("llama", "llava")


def answer(model: Any, processor: Any, prompt: Prompt) -> tuple[list[int], torch.Tensor]:
    """The greedy answer, and its logits [tokens, vocabulary]."""
    inputs = encode(processor, [prompt])
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    result = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **options)
    return result.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(result.logits)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in EVERY_CHANGE)) for name in FAMILIES]
)
def test_answers_are_long_varied_and_clear_and_follow_from_the_picture(name: str, tmp_path: Path) -> None:
    """Rounding errors of 1e-4 must not change the argmax, and no token may be certain."""
    family, rng, of_pictures = FAMILIES[name], np.random.default_rng(0), np.random.default_rng(1)
    save(family, tmp_path)
    model, processor = load(tmp_path / "target"), load_processor(family, tmp_path / "target")
    every_logits = []
    for sight in (None, *family.sees):
        prompts = [random_prompts(family, processor, rng, [sight])[0] for _ in range(NUM_PROMPTS)]
        outputs, logits = zip(*(answer(model, processor, prompt) for prompt in prompts), strict=True)
        every_logits += logits
        assert len(set(map(tuple, outputs))) == len(outputs)
        assert np.mean([len(output) for output in outputs]) > MAX_NEW_TOKENS / 2
        assert np.mean([len(set(output)) / len(output) for output in outputs]) > 0.4
        num_same = 0
        for prompt, output, before in zip(prompts, outputs, logits, strict=True) if sight else ():
            images = [random_picture(of_pictures, image.size) for image in prompt.images]
            videos = [(frames[::-1, ::-1].copy(), metadata) for frames, metadata in prompt.videos]
            changed, after = answer(model, processor, replace(prompt, images=images, videos=videos))
            assert (after[0] - before[0]).std() > LOGITS / 16
            num_same += changed == output
        assert num_same <= 1  # a short output may be the same by chance
    first, second = torch.cat(every_logits).topk(2).values.T
    assert (first - second < 1e-3).float().mean() < 0.02
    assert 0.15 < torch.cat(every_logits).softmax(-1).amax(-1).median() < 0.85
