"""The bundled pairs decode losslessly; the target of the digits reads them, and its draft is neither perfect nor useless."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

from autotune.acceptance.calibration import calibrate
from autotune.acceptance.replay import replay
from autotune.acceptance.trace import ForestBounds, bounds_for
from autotune.cost.roofline import estimate_table
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.independent import IndependentDraft
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.workloads.formats import read_jsonl
from autotune.workloads.prompt import AnsweredPrompt
from autotune.workloads.workload import Workload, bundled_file, load_workload
from tests.sample_documents import free_prices

# Tree policies, confidences and shares of visual tokens alternate over the prompts.
CONFIGURATIONS = [
    ({"policy": "chain", "depth": 5}, 1.0),
    ({"policy": "sage"}, 0.2),
    ({"policy": "chain", "depth": 2}, 0.5),
    ({"policy": "sage", "d_min": 1, "d_max": 6, "w_max": 4, "confidence": "current", "depth_cap": 10}, 1.0),
    ({"policy": "sage", "w_min": 4, "w_max": 10, "n_max": 24}, 0.1),
]


class BundledPair(NamedTuple):
    """A bundled target with its ``independent`` draft."""

    name: str
    processor: Any
    target: Target
    draft: IndependentDraft

    @property
    def target_id(self) -> str:
        return f"{self.name}/target"

    @property
    def draft_id(self) -> str:
        return f"{self.name}/independent"

    def held_out(self, num_prompts: int, code_tokens: int = 40) -> Workload:
        """Few answers of ``code`` are cut to ``code_tokens``: a step of its deeper target takes longer."""
        limit = code_tokens if self.name == "code" and num_prompts < 24 else None
        return load_workload(self.name, "evaluate", num_prompts=num_prompts).cut(num_prompts, limit)


@pytest.fixture(scope="module", params=["digits", "code"])
def pair(request):
    target, draft = (load_model(f"{request.param}/{model}") for model in ("target", "independent"))
    return BundledPair(
        request.param, load_processor(f"{request.param}/target"), Target(target), IndependentDraft(draft)
    )


@pytest.mark.parametrize("num_prompts", [len(CONFIGURATIONS), pytest.param(64, marks=pytest.mark.nightly)])
def test_greedy_output_equals_generate_on_held_out_prompts(pair, num_prompts):
    _, processor, target, draft = pair
    decoder = Decoder(target, draft)
    lengths = []
    num_prompts = min(num_prompts, 64 if pair.name == "digits" else 24)
    for number, prompt in enumerate(pair.held_out(num_prompts).prompts):
        inputs = prompt.inputs(processor)
        tree, keep = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        decoder.configure(tree, visual_keep=keep)
        output = decoder.generate(**inputs, max_new_tokens=prompt.settings.max_new_tokens)
        with torch.inference_mode():
            expected = target.model.generate(**inputs, max_new_tokens=prompt.settings.max_new_tokens, do_sample=False)
        assert torch.equal(output.sequences, expected), (prompt.name, tree, keep)
        lengths.append(output.stats.new_tokens)
    assert max(lengths) <= 250 and (min(lengths) >= 80 or pair.name == "code")


@pytest.mark.parametrize("num_prompts", [len(CONFIGURATIONS), pytest.param(48, marks=pytest.mark.nightly)])
def test_sampled_output_equals_plain_decoding_with_the_same_seed(pair, num_prompts):
    _, processor, target, draft = pair
    decoder, plain = Decoder(target, draft), Decoder(target)
    for number, prompt in enumerate(pair.held_out(num_prompts).prompts):
        inputs = prompt.inputs(processor)
        tree, keep = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        decoder.configure(tree, visual_keep=keep)
        settings = {
            "max_new_tokens": min(60, prompt.settings.max_new_tokens),
            "temperature": 0.7 if number % 3 else 1.0,
            "top_p": 0.95 if number % 2 else 1.0,
            "seed": number,
        }
        sampled = decoder.generate(**inputs, **settings).sequences
        assert torch.equal(sampled, plain.generate(**inputs, **settings).sequences), (prompt.name, tree, keep)


@pytest.mark.parametrize("pair", ["digits"], indirect=True)
def test_target_reads_held_out_scans(pair):
    _, processor, target, _ = pair
    decoder = Decoder(target)
    answers = {
        line.images[0]: line.answer for _, line in read_jsonl(bundled_file("digits"), AnsweredPrompt) if line.images
    }
    prompts = [p for p in load_workload("digits", "evaluate").prompts if p.settings.task == "read"]
    num_correct = num_digits = 0
    for prompt in prompts:
        answer = answers[prompt.settings.images[0]]
        output = decoder.generate(**prompt.inputs(processor), max_new_tokens=250)
        text = processor.decode(output.sequences[0, output.stats.prompt_tokens :], skip_special_tokens=True)
        digits, expected = (re.findall(r"\d", " ".join(re.findall(r"reads ([\d, ]+)\.", t))) for t in (text, answer))
        assert len(digits) == len(expected)
        num_correct += sum(a == b for a, b in zip(digits, expected, strict=True))
        num_digits += len(expected)
    assert num_correct / num_digits >= 0.97


def test_draft_is_neither_perfect_nor_useless(pair, tmp_path):
    """If every token were predictable, a chain would win every search; if none were, plain decoding would."""
    _, processor, target, draft = pair
    prompts = load_workload(pair.name, "tune", num_prompts=8 if pair.name == "digits" else 6)  # one of each task
    recorder = Recorder(target, reference(pair.target_id), processor, tmp_path)
    bounds = ForestBounds(depth=2, num_proposals=4)
    trace = recorder.trace(draft, reference(pair.draft_id), prompts, visual_keep=1.0, bounds=bounds)
    shares = trace.agreement().pivot(index="task", columns="rank", values="share").sort_values(1)
    assert shares[1].min() < 0.75 and shares[1].max() > 0.9
    harder = shares[: len(shares) // 2]
    assert (harder[4] - harder[1]).mean() >= 0.1


@pytest.mark.parametrize("num_prompts", [6, pytest.param(16, marks=pytest.mark.nightly)])
def test_sage_is_faster_than_a_chain_where_nodes_are_nearly_free(pair, tmp_path, num_prompts):
    """In the paper's tables SAGE accepts more tokens than draft chains, and is faster, on every benchmark."""
    _, processor, target, draft = pair
    default, policies = (
        PUBLISHED_DEFAULTS["sage"],
        [parse_policy(PUBLISHED_DEFAULTS[n].tree) for n in ("sage", "chain")],
    )
    recorder = Recorder(target, reference(pair.target_id), processor, tmp_path)
    prompts = load_workload(pair.name, "evaluate", num_prompts=num_prompts)
    bounds = bounds_for(policies).model_copy(update={"answer_tokens": None if num_prompts > 8 else 64})
    trace = recorder.trace(
        draft, reference(pair.draft_id), prompts, visual_keep=default.subnet.visual_keep, bounds=bounds
    )
    table = estimate_table(
        "h100",
        target=reference(pair.target_id),
        target_shape=target.shape,
        draft=reference(pair.draft_id),
        draft_shape=draft.shape,
        precision="float32",
    )
    prices = table.prices(reference(pair.draft_id), max_tokens=65, max_kv_length=1024)
    assert prices.verify_ms[65, -1] < 1.1 * prices.verify_ms[1, -1], "nodes are nearly free"
    sage, chain = (replay(trace, policy, prices) for policy in policies)
    assert sage.is_covered and chain.is_covered
    assert sage.tokens_per_round > chain.tokens_per_round
    assert sage.ms_per_token < chain.ms_per_token


@pytest.mark.parametrize(
    ("pair", "draft_id", "tasks"),
    [
        ("digits", "digits/star", ("continue", "describe")),
        pytest.param("digits", "digits/specvlm", ("continue", "describe"), marks=pytest.mark.nightly),
        ("code", "code/star", ("edit", "fill")),
    ],
    indirect=["pair"],
)
def test_rounds_that_retrieval_wins_ask_the_draft_for_nothing(pair, tmp_path, draft_id, tasks):
    """Replay equals the runtime for a draft that reads features of tokens which it learns of rounds later."""
    _, processor, target, _ = pair
    draft = load_draft(draft_id, target)
    everything = pair.held_out(23, code_tokens=64)
    prompts = tuple(p for p in everything.prompts if p.settings.task in tasks)[:4]
    workload = Workload(pair.name, "evaluate", prompts)
    recorder = Recorder(target, reference(pair.target_id), processor, tmp_path)
    trace = recorder.trace(draft, reference(draft_id), workload, visual_keep=1.0, bounds=ForestBounds(depth=10))
    tree = {"policy": "priced", "worth": 0.9, "width": 2, "rate": 0.05, "retrieval": True, "skip_draft_above": 0.6}
    tree |= {"calibration": calibrate(trace).model_dump(), "prices": {"verify": [[1.0, 1.05]]}}
    replayed = replay(trace, parse_policy(tree), free_prices())
    decoder = Decoder(target, draft, tree=tree)
    for p, prompt in enumerate(workload.prompts):
        output = decoder.generate(**prompt.inputs(processor), **prompt.settings.generation)
        begin, end = trace.answer_start[p : p + 2]
        assert output.sequences[0, -(end - begin) :].tolist() == trace.forest.answer[begin:end].tolist()
        assert replayed.accepted_lengths[p].tolist() == output.stats.accepted_lengths
        assert replayed.draft_forwards[p] == output.stats.draft_forwards
        assert replayed.verified_nodes[p] == sum(output.stats.verified_nodes)
    with_draft = replay(trace, parse_policy(tree | {"skip_draft_above": 1.0}), free_prices())
    assert (with_draft.draft_forwards >= with_draft.rounds).all()
    assert replayed.draft_forwards.sum() < 0.9 * with_draft.draft_forwards.sum(), "no round was free of drafting"


@pytest.mark.parametrize("name", ["digits", "code"])
def test_workload_splits_share_no_prompt(name):
    tune, evaluate = (load_workload(name, split, num_prompts=64) for split in ("tune", "evaluate"))
    assert isinstance(tune, Workload)
    assert not {prompt.sha256 for prompt in tune.prompts} & {prompt.sha256 for prompt in evaluate.prompts}
