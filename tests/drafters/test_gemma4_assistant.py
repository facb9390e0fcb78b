"""Assistants of Gemma 4: tiny models of the real classes against transformers' own candidate generator."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autotune
from autotune.acceptance.replay import replay
from autotune.acceptance.trace import ForestBounds
from autotune.device import fingerprint
from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import DraftChoice, OperatingPoint
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.gemma4_assistant import Gemma4AssistantDraft
from autotune.execution import KV_LENGTH_STEP
from autotune.measuring.measurement import measure_costs
from autotune.measuring.settings import CostSettings
from autotune.measuring.step_bench import StepBench
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.prediction.evaluator import Evaluator
from autotune.runtime.decoder import Decoder
from autotune.search.model_pool import ModelPool
from autotune.search.space import load_space
from autotune.search.traces import record_trace
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import parse_policy
from autotune.trees.priced import MAX_MATCH, identity_curves
from autotune.workloads.workload import load_workload
from tests.assistants import Stock, agreeing_assistant, new_assistant
from tests.drafters.test_eagle3 import assert_lossless_and_replayed
from tests.families import FAMILIES, Inputs, load, load_processor, random_inputs, save
from tests.obvious import Seen, refused, with_true_tokens
from tests.rehearsal import Rehearsal
from tests.runtime.test_captured_rounds import SETTINGS, TREES, assert_same, two_decoders
from tests.runtime.test_families import NUM_NIGHTLY_PROMPTS
from tests.runtime.test_families import TREES as RANDOM_TREES
from tests.sample_documents import decoding_profile, free_prices, write_workload
from tests.tiny_models import Pair, inputs_on

TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 6}
NAMES = ("gemma4_text", "gemma4_text_large", "gemma4", "gemma4_unified")
"""With layers that read keys of earlier ones; with keys that are values, fewer of them in full layers, and experts; with images."""


class Member:
    """A target of a family, and a prompt of every kind."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family = FAMILIES[name]
        save(self.family, folder)
        self.folder = folder / "target"
        self.model = load(self.folder)
        self.processor = load_processor(self.family, self.folder)
        self.prompts = {str(sight): self.prompt(np.random.default_rng(4), sight) for sight in self.sights}

    @property
    def sights(self) -> list[str | None]:
        return [None, *self.family.sees]

    def prompt(self, rng: np.random.Generator, sight: str | None) -> Inputs:
        return random_inputs(self.family, self.processor, rng, sight=sight)


@pytest.fixture(scope="module", params=NAMES)
def member(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Member:
    return Member(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Member:
    return Member("gemma4_text", tmp_path_factory.mktemp("text"))


def greedy(model: Any, inputs: Inputs, number: int) -> list[int]:
    length = inputs["input_ids"].shape[1]
    return model.generate(**inputs, max_new_tokens=number, do_sample=False)[0, length:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_ordered", [False, True])
@torch.inference_mode()
def test_proposals_are_those_of_transformers(member: Member, monkeypatch: pytest.MonkeyPatch, is_ordered: bool) -> None:
    """At every node of every round: the tokens and how much less probable they are than the best one. The root's best child is
    what transformers' candidate generator drafts first from the same state, and the output is that of ``generate``.
    """
    assistant = new_assistant(member.model, is_ordered=is_ordered)
    target, draft, stock = Target(member.model), Gemma4AssistantDraft(assistant), Stock(member.model, assistant)
    own_propose = draft.propose
    for inputs in member.prompts.values():
        length, answer, seen = inputs["input_ids"].shape[1], greedy(member.model, inputs, 12), list[Seen]()
        monkeypatch.setattr(draft, "propose", own_propose)
        proposals = with_true_tokens(draft, answer, lambda length=length: draft.length - length, seen)
        monkeypatch.setattr(draft, "propose", proposals)
        out = Decoder(target, draft, tree=TREE).generate(**inputs, max_new_tokens=12)
        assert out.sequences[0, length:].tolist() == answer
        for num_committed, path, tokens, logprobs in seen:
            expected = stock.logits_after(inputs, answer[:num_committed], path[1:])
            best = expected[torch.from_numpy(tokens).long()]
            assert expected.argmax() == tokens[0]
            torch.testing.assert_close(logprobs - logprobs[0], best - best[0], atol=1e-3, rtol=0)
            if len(path) == 1:
                assert stock.drafted(inputs, answer[:num_committed], 1) == [tokens[0]]
        assert len(seen) > 10 and max(out.stats.accepted_lengths) > 0


def test_decoding_is_lossless_and_replayed(member: Member) -> None:
    """Greedy and sampled, with a draft that is right half of the time."""
    target = Target(member.model)
    draft = agreeing_assistant(target, [*member.prompts.values()], 16)
    assert_lossless_and_replayed(target, draft, member.prompts)
    for inputs in member.prompts.values():
        stats = Decoder(target, draft, tree=TREE).generate(**inputs, max_new_tokens=16).stats
        assert stats.tokens_per_round > 1.5


@pytest.mark.nightly
def test_decoding_changes_no_token_of_many_prompts(member: Member) -> None:
    """Random prompts with every sight in turn and random trees: greedy output equals that of ``model.generate``, sampled output that
    of plain decoding. The assistant is fitted to every prompt anew, so that it is right now and then.
    """
    rng, num_accepted = np.random.default_rng(1), 0
    for number in range(NUM_NIGHTLY_PROMPTS):
        target = Target(load(member.folder, attention=("sdpa", "eager")[number % 2]))
        inputs = member.prompt(rng, member.sights[number % len(member.sights)])
        draft = agreeing_assistant(target, [inputs], 12)
        options = {"capture_sizes": [(), (4, 9, 33)][int(rng.integers(2))]}
        options["mode"] = ("eager", "fixed")[int(rng.integers(2))]
        decoder = Decoder(target, draft, tree=RANDOM_TREES[int(rng.integers(len(RANDOM_TREES)))], **options)
        length = inputs["input_ids"].shape[1]
        out = decoder.generate(**inputs, max_new_tokens=12)
        assert out.sequences[0, length:].tolist() == greedy(target.model, inputs, 12), (number, options)
        sampled = {"max_new_tokens": 12, "temperature": 1.0, "seed": int(rng.integers(1000))}
        found, alone = decoder.generate(**inputs, **sampled), Decoder(target).generate(**inputs, **sampled)
        assert torch.equal(found.sequences, alone.sequences), (number, options, sampled)
        num_accepted += sum(out.stats.accepted_lengths) + sum(found.stats.accepted_lengths)
    assert num_accepted > 4 * NUM_NIGHTLY_PROMPTS


def test_rounds_without_the_draft_are_committed(text: Member) -> None:
    """The second time, a prompt is answered by rounds that retrieve its answer and ask the assistant for nothing."""
    found = {"curves": identity_curves().tolist(), "retrieved": [[0.9] * MAX_MATCH] * 2, "num_tokens": 1}
    found |= {"draft": "", "draft_sha256": "", "workload_sha256": "", "log_loss": 0.1, "raw_log_loss": 0.1}
    tree = {"policy": "priced", "retrieval": True, "skip_draft_above": 0.8, "calibration": found}
    target, forwards = Target(text.model), []
    draft = agreeing_assistant(target, [text.prompts["None"]], 12)
    decoder = Decoder(target, draft, tree=tree, corpus_tokens=500)
    for temperature in (1.0, 1.0, 0.7):  # the last answer is another one
        request = {**text.prompts["None"], "max_new_tokens": 40, "temperature": temperature}
        output = decoder.generate(**request)
        assert draft.length == target.length, "the draft counts what the target has cached"
        assert torch.equal(output.sequences, Decoder(target).generate(**request).sequences)
        forwards.append(output.stats.draft_forwards)
    assert forwards[1] < forwards[0] / 2 and forwards[2] > 0


# ------------------------------------------------------------------------------------------------- rounds and captures


def test_steps_over_static_buffers_grow_the_trees_of_eager_mode(text: Member) -> None:
    target, num_accepted = Target(text.model), 0
    draft = agreeing_assistant(target, [*text.prompts.values()], 14)
    for tree in TREES.values():
        eager, fixed = two_decoders(target, draft, tree, capture_sizes=(1, 3, 8, 16, 64))
        for settings in SETTINGS:
            stats = assert_same(eager, fixed, text.prompts["None"], max_new_tokens=14, **settings)
            num_accepted += sum(stats.accepted_lengths)
    assert num_accepted > 30
    price = RoundPrice(round_steps=4.5, level_steps=0.0, node_steps=0.0)
    options = {"fallback": price, "capture_sizes": (1, 4, 16)}
    stats = assert_same(
        *two_decoders(target, draft, TREES["eagle2"], **options), text.prompts["None"], max_new_tokens=60
    )
    assert 0 < stats.plain_steps < stats.target_forwards, "after a plain step the root alone is read"


def test_an_answer_grows_past_padded_lengths_and_the_targets_cache(text: Member) -> None:
    target, capacities = Target(text.model), set()
    draft = Gemma4AssistantDraft(new_assistant(text.model))
    eager, fixed = two_decoders(target, draft, TREES["eagle2"])
    for length, num_tokens in ((10, 4), (KV_LENGTH_STEP - 6, 24), (1010, 30)):
        assert_same(eager, fixed, {"input_ids": torch.arange(length)[None] % 40 + 5}, max_new_tokens=num_tokens)
        capacities.add(target.cache.capacity)
    assert len(capacities) > 1


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
def test_captured_rounds_are_those_of_eager_mode(gpu: str, text: Member) -> None:
    """One capture decodes requests of different settings."""
    on_cpu = Target(text.model)
    assistant = agreeing_assistant(on_cpu, [text.prompts["None"]], 12).model
    target, draft = Target(deepcopy(text.model).to(gpu)), Gemma4AssistantDraft(assistant.to(gpu))
    inputs = inputs_on(text.prompts["None"], gpu)
    options = {"capture_sizes": (1, 8, 16)}
    eager = Decoder(target, draft, tree=TREES["eagle2"], mode="eager", **options)
    captured = Decoder(target, draft, tree=TREES["eagle2"], **options)
    assert captured.mode == "cuda-graph"
    for settings in ({}, {"temperature": 0.7, "top_k": 7, "seed": 2}):
        assert_same(eager, captured, inputs, max_new_tokens=10, **settings)
    before = graph_memory(target.device).num_kept
    captured.generate(**inputs, max_new_tokens=9)
    assert graph_memory(target.device).num_kept == before


@pytest.mark.parametrize("tree", [TREES["chain"], {"policy": "sage", "n_max": 7, "d_max": 3}])
def test_prepared_requests_capture_nothing(rehearsal: Rehearsal, text: Member, tree: dict[str, Any]) -> None:
    target = Target(deepcopy(text.model).to("cuda:0"))
    draft = Gemma4AssistantDraft(new_assistant(text.model).to("cuda:0"))
    decoder = Decoder(target, draft, tree=tree, capture_sizes=(1, 16))
    assert decoder.prepare(240).num_captures > 0
    before, inputs = rehearsal.counts.captures, inputs_on(text.prompts["None"], "cuda:0")
    found = decoder.generate(**inputs, max_new_tokens=12).sequences
    assert found[0, inputs["input_ids"].shape[1] :].tolist() == greedy(text.model, text.prompts["None"], 12)
    assert rehearsal.counts.captures == before


# ---------------------------------------------------------------------------------------------------- costs and loading


def test_a_search_prices_replays_and_loads_it(text: Member, tmp_path: Path) -> None:
    """One variant; the rounds of its trace are those of the decoder of a profile, and a table has its costs."""
    lines = [{"prompt": "What is shown in this image?", "split": "tune", "max_new_tokens": 12}] * 2
    workload = load_workload(str(write_workload(tmp_path, lines)), "tune")
    inputs = workload.prompts[0].inputs(text.processor)
    agreeing_assistant(Target(text.model), [inputs], 12).model.save_pretrained(tmp_path / "draft")
    own = reference(str(tmp_path / "draft"))
    pool = ModelPool(str(text.folder), [own.id], "cpu")
    (variant,) = pool.subnets(load_space("quick"))
    assert pool.kind(own.id) == "gemma4_assistant" and variant == (own.id, Subnet())
    bounds = ForestBounds(depth=4, num_proposals=8, width=64, floor=1e-9, beam=16)
    trace = record_trace(pool, pool.recorder(tmp_path / "study"), variant, workload, bounds)
    draft = pool.draft(own.id)
    settings = CostSettings(kv_lengths=(32, 64), held_out_kv_length=48, max_samples=2, time_limit_s=2)
    table = measure_costs(
        pool.target, pool.target_reference, [(draft, own)], pool.processor, workload, settings=settings
    )
    configuration = Configuration(draft=own.id, tree=TREE, subnet=variant[1])
    evaluator = Evaluator([trace], table, jobs=1)
    assert evaluator.evaluate(configuration).tokens_per_round > 1.5
    assert evaluator.draft_mib(variant, parse_policy(TREE)) == pytest.approx(draft.num_parameters * 4 / 2**20)
    point = OperatingPoint(
        when=Condition(),
        draft=DraftChoice(kind=draft.kind, id=own.id, sha256=own.sha256, subnet=variant[1]),
        tree=parse_policy(TREE),
        predicted=None,
        measured=None,
    )
    document = decoding_profile(pool.target_reference, own, hardware=fingerprint("cpu"))
    decoder = autotune.load(document.model_copy(update={"points": [point]}), device="cpu")
    found = decoder.generate(**inputs, max_new_tokens=12)
    assert isinstance(decoder.draft, Gemma4AssistantDraft)
    replayed = replay(trace, parse_policy(TREE), free_prices())
    assert replayed.missing[0] == 0 and replayed.accepted_lengths[0].tolist() == found.stats.accepted_lengths


@torch.inference_mode()
def test_costs_are_of_the_root_and_of_levels(text: Member) -> None:
    """The first forward pass reads the root alone, however many tokens were accepted; nothing is cached."""
    target = Target(text.model)
    draft = Gemma4AssistantDraft(new_assistant(text.model))
    draft.attach(target)
    bench = StepBench(target, draft, CostSettings(kv_lengths=(32, 64)))
    sizes: list[int] = []
    draft.model.register_forward_pre_hook(lambda *_: pytest.fail("the assistant's own masks are not used"))
    draft.model.model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["inputs_embeds"].shape[1]), with_kwargs=True
    )
    assert bench.draft_first_ms(4, 64) > 0 and bench.draft_level_ms(4, 64) > 0
    assert sizes == [1, 4]
    shape = draft.shape
    assert draft.kv_bytes_per_token == 0 and shape.num_layers == 2
    assert shape.kv_bytes_per_token == 2 * 4 * (2 * 8 + 2 * 16), (
        "read of the target: two KV heads of 8 and of 16 numbers"
    )
    ordered = Gemma4AssistantDraft(new_assistant(text.model, is_ordered=True))
    assert ordered.num_parameters > draft.num_parameters > ordered.step_parameters


def test_a_checkpoint_is_loaded_by_its_model_type(text: Member, tmp_path: Path) -> None:
    assistant = new_assistant(text.model)
    assistant.save_pretrained(tmp_path)
    target = Target(text.model)
    draft = load_draft(str(tmp_path), target)
    assert isinstance(draft, Gemma4AssistantDraft) and draft.kind == "gemma4_assistant" and draft.subnet == Subnet()
    assert draft.aux_layers == (4,) and draft.num_parameters == sum(p.numel() for p in assistant.parameters())
    found, expected = (
        Decoder(target, one, tree=TREE).generate(**text.prompts["None"], max_new_tokens=8) for one in (draft, assistant)
    )
    assert found.stats.accepted_lengths == expected.stats.accepted_lengths, "a decoder takes the model itself too"
    half = Target(deepcopy(text.model).to(torch.bfloat16))
    assert load_draft(str(tmp_path), half).dtype == torch.bfloat16
    random = load_draft(str(tmp_path), target, random_weights=True)
    assert not torch.equal(random.model.lm_head.weight, draft.model.lm_head.weight)


def test_assistants_that_do_not_fit_are_refused(pair: Pair, text: Member, tmp_path: Path) -> None:
    target, assistant = Target(text.model), new_assistant(text.model)
    with refused("keys and values of a Gemma 4 target; this target is of type llama; use another"):
        Gemma4AssistantDraft(assistant).attach(Target(pair.target))
    for changes, message in (
        (
            {"num_key_value_heads": 1},
            "a target with sliding_attention KV heads 1; this one has 2; use a draft made for",
        ),
        ({"global_head_dim": 8}, "a target with full_attention head size 8; this one has 16"),
        ({"vocab_size": 300}, "must share one vocabulary; the target has 352 tokens, the draft 300"),
    ):
        with refused(message):
            Gemma4AssistantDraft(new_assistant(text.model, **changes)).attach(target)
    wide = deepcopy(assistant)
    wide.config.backbone_hidden_size = 64
    with refused("a target with hidden_size 64; this one has 32"):
        Gemma4AssistantDraft(wide).attach(target)
    with refused(r"the target's is torch.float32, the assistant's torch.bfloat16; load it with"):
        Gemma4AssistantDraft(deepcopy(assistant).to(torch.bfloat16)).attach(target)
    flash = deepcopy(assistant)
    flash.config.get_text_config()._attn_implementation = "flash_attention_2"
    with refused("an assistant needs attention that takes a mask: sdpa or eager; it runs 'flash_at"):
        Gemma4AssistantDraft(flash).attach(target)
    assistant.save_pretrained(tmp_path / "whole")
    with refused("a gemma4_assistant draft has no subnets; leave heads"):
        load_draft(str(tmp_path / "whole"), target, Subnet(heads=0.5))
    weights = assistant.state_dict()
    del weights["post_projection.weight"]
    assistant.save_pretrained(tmp_path / "part", state_dict=weights)
    with refused(r"part: its checkpoint has no weights post_projection.weight; give the whole"):
        load_draft(str(tmp_path / "part"), target)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    config["text_config"]["num_kv_shared_layers"] = 1
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    with refused(r"whole: transformers cannot load it \(.*must be shared"):
        load_draft(str(tmp_path / "whole"), target)
