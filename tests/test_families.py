"""The models of ``families.py`` behave like trained models; otherwise the contract tests over them would prove little.

They change only with ``families.py`` and transformers, so all but two families are tested nightly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests import families
from tests.families import FAMILIES, Family, Inputs, Prompt, encode, random_prompts

NUM_PROMPTS = 6  # of each kind
MAX_NEW_TOKENS = 24


@dataclass(frozen=True, repr=False)
class Generated:
    """``logits``: [tokens, vocabulary]."""

    prompt: Prompt
    inputs: Inputs
    tokens: list[int]
    logits: torch.Tensor


@dataclass(frozen=True, repr=False)
class Made:
    """A family loaded from disk, with its target's answers to random prompts of each kind."""

    family: Family
    target: Any
    draft: Any
    processor: Any
    generated: dict[str | None, list[Generated]] = field(default_factory=dict)

    @property
    def all_generated(self) -> list[Generated]:
        return list(itertools.chain(*self.generated.values()))


EVERY_CHANGE = ("llama", "llava")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, id=name, marks=[] if name in EVERY_CHANGE else pytest.mark.nightly)
        for name, family in FAMILIES.items()
    ],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family, folder = request.param, tmp_path_factory.mktemp(request.param.name)
    families.save(family, folder)
    target, draft = families.load(folder / "target"), families.load(folder / "draft")
    made = Made(family, target, draft, families.load_processor(family, folder / "target"))
    rng = np.random.default_rng(0)
    for sight in (None, *family.sees):
        made.generated[sight] = []
        for _ in range(NUM_PROMPTS):
            [prompt] = random_prompts(family, made.processor, rng, [sight])
            inputs = encode(made.processor, [prompt])
            result = generate(target, inputs, output_logits=True, return_dict_in_generate=True)
            tokens = result.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            made.generated[sight].append(Generated(prompt, inputs, tokens, torch.cat(result.logits)))
    return made


def generate(model: Any, inputs: Inputs, **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, **options)


def test_outputs_are_long_and_varied(made: Made) -> None:
    for generated in made.generated.values():
        outputs = [one.tokens for one in generated]
        assert len(set(map(tuple, outputs))) == len(outputs)
        assert np.mean([len(output) for output in outputs]) > MAX_NEW_TOKENS / 2
        assert np.mean([len(set(output)) / len(output) for output in outputs]) > 0.4


def test_choices_are_clear(made: Made) -> None:
    """Rounding errors of 1e-4 must not change the argmax, and no token may be certain."""
    logits = torch.cat([one.logits for one in made.all_generated])
    first, second = logits.topk(2).values.T
    assert (first - second < 1e-3).float().mean() < 0.02
    assert 0.15 < logits.softmax(-1).amax(-1).median() < 0.85


def test_other_pictures_give_other_outputs(made: Made) -> None:
    rng = np.random.default_rng(1)
    for sight in made.family.sees:
        num_same = 0
        for one in made.generated[sight]:
            images = [families.random_picture(rng, image.size) for image in one.prompt.images]
            videos = [(frames[::-1, ::-1].copy(), metadata) for frames, metadata in one.prompt.videos]
            inputs = encode(made.processor, [replace(one.prompt, images=images, videos=videos)])
            assert torch.equal(inputs["input_ids"], one.inputs["input_ids"])
            result = generate(made.target, inputs, output_logits=True, return_dict_in_generate=True)
            assert (result.logits[0][0] - one.logits[0]).std() > families.LOGITS / 16
            num_same += result.sequences[0, inputs["input_ids"].shape[1] :].tolist() == one.tokens
        assert num_same <= 1  # a short output may be the same by chance
