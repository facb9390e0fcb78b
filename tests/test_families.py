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
import transformers as hf

from tests import families
from tests.families import FAMILIES, Family, Inputs, Prompt, encode, random_batch, random_prompts

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


@torch.no_grad()
def test_draft_agrees_often(made: Made) -> None:
    agreed = []
    for one in made.all_generated:
        tokens = torch.tensor([one.tokens])
        drafted = made.draft(**_with_tokens(one.inputs, tokens[:, :-1])).logits[0, -len(one.tokens) :].argmax(-1)
        agreed += (drafted == tokens[0]).tolist()
    assert 0.4 < np.mean(agreed) < 0.8
    assert made.draft.config.get_text_config().vocab_size == made.target.config.get_text_config().vocab_size
    assert len(made.draft.get_decoder().layers) < len(made.target.get_decoder().layers)


def _with_tokens(inputs: Inputs, tokens: torch.Tensor) -> Inputs:
    """The prompt with more text tokens."""
    added = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    added |= {name: torch.zeros_like(tokens) for name in ("token_type_ids", "mm_token_type_ids") if name in inputs}
    return {**inputs, **{name: torch.cat([inputs[name], more], dim=1) for name, more in added.items()}}


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
            assert (result.logits[0][0] - one.logits[0]).std() > families.LOGITS / 8
            num_same += result.sequences[0, inputs["input_ids"].shape[1] :].tolist() == one.tokens
        assert num_same <= 1  # a short output may be the same by chance


@torch.no_grad()
def test_visual_features_are_as_large_as_embeddings(made: Made) -> None:
    for one in made.generated.get("image", []):
        features = families.visual_features(made.target, one.inputs)
        assert 0.5 < features.std() / families.EMBEDDING < 2


def test_padded_rows_generate_as_alone(made: Made) -> None:
    """Otherwise a padded batch would be no reference."""
    for rows in zip(*made.generated.values(), strict=True):  # one of each kind
        batch = encode(made.processor, [row.prompt for row in (*rows, made.generated[None][0])])
        outputs = generate(made.target, batch)[:, batch["input_ids"].shape[1] :].tolist()
        for row, output in zip(rows, outputs, strict=False):
            assert output[: len(row.tokens)] == row.tokens


def test_padding_side(made: Made) -> None:
    left, right = (
        random_batch(
            made.family,
            made.processor,
            np.random.default_rng(3),
            sights=[None, None, *made.family.sees],
            padding_side=side,
        )
        for side in ("left", "right")
    )
    assert left["attention_mask"][:, -1].all() and right["attention_mask"][:, 0].all()
    assert not left["attention_mask"].all()
    assert torch.equal(left["attention_mask"].sum(1), right["attention_mask"].sum(1))


def test_list_covers_the_variants() -> None:
    configs = {name: family.model(2).config for name, family in FAMILIES.items()}
    texts = {name: config.get_text_config() for name, config in configs.items()}
    layers = [text.per_layer_config[1] for text in texts.values()]
    grouped = [layer.num_key_value_heads < layer.num_attention_heads for layer in layers]
    assert sum(grouped) > len(grouped) / 2 and not all(grouped)
    for models in (set(FAMILIES) - set(_seeing()), _seeing()):
        assert {configs[name].tie_word_embeddings for name in models} == {True, False}
    types = {name: set(getattr(text, "layer_types", None) or ()) for name, text in texts.items()}
    both = {"full_attention", "sliding_attention"}
    assert {name for name, kinds in types.items() if kinds == both} == {
        "qwen2_window",
        *(name for name in FAMILIES if name.startswith("gemma")),
    }
    assert texts["mistral_window"].sliding_window == families.WINDOW and texts["mistral"].sliding_window is None


def _seeing() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.sees]


@pytest.mark.parametrize("name", [name for name in _seeing() if "video" in FAMILIES[name].sees])
def test_frames_are_those_of_the_real_video_processor(name: str) -> None:
    """``VideoFrames`` replaces a class that needs torchvision."""
    pytest.importorskip("torchvision")
    processor = FAMILIES[name].processor()
    images, metadata = processor.image_processor, {"total_num_frames": 3, "fps": 2.0, "frames_indices": [0, 1, 2]}
    normal = {"image_mean": images.image_mean, "image_std": images.image_std}
    real: Any
    if name == "llava_onevision":
        real = hf.LlavaOnevisionVideoProcessor(size={"height": families.SIDE, "width": families.SIDE}, **normal)
    else:
        size = {"shortest_edge": 1, "longest_edge": 10**6}
        kind = hf.Qwen3VLVideoProcessor if name.startswith("qwen3") else hf.Qwen2VLVideoProcessor
        real = kind(size=size, patch_size=images.patch_size, do_sample_frames=False, **normal)
    video = np.random.default_rng(0).integers(0, 256, (3, families.SIDE, families.SIDE, 3), np.uint8)
    expected = real([video], video_metadata=[metadata], return_tensors="pt")
    made = processor.video_processor([video], video_metadata=[metadata])
    for key, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(made[key]), value)
