"""The contract of every model family: decoding equals the stock transformers model, on tiny random models of the real
classes (``tests/families.py``).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import NETWORKS
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.evaluation.divergence import first_divergence
from autotune.modeling import tree_model
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.recording.recorder import Answer, record_forest
from autotune.replay.replay import replay
from autotune.replay.trace import ForestBounds, join
from autotune.runtime.answer_batch import GreedyBatch, can_batch
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.trees.tree import ROOT, write_tree_mask
from tests.families import (
    FAMILIES,
    VISUAL_TOKENS,
    Family,
    encode,
    load,
    load_processor,
    params_of,
    random_inputs,
    random_prompts,
    save,
)
from tests.obvious import ancestors_of, assert_same_logits, leaves_of, random_tree, tokens_to
from tests.sample_documents import free_prices, header

NEW_TOKENS = 8
NUM_SPECIAL_TOKENS = 3 + len(VISUAL_TOKENS)
NUM_NIGHTLY_PROMPTS = 40
REPLAYED = ("llama", "gemma3_text", "qwen2_5_vl")  # replay does not depend on the family
TREES: list[dict[str, Any]] = [
    {"policy": "chain", "depth": 5},
    {"policy": "static", "paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    {"policy": "eagle2", "depth": 5, "k": 3, "budget": 12},
    {"policy": "eagle2", "depth": 6, "k": 6, "budget": 60},
    {"policy": "sage", "d_max": 6},
    {"policy": "sage", "d_min": 1, "d_max": 3, "w_max": 8, "confidence": "current"},
    {"policy": "wetap", "length": 5, "w_min": 2, "w_max": 6, "budget": 16},
]
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """A random prompt and the target's greedy output."""

    sight: str | None
    inputs: Inputs
    sequences: Tensor


@dataclass(frozen=True)
class Member:
    """A family's target and draft as a user loads them."""

    family: Family
    folder: Path
    target: Any
    draft: Any
    processor: Any

    def inputs(self, rng: np.random.Generator, sight: str | None) -> Inputs:
        return random_inputs(self.family, self.processor, rng, sight=sight)

    @property
    def sights(self) -> list[str | None]:
        return [None, *self.family.sees]

    @property
    def number(self) -> int:
        return list(FAMILIES).index(self.family.name)

    @cached_property
    def examples(self) -> list[Example]:
        """One prompt of every sight, shared by the tests that only compare with greedy output."""
        rng = np.random.default_rng(8)
        prompts = [(sight, self.inputs(rng, sight)) for sight in self.sights]
        return [Example(sight, inputs, greedy(self.target, inputs)) for sight, inputs in prompts]


@pytest.fixture(scope="module", params=params_of(FAMILIES))
def member(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Member:
    return new_member(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def new_member(family: Family, folder: Path) -> Member:
    save(family, folder)
    target, draft = load(folder / "target"), load(folder / "draft")
    return Member(family, folder, target, draft, load_processor(family, folder / "target"))


@pytest.fixture(params=["alternating", pytest.param("other", marks=pytest.mark.nightly)])
def attention(request: pytest.FixtureRequest, member: Member) -> str:
    """sdpa and eager in turn from family to family; nightly the other one too."""
    return ("sdpa", "eager")[(member.number + (request.param == "other")) % 2]


def greedy(model: Any, inputs: Inputs) -> Tensor:
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)


def answer(sequences: Tensor, inputs: Inputs) -> list[int]:
    return sequences[0, inputs["input_ids"].shape[1] :].tolist()


class DecodingContract:
    """Decoding of random prompts with random trees, alone and in batches, for targets with states and without."""

    trees = TREES
    least_prompts = 2
    least_accepted = 0.3  # of a round
    batch_tree = TREES[2]

    def check_prompts(self, member: Member, num_prompts: int, seed: int) -> None:
        """Random prompts with every sight in turn, decoded with random tree policies: greedy output equals that of
        ``model.generate``, sampled output that of plain decoding with the same seed.
        """
        rng = np.random.default_rng(seed)
        plain, num_accepted, num_rounds = Decoder(member.target), 0, 0
        for number in range(num_prompts):
            inputs = member.inputs(rng, member.sights[number % len(member.sights)])
            tree = self.trees[int(rng.integers(len(self.trees)))]
            options = {
                "visual_keep": float(rng.choice([1.0, 0.5, 0.1])),
                "capture_sizes": [(), (), (4, 9, 33)][int(rng.integers(3))],
            }
            decoder = Decoder(member.target, member.draft, tree=tree, **options)
            out = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS)
            assert torch.equal(out.sequences, greedy(member.target, inputs)), (number, tree, options)
            sampled = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "seed": int(rng.integers(1000))}
            with_draft, alone = decoder.generate(**inputs, **sampled), plain.generate(**inputs, **sampled)
            assert torch.equal(with_draft.sequences, alone.sequences), (number, tree, options, sampled)
            for stats in (out.stats, with_draft.stats):
                num_accepted, num_rounds = num_accepted + sum(stats.accepted_lengths), num_rounds + stats.rounds
        assert num_accepted > self.least_accepted * num_rounds, "a draft that is seldom right proves little"

    def test_decoding_changes_no_token(self, member: Member) -> None:
        self.check_prompts(member, max(self.least_prompts, len(member.sights)), seed=0)

    @pytest.mark.nightly
    def test_decoding_changes_no_token_of_many_prompts(self, member: Member) -> None:
        self.check_prompts(member, NUM_NIGHTLY_PROMPTS, seed=1)

    def test_rows_of_a_batch_are_decoded_as_if_alone(self, member: Member) -> None:
        """On whichever side the batch is padded, and whatever the rows see; each row ends on its own."""
        rng = np.random.default_rng(7)
        sights = [sight for sight in member.sights if sight != "video"]
        sights = [sights[number % len(sights)] for number in (1, 0)]
        prompts = random_prompts(member.family, member.processor, rng, sights)
        singles = [encode(member.processor, [prompt]) for prompt in prompts]
        expected = [answer(greedy(member.target, single), single) for single in singles]
        decoder = Decoder(member.target, member.draft, tree=self.batch_tree, visual_keep=0.5)
        pad = member.target.generation_config.pad_token_id
        for side in ("left", "right"):
            batch = encode(member.processor, prompts, padding_side=side)
            out = decoder.generate(**batch, max_new_tokens=NEW_TOKENS)
            length = batch["input_ids"].shape[1]
            assert torch.equal(out.sequences[:, :length], batch["input_ids"])
            for row, tokens in enumerate(expected):
                found = out.sequences[row, length:].tolist()
                assert found[: len(tokens)] == tokens
                assert set(found[len(tokens) :]) <= {pad}
                assert out.row_stats[row].new_tokens == len(tokens)

    def test_generate_takes_the_decoder(self, member: Member) -> None:
        """``model.generate(custom_generate=decoder)``, which prepares positions and pixels in its own way."""
        decoder = Decoder(member.target, member.draft, tree=self.batch_tree, visual_keep=0.5)
        for example in member.examples:
            found = member.target.generate(
                **example.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, custom_generate=decoder
            )
            assert torch.equal(found, example.sequences)
            assert decoder.last_output.stats.draft_forwards > 0

    def test_the_model_is_left_as_it_was(self, member: Member) -> None:
        """Its config, its hooks, and its own greedy output."""
        before = member.target.config.to_dict()
        first, last = member.examples[0], member.examples[-1]
        decoder = Decoder(member.target, member.draft, tree=self.batch_tree, visual_keep=0.5)
        for example in (last, first, last):
            decoder.generate(**example.inputs, max_new_tokens=5)
        assert member.target.config.to_dict() == before
        assert not any(module._forward_pre_hooks for module in member.target.get_decoder().modules())
        assert torch.equal(greedy(member.target, last.inputs), last.sequences)


class TestEveryFamily(DecodingContract):
    """Every family in ``FAMILIES`` must pass all of this."""

    def test_prompts_that_are_read_in_chunks(self, member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logits, outputs of layers and cached tokens are those of one pass."""
        target = Target(member.target)
        target.output_layers = (0, 1, len(target.text.layers))
        for example in member.examples:
            (prompt,) = target.encode(example.inputs).prompts
            found = []
            for chunk in (tree_model.PREFILL_CHUNK, 5):
                monkeypatch.setattr(tree_model, "PREFILL_CHUNK", chunk)
                with torch.inference_mode():
                    target.reserve(len(prompt) + 8)
                    logits = [target.prefill_prompt(prompt)]
                    found.append((logits, dict(target.hidden)))
                    logits += [target.step(int(token)) for token in prompt.tokens[:3]]
                monkeypatch.undo()
            (whole, states), (parts, states_of_parts) = found
            for one, other in zip((*whole, *states.values()), (*parts, *states_of_parts.values()), strict=True):
                assert_same_logits(one, other)

    def test_static_buffers_decode_as_eager_forwards(self, member: Member) -> None:
        """Masks are padded, windows among them, and positions and columns are read from buffers."""
        target = Target(member.target)
        for number, example in enumerate(member.examples):
            options = {"tree": TREES[2 + 2 * number], "visual_keep": 0.5, "capture_sizes": (1, 4, 16, 64)}
            expected, found = (
                Decoder(target, member.draft, **options, mode=mode).generate(
                    **example.inputs, max_new_tokens=NEW_TOKENS
                )
                for mode in ("eager", "fixed")
            )
            assert torch.equal(found.sequences, example.sequences)
            assert found.stats.accepted_lengths == expected.stats.accepted_lengths
        captured: Any = target._graph_runners["fixed"]._captured
        assert len({key.layout.num_rows for key in captured}) == 1, "prompts with images and without share captures"

    @torch.inference_mode()
    def test_a_tree_in_one_forward_equals_each_branch_alone(self, member: Member, attention: str) -> None:
        """Logits and hidden states of chosen layers, over rounds whose rejected nodes must leave no trace, equal those
        of a forward pass of the whole text, without a cache, for every leaf.
        """
        rng = np.random.default_rng(3)
        model = load(member.folder / "target", attention=attention)
        target = Target(model)
        target.output_layers = (1, 2, len(target.text.layers))
        for sight in member.sights:
            inputs = member.inputs(rng, sight)
            (prompt,) = target.encode(inputs).prompts
            target.reserve(len(prompt) + 100)
            target.prefill_prompt(prompt)
            committed: list[int] = []
            for num_nodes in (12, 5, 0):
                size = num_nodes + 1
                tree = random_tree(rng, num_nodes, num_tokens=300, root_token=int(rng.integers(300)))
                tree.token[:size] += NUM_SPECIAL_TOKENS  # special tokens would make the stock model look for pixels
                tree_mask = np.empty((size, size), np.float32)
                write_tree_mask(tree, tree_mask, target.mask_value)
                logits = target.forward(Step(tree.token[:size], tree.depth[:size], tree_mask))
                hidden = {layer: states.clone() for layer, states in target.hidden.items()}
                for leaf in leaves_of(tree):
                    branch = ancestors_of(tree, leaf)
                    expected, outputs = forward_of_all(model, inputs, committed + tokens_to(tree, leaf))
                    assert_same_logits(logits[branch], expected[-len(branch) :])
                    for layer, states in hidden.items():
                        assert_same_logits(states[branch], outputs[layer][-len(branch) :])
                accepted = ancestors_of(tree, int(rng.integers(size)))
                target.cache.keep(accepted)
                committed += [int(tree.token[node]) for node in accepted]
                assert accepted[0] == ROOT
            assert_same_logits(target.step(99), forward_of_all(model, inputs, [*committed, 99])[0][-1])

    def test_visual_tokens_are_those_of_the_model(self, member: Member) -> None:
        """Their positions, and their projected features bit for bit."""
        for sight, inputs in ((example.sight, example.inputs) for example in member.examples):
            with torch.inference_mode():
                (prompt,) = Target(member.target).encode(inputs).prompts
                expected = features_of(member.target, inputs, sight) if sight else None
            assert prompt.tokens.tolist() == inputs["input_ids"][0].tolist()
            if expected is None:
                assert prompt.num_visual_tokens == 0
            else:
                token = getattr(member.target.config, f"{sight}_token_id")
                assert prompt.is_visual.tolist() == (inputs["input_ids"][0] == token).tolist()
                assert prompt.embeddings is not None
                assert torch.equal(prompt.embeddings[0, prompt.is_visual], expected)

    def test_the_attention_to_visual_tokens_is_that_of_an_eager_model(self, member: Member, attention: str) -> None:
        rng = np.random.default_rng(5)
        model = load(member.folder / "target", attention=attention)
        eager = load(member.folder / "target", attention="eager")
        before = copy.deepcopy(model.config.to_dict())
        for sight in member.family.sees:
            inputs = member.inputs(rng, sight)
            target = Target(model)
            with torch.inference_mode():
                (prompt,) = target.encode(inputs).prompts
                scores = target.prefill(prompt, visual_rankings=["text_after_image"]).visual_scores
                attended = eager(**inputs, output_attentions=True).attentions[-1][0]
            offsets = prompt.is_visual.nonzero()[:, 0]
            first = min(int(offsets[-1]) + 1, len(prompt) - 1)  # the text after the image, or the image's last token
            expected = attended[:, first:, offsets].mean((0, 1))
            torch.testing.assert_close(scores["text_after_image"], expected, atol=1e-5, rtol=0)
        assert model.config.to_dict() == before

    def test_in_bfloat16_every_divergence_is_a_near_tie(self, member: Member, attention: str) -> None:
        """Plain decoding and trees may part at near ties only; with a wrong mask they would part at clear margins."""
        rng = np.random.default_rng(6)
        target, draft = (
            load(member.folder / name, attention=attention, dtype=torch.bfloat16) for name in ("target", "draft")
        )
        for number in range(2):  # pixels in float32, as processors make them
            inputs = member.inputs(rng, member.sights[number % len(member.sights)])
            decoder = Decoder(target, draft, tree=TREES[number % len(TREES)])
            with_draft = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences
            alone = Decoder(target).generate(**inputs, max_new_tokens=NEW_TOKENS).sequences
            found = first_divergence(decoder.target, inputs, answer(alone, inputs), answer(with_draft, inputs))
            assert found is None or found.is_near_tie, str(found)

    def test_plain_steps_of_a_greedy_batch_emit_the_tokens_of_the_model(self, member: Member) -> None:
        """Rows of several lengths, of which some end before the others, with and without an image."""
        decoder = Decoder(member.target)
        limits = [NEW_TOKENS, NEW_TOKENS - 5, NEW_TOKENS - 7, NEW_TOKENS]
        examples = [(*member.examples, *reversed(member.examples))[row % len(member.examples)] for row in range(4)]
        requests = [
            decoder.requests(**example.inputs, max_new_tokens=limit, temperature=0.0)[0]
            for example, limit in zip(examples, limits, strict=True)
        ]
        assert all(can_batch(decoder.target, request) for request in requests)
        batch, are_certain = GreedyBatch(decoder.target, requests), []
        for row, request in enumerate(requests):
            decoder.target.reserve(len(request.prompt))
            with torch.inference_mode():
                are_certain.append(batch.insert(row, decoder.target.prefill(request.prompt)))
        certain = [id(request) for request, is_certain in batch.decode(are_certain) if is_certain]
        for request, example, limit in zip(requests, examples, limits, strict=True):
            if id(request) in certain:
                assert request.tokens == answer(example.sequences, example.inputs)[:limit]
        assert len(certain) >= 3

    def test_drafts_of_other_families_keep_the_output(self, member: Member, text_draft: Any, llava_draft: Any) -> None:
        """A text-only draft reads the prompt without images. So does one whose pixels are made by another processor."""
        example = member.examples[-1]
        for model in (text_draft, llava_draft):
            draft = IndependentDraft(model)
            decoder = Decoder(member.target, draft, tree=TREES[2], visual_keep=0.3)
            out = decoder.generate(**example.inputs, max_new_tokens=NEW_TOKENS)
            assert torch.equal(out.sequences, example.sequences)
        assert draft.sees_images == (
            member.target.config.model_type == "llava" and "<image>" in member.family.placeholders.values()
        )

    def test_a_draft_that_sees_less_has_a_smaller_cache(self, member: Member) -> None:
        for example in member.examples[1:]:
            lengths = []
            for keep in (1.0, 0.25):
                draft = IndependentDraft(member.draft)
                decoder = Decoder(member.target, draft, tree=TREES[0], visual_keep=keep)
                out = decoder.generate(**example.inputs, max_new_tokens=NEW_TOKENS)
                assert torch.equal(out.sequences, example.sequences)
                lengths.append(len(draft.prompts(example.inputs)[0]) if keep == 1.0 else draft.length)
            assert lengths[1] < lengths[0] + NEW_TOKENS

    def test_pixels_without_their_tokens_and_tokens_without_their_pixels(self, member: Member) -> None:
        rng = np.random.default_rng(11)
        decoder = Decoder(member.target, member.draft)
        for sight in member.family.sees:
            pixels = "pixel_values" if sight == "image" else "pixel_values_videos"
            inputs, text = member.inputs(rng, sight), member.inputs(rng, None)
            with pytest.raises(UserError, match=f"{sight} tokens but no {pixels}; pass the {sight}"):
                decoder.generate(**{name: value for name, value in inputs.items() if name != pixels})
            with pytest.raises(UserError, match=f"{pixels} came without {sight} tokens"):
                decoder.generate(**{**inputs, "input_ids": text["input_ids"], "attention_mask": text["attention_mask"]})

            if {"image_sizes", "image_grid_thw"} & set(inputs) and member.family.name != "llava_pixtral":
                with pytest.raises(UserError, match="tokens and pixels cannot be read"):
                    decoder.generate(**{k: v for k, v in inputs.items() if not k.startswith("image_")})
            fewer = {name: without_a_visual_token(member, inputs, sight, value) for name, value in inputs.items()}
            with pytest.raises(UserError, match="tokens and pixels cannot be read"):
                decoder.generate(**fewer)
            kinds = {"mm_token_type_ids", "token_type_ids"} & set(inputs)
            for name in kinds:  # their absence would go unnoticed
                with pytest.raises(UserError, match=f"{sight} tokens needs {name}, by which .* tells them from text"):
                    decoder.generate(**{other: value for other, value in inputs.items() if other != name})

    def test_drafts_that_read_features_keep_the_output(self, member: Member) -> None:
        """Random weights agree with the target by chance only; but the features of every family can be read."""
        target = Target(member.target)
        sizes, num_levels = {"num_heads": 4, "head_size": 8, "mlp_size": 32}, 0
        for number, example in enumerate(member.examples):
            torch.manual_seed(0)
            kind = ("dream", "star", "specvlm")[(member.number + number) % 3]
            draft = FeatureDraft(NETWORKS[kind].new(sizes, target, source="test").eval())
            out = Decoder(target, draft, tree=TREES[1], visual_keep=0.5).generate(
                **example.inputs, max_new_tokens=NEW_TOKENS
            )
            assert torch.equal(out.sequences, example.sequences)
            num_levels += out.stats.draft_forwards
        assert num_levels > 0


@pytest.mark.parametrize("name", REPLAYED)
def test_replay_counts_the_rounds_of_decoding(name: str, tmp_path: Path) -> None:
    """A trace recorded with a family's masks, positions and windows leads to the trees of the runtime."""
    member, rng = new_member(FAMILIES[name], tmp_path), np.random.default_rng(13)
    target, draft = Target(member.target), IndependentDraft(member.draft)
    decoder, keep = Decoder(target, draft), 0.5
    bounds = ForestBounds(depth=8, num_proposals=16, width=64, floor=1e-4, beam=16)
    num_accepted = 0
    for sight in member.sights:
        inputs = member.inputs(rng, sight)
        plain = Decoder(target).generate(**inputs, max_new_tokens=NEW_TOKENS)
        (prompt,) = target.encode(inputs).prompts
        with torch.inference_mode():
            target.reserve(len(prompt))
            scores = target.prefill(prompt, visual_rankings=["text_after_image"]).visual_scores
        ranked = {ranking: of_ranking.tolist() for ranking, of_ranking in scores.items()}
        recorded = Answer(answer(plain.sequences, inputs), len(prompt), ranked)
        draft.visual_keep = keep
        part = record_forest(target, draft, inputs, recorded, bounds)
        trace = join(header(1, bounds=bounds, subnet=Subnet(visual_keep=keep)), [part])
        for tree in TREES[:6]:
            decoder = Decoder(decoder.target, decoder.draft, tree=tree, visual_keep=keep)
            replayed = replay(trace, parse_policy(tree), free_prices())
            stats = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).stats
            assert replayed.missing[0] or replayed.accepted_lengths[0].tolist() == stats.accepted_lengths, tree
            num_accepted += sum(stats.accepted_lengths)
    assert num_accepted > 6


@pytest.fixture(scope="module")
def text_draft(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("text_draft")
    save(FAMILIES["llama"], folder)
    return load(folder / "draft")


@pytest.fixture(scope="module")
def llava_draft(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llava_draft")
    save(FAMILIES["llava"], folder)
    return load(folder / "draft")


def without_a_visual_token(member: Member, inputs: Inputs, sight: str, value: Tensor) -> Tensor:
    """One of the inputs, without the prompt's first visual token if it has an entry for each token."""
    if value.shape != inputs["input_ids"].shape:
        return value
    token = getattr(member.target.config, f"{sight}_token_id")
    at = int((inputs["input_ids"][0] == token).nonzero()[0])
    return torch.cat([value[:, :at], value[:, at + 1 :]], 1)


def extended(inputs: Inputs, tokens: list[int]) -> Inputs:
    """The inputs of a prompt without padding, with tokens of text after it."""
    more = torch.tensor([tokens])
    found = {name: value for name, value in inputs.items() if name != "attention_mask"}
    of_tokens = {"input_ids": more, **dict.fromkeys(("token_type_ids", "mm_token_type_ids"), torch.zeros_like(more))}
    return {
        name: torch.cat([value, of_tokens[name]], 1) if name in of_tokens else value for name, value in found.items()
    }


def forward_of_all(model: Any, inputs: Inputs, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [n, vocabulary] of prompt and tokens in one stock forward without a cache, and the outputs of embedding,
    layers and final norm, [n, hidden] each.
    """
    text, outputs = model.get_decoder(), []
    hooks = [text.layers[0].register_forward_pre_hook(lambda _, given: outputs.append(given[0][0]))]
    hooks += [
        module.register_forward_hook(lambda _, __, out: outputs.append((out[0] if isinstance(out, tuple) else out)[0]))
        for module in [*text.layers[:-1], text.norm]
    ]
    logits = model(**extended(inputs, tokens), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, outputs


def features_of(model: Any, inputs: Inputs, sight: str) -> Tensor:
    """Projected features as the model's public method gives them, [visual tokens, hidden]."""
    import inspect

    method = getattr(model.model, f"get_{sight}_features")
    known = inspect.signature(method).parameters
    found = method(**{name: value for name, value in inputs.items() if name in known}).pooler_output
    found = torch.cat([one.flatten(0, -2) for one in found]) if not isinstance(found, Tensor) else found
    return found.flatten(0, -2)
