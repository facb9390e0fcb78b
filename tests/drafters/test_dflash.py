"""Block-diffusion drafts in their three published forms: tiny checkpoints against transformers' own model and
generator.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from autotune.acceptance.replay import replay
from autotune.acceptance.trace import bounds_for, join
from autotune.documents.subnet import Subnet
from autotune.drafters.block_draft import BlockDraft
from autotune.drafters.checkpoint import load_draft
from autotune.measuring.settings import CostSettings
from autotune.measuring.step_bench import StepBench
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.target import Target
from autotune.recording.recorder import Answer, record_forest
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.trees.tree import MAX_STEP, ROOT, Ints, Tree
from tests.drafters.test_eagle3 import assert_lossless_and_replayed
from tests.obvious import refused
from tests.runtime.conftest import TREES
from tests.sample_documents import free_prices, header
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair, inputs_on, on_device

BLOCK, MASK = 6, 299
LAYERS = (1, 3)  # whose outputs are read, in transformers' count
CHAIN = {"policy": "chain", "depth": BLOCK - 1}
TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 6}
FORMS = ("transformers", "authors", "speculators")


def new_assistant(*, window: int = 2048, full: bool = False) -> Any:
    """An assistant of transformers with random weights for the tiny target."""
    torch.manual_seed(5)
    config = MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=window,
        layer_types=["full_attention" if full else "sliding_attention", "full_attention"],
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=list(LAYERS),
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    model = MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def write_draft(folder: Path, form: str, **changes: Any) -> Path:
    """An assistant with full attention in one of the published forms."""
    model = new_assistant(full=True)
    model.save_pretrained(folder)
    if form == "transformers":
        content = json.loads((folder / "config.json").read_text())
    else:
        tensors = {
            name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm"): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        layer = {
            **{name: getattr(model.config, name) for name in ("hidden_size", "intermediate_size", "head_dim")},
            **{name: getattr(model.config, name) for name in ("num_attention_heads", "num_key_value_heads")},
            **{name: getattr(model.config, name) for name in ("num_hidden_layers", "rms_norm_eps", "rope_parameters")},
            "max_position_embeddings": 512,
            "vocab_size": VOCABULARY_SIZE,
        }
        if form == "authors":
            ids = {"mask_token_id": MASK, "target_layer_ids": list(LAYERS)}
            content = {**layer, "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": ids}
        else:  # its ids count hidden states
            content = {
                "speculators_model_type": "dflash",
                "transformer_layer_config": layer,
                "block_size": BLOCK,
                "mask_token_id": MASK,
                "aux_hidden_state_layer_ids": [number + 1 for number in LAYERS],
                "draft_vocab_size": VOCABULARY_SIZE,
            }
            tensors |= {"verifier_norm.weight": torch.ones(32), "embed_tokens.weight": torch.zeros(2, 32)}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


class Blocks:
    """The drafted blocks of a request by the number of tokens before them. A true token takes the place of the first
    drafted one now and then, so that rounds accept some.
    """

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.tokens: dict[int, list[int]] = {}

    def add(self, position: int, tokens: list[int]) -> int | None:
        """Keep a block; returns the token that takes the place of its first one."""
        self.tokens[position] = tokens
        return self.answer[position] if len(self.tokens) % 2 and position < len(self.answer) else None


@pytest.mark.parametrize("window", [2048, 7])
@pytest.mark.parametrize("mode", ["eager", "fixed"])
def test_blocks_are_those_of_transformers(
    text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, mode: str
) -> None:
    """Round by round, with full and sliding layers, and the output is that of ``generate``."""
    model, assistant = text_pair.target, new_assistant(window=window)
    assistant.save_pretrained(tmp_path)
    ids = torch.arange(20, 38)[None]
    length = ids.shape[1]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    answer = model.generate(ids, **options)[0, length:].tolist()
    theirs, ours = Blocks(answer), Blocks(answer)
    get_candidates = DFlashTokenCandidateGenerator.get_candidates

    def observed(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        count = input_ids.shape[1]
        if candidates.shape[1] > count:
            true = theirs.add(count - length, candidates[0, count:].tolist())
            if true is not None:
                candidates[0, count] = true
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", observed)
    assisted = model.generate(ids, assistant_model=assistant, speculation_type="dflash", **options)
    assert assisted[0, length:].tolist() == answer
    target = Target(model)
    draft = load_draft(str(tmp_path), target)
    assert isinstance(draft, BlockDraft) and draft.aux_layers == (2, 4) and draft.kind == "dflash"
    propose = draft.propose

    def recorded(tree: Tree, frontier: Ints, num_proposals: int, coupling: Any) -> Any:
        tokens, logprobs = propose(tree, frontier, num_proposals, coupling)
        if frontier[0] == ROOT:
            committed = draft.length + 1 - length
            block, _ = draft.best(draft._logits, 1)
            true = ours.add(committed, block[:, 0].tolist())
            if true is not None:
                tokens[0, 0] = true
        return tokens, logprobs

    monkeypatch.setattr(draft, "propose", recorded)
    out = Decoder(target, draft, tree=CHAIN, mode=mode).generate(input_ids=ids, max_new_tokens=24)
    assert out.sequences[0, length:].tolist() == answer
    assert max(out.stats.accepted_lengths) > 0
    common = ours.tokens.keys() & theirs.tokens.keys()
    assert len(common) > 5
    assert {at: ours.tokens[at] for at in common} == {at: theirs.tokens[at] for at in common}


@pytest.mark.parametrize("form", FORMS)
def test_every_published_form_drafts_alike_and_losslessly(
    pair: Pair, prompts: dict[str, Inputs], tmp_path: Path, form: str
) -> None:
    """On a VLM, greedy and sampled, and replay counts the rounds of the runtime."""
    target = Target(pair.target)
    drafts = [load_draft(str(write_draft(tmp_path / name, name)), target) for name in ("transformers", form)]
    for draft in drafts:
        assert isinstance(draft, BlockDraft) and draft.subnet == Subnet() and draft.aux_layers == (2, 4)
    first, second = (draft.network.state_dict() for draft in drafts if isinstance(draft, BlockDraft))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert isinstance(drafts[1], BlockDraft)
    assert_lossless_and_replayed(target, drafts[1], prompts)


def test_a_draft_with_a_vocabulary_of_its_own(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """In the form of speculators, token i of the draft is the target's token i + d2t[i]."""
    target, folder = Target(pair.target), write_draft(tmp_path, "speculators", draft_vocab_size=100)
    kept = torch.randperm(VOCABULARY_SIZE)[:100].sort().values
    head = target.model.get_output_embeddings().weight[kept].clone()
    tensors = load_file(folder / "model.safetensors")
    own = {"lm_head.weight": head, "d2t": kept - torch.arange(100)}
    save_file({**tensors, **own}, folder / "model.safetensors")
    draft = load_draft(str(folder), target)
    whole = load_draft(str(write_draft(tmp_path / "whole", "speculators")), target)
    assert isinstance(draft, BlockDraft) and isinstance(whole, BlockDraft)
    states = torch.randn(3, 32)
    torch.testing.assert_close(draft.logits(states), whole.logits(states)[:, kept])
    assert draft.token_ids is not None and torch.equal(draft.token_ids, kept)
    assert_lossless_and_replayed(target, draft, prompts)


def test_all_levels_come_from_one_forward_pass(
    pair: Pair, prompts: dict[str, Inputs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of one level have the same children, and there are none deeper than the block."""
    target = Target(pair.target)
    draft = load_draft(str(write_draft(tmp_path, "authors")), target)
    assert isinstance(draft, BlockDraft)
    num_forwards, levels, forward = 0, [], draft.network.forward

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_forwards
        num_forwards += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(draft.network, "forward", counted)
    propose = draft.propose

    def recorded(tree: Tree, frontier: Ints, num_proposals: int, coupling: Any) -> Any:
        tokens, logprobs = propose(tree, frontier, num_proposals, coupling)
        levels.append(int(tree.depth[frontier[0]]))
        assert (tokens == tokens[:1]).all() and (logprobs == logprobs[:1]).all()
        assert (tokens[0, 0] == -1) == (levels[-1] >= BLOCK - 1)
        return tokens, logprobs

    monkeypatch.setattr(draft, "propose", recorded)
    tree = {"policy": "static", "paths": [[0] * depth for depth in range(1, BLOCK + 3)] + [[1], [1, 0], [1, 1]]}
    for temperature in (0.0, 0.7):
        num_forwards, request = 0, {**prompts["image"], "max_new_tokens": 12, "temperature": temperature, "seed": 1}
        out = Decoder(target, draft, tree=tree).generate(**request)
        assert torch.equal(out.sequences, Decoder(target).generate(**request).sequences)
        assert num_forwards == out.stats.rounds - out.stats.plain_steps
    assert max(levels) >= BLOCK


def test_captured_blocks_are_the_eager_ones(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """With padded numbers of pending tokens, pruned visual tokens, and captures made ahead."""
    target = Target(pair.target)
    new_assistant(window=40).save_pretrained(tmp_path)
    draft = load_draft(str(tmp_path), target)
    for inputs, temperature in itertools.product(prompts.values(), (0.0, 0.8)):
        request = {**inputs, "max_new_tokens": 16, "temperature": temperature, "seed": 1}
        plain = Decoder(target).generate(**request).sequences
        lengths = []
        for mode in ("eager", "fixed"):
            decoder = Decoder(target, draft, tree=TREE, mode=mode, visual_keep=0.5, capture_sizes=(1, 4, 8, 16))
            decoder.prepare(64)
            out = decoder.generate(**request)
            assert torch.equal(out.sequences, plain)
            lengths.append(out.stats.accepted_lengths)
        assert lengths[0] == lengths[1]


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
def test_blocks_are_captured_ahead_on_a_gpu(gpu: str, pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """A block is one captured forward pass; requests capture nothing."""
    target = Target(on_device(pair, gpu).target)
    new_assistant(window=40).save_pretrained(tmp_path)
    draft = load_draft(str(tmp_path), target)
    plain = Decoder(target, mode="eager")
    decoder = Decoder(target, draft, tree=TREE, capture_sizes=(1, 8, 16), visual_keep=0.5)
    assert decoder.mode == "cuda-graph"
    decoder.prepare(200)
    before = graph_memory(target.device).num_kept
    for name, temperature in (("text", 0.0), ("image", 0.8), ("image", 0.0)):
        request = {**inputs_on(prompts[name], gpu), "max_new_tokens": 10, "temperature": temperature, "seed": 2}
        assert torch.equal(decoder.generate(**request).sequences, plain.generate(**request).sequences)
    assert graph_memory(target.device).num_kept == before


def damaged(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace a tensor of the checkpoint; None removes it."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, folder / "model.safetensors")


def test_drafts_that_do_not_fit_are_refused(pair: Pair, tmp_path: Path) -> None:
    target = Target(pair.target)
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    numbers = itertools.count()

    def refuses(form: str, message: str, damage: tuple[str, Tensor | None] | None = None, **changes: Any) -> None:
        folder = write_draft(tmp_path / str(next(numbers)), form, **changes)
        if damage is not None:
            damaged(folder, *damage)
        with refused(message) as caught:
            load_draft(str(folder), target)
        assert "\n" not in str(caught.value)

    name = "layers.1.mlp.up_proj.weight"
    refuses("authors", f"config.json describes .*{name} is missing.*; give both files", (name, None))
    refuses("authors", r"layers.2.* is missing", num_hidden_layers=3)
    refuses("transformers", r"fc.weight has shape \(8, 8\) in place of \(32, 64\)", ("fc.weight", torch.zeros(8, 8)))
    refuses("authors", "candidate_selector.a is none of them", ("candidate_selector.a", torch.zeros(2)))
    refuses("authors", "made for a target of width 64", hidden_size=64)
    refuses("transformers", "reads the layers 2, 10; this one has width 32 and 4 layers", target_layer_ids=[1, 9])
    refuses("speculators", "its mask token 300 is none of the target's 300 tokens", mask_token_id=300)
    refuses(
        "speculators", "a DFlash draft's config has aux_hidden_state_layer_ids; this", aux_hidden_state_layer_ids=None
    )
    refuses("transformers", "a DFlash draft's config has num_hidden_layers; this one has not", num_hidden_layers=None)
    refuses("speculators", r"a Domino head \(projector_type: domino\) cannot be run", projector_type="domino")
    refuses("authors", "its sliding layers do not let a block's tokens see those after them", **sliding)
    refuses("authors", "block_size", block_size=1)
    refuses(
        "speculators",
        "its output head has 8 of the target's 300 tokens and no d2t",
        ("lm_head.weight", torch.zeros(8, 32)),
    )
    folder = write_draft(tmp_path / "subnet", "authors")
    with refused("only a star draft has heads to choose"):
        load_draft(str(folder), target, Subnet(heads=0.5))
    with refused("this dflash draft reads the layers 2, 4 together; got injection_layer 2; leave it out"):
        load_draft(str(folder), target, Subnet(injection_layer=2))
    one = write_draft(tmp_path / "one", "authors", dflash_config={"mask_token_id": MASK, "target_layer_ids": [2]})
    draft = load_draft(str(one), target, random_weights=True)
    assert isinstance(draft, BlockDraft) and draft.subnet.injection_layer == 3
    load_draft(str(one), target, draft.subnet, random_weights=True)  # as from a profile
    (folder / "model.safetensors").unlink()
    with refused(r"a DFlash draft is read from model.safetensors or pytorch_model.bin; there is none"):
        load_draft(str(folder), target)


@torch.inference_mode()
def test_plain_steps_are_read_as_the_prompt_is(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """A stretch of them longer than a forward pass gives the block of a longer prompt."""
    target = Target(pair.target)
    draft = load_draft(str(write_draft(tmp_path, "authors")), target)
    assert isinstance(draft, BlockDraft)
    target.output_layers = draft.aux_layers
    tokens = torch.arange(4, 4 + MAX_STEP + 30)
    (prompt,) = target.encode({"input_ids": tokens[None]}).prompts
    target.reserve(len(tokens))
    target.prefill(prompt)
    hidden = target.hidden

    def block_after(num_prefilled: int) -> Tensor:
        target.hidden = {layer: rows[:num_prefilled] for layer, rows in hidden.items()}
        draft.prefill(prompt.keep(torch.arange(num_prefilled)), None, capacity=2 * len(tokens))
        for index in range(num_prefilled, len(tokens)):
            target.features.write({layer: rows[index - 1 : index] for layer, rows in hidden.items()})
            draft.append(int(tokens[index]))
        return draft.read_pending()

    expected = block_after(len(tokens) - 1)
    torch.testing.assert_close(block_after(10), expected, atol=1e-4, rtol=1e-3)
    assert draft.length == len(tokens) - 1


@pytest.mark.parametrize("policy", TREES)
def test_every_policy_is_replayed(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path, policy: str) -> None:
    """The rounds of the runtime, by the compiled code that grows trees in both."""
    target = Target(pair.target)
    draft = load_draft(str(write_draft(tmp_path, "authors")), target)
    assert isinstance(draft, BlockDraft)
    inputs, tree = prompts["image"], parse_policy(TREES[policy])
    out = Decoder(target, draft, tree=tree).generate(**inputs, max_new_tokens=20)
    length = inputs["input_ids"].shape[1]
    answer = Answer(out.sequences[0, length:].tolist(), length, {})
    bounds = bounds_for([tree])
    part = record_forest(target, draft, inputs, answer, bounds)
    trace = join(header(1, bounds=bounds, aux_layers=draft.aux_layers), [part])
    replayed = replay(trace, tree, free_prices())
    assert replayed.accepted_lengths[0].tolist() == out.stats.accepted_lengths
    if replayed.missing[0] == 0:
        assert replayed.verified_nodes[0] == sum(out.stats.verified_nodes)
        assert replayed.draft_forwards[0] == out.stats.draft_forwards


@torch.inference_mode()
def test_a_level_is_timed_as_a_lookup(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a round's first level is that of the block; the others run no forward pass."""
    target = Target(pair.target)
    draft = load_draft(str(write_draft(tmp_path, "authors")), target)
    assert isinstance(draft, BlockDraft) and draft.shape.block_tokens == BLOCK
    bench = StepBench(target, draft, CostSettings(kv_lengths=(16, 32, 48)))
    num_tokens = []
    forward = draft.network.forward

    def counted(stream: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        num_tokens.append(stream.shape[1])
        return forward(stream, *args, **kwargs)

    monkeypatch.setattr(draft.network, "forward", counted)
    assert bench.draft_first_ms(3, 16) > 0 and num_tokens == [BLOCK]
    assert bench.draft_level_ms(4, 16) > 0 and num_tokens == [BLOCK]
