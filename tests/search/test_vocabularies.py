"""Cut vocabularies: drafts that propose only the most frequent tokens, in subnets, cost tables and search spaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.mtp import MtpNetwork
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.recording.traces import record_trace, recorder_of
from autotune.replay.trace import ForestBounds
from autotune.runtime.decoder import Decoder
from autotune.runtime.model_pool import ModelPool
from autotune.workloads.workload import Workload, load_workload
from tests.drafters.test_feature_draft import KINDS, agreeing_draft
from tests.sample_documents import cost_table, write_image, write_workload
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair

SHARE = 0.5


@pytest.fixture(scope="module")
def folders(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft of each kind; in training, the target emitted odd tokens more often."""
    found = {}
    for kind in KINDS:
        found[kind] = tmp_path_factory.mktemp(kind)
        with torch.inference_mode():
            network: Any = agreeing_draft(kind, Target(pair.target), injection_layer=4).network
            network.token_frequencies = torch.arange(VOCABULARY_SIZE) % 2 + 1.0
            network.save(found[kind])
    found["mtp"] = tmp_path_factory.mktemp("mtp")
    head = MtpNetwork.new({}, Target(pair.target), source="")
    head.token_frequencies = torch.arange(VOCABULARY_SIZE) % 2 + 1.0
    head.save(found["mtp"])
    return found


def loaded(folder: Path, target: Target, **choices: Any) -> FeatureDraft:
    draft = load_draft(str(folder), target, Subnet(**choices))
    assert isinstance(draft, FeatureDraft)
    return draft


@torch.inference_mode()
@pytest.mark.parametrize("kind", [*KINDS, "mtp"])
def test_proposals_are_those_of_the_whole_vocabulary_among_frequent_tokens(
    pair: Pair, folders: dict[str, Path], kind: str
) -> None:
    """Their probabilities add up to one over these tokens."""
    target = Target(pair.target)
    whole, cut = loaded(folders[kind], target), loaded(folders[kind], target, vocabulary=SHARE)
    frequent = np.arange(1, VOCABULARY_SIZE, 2)
    torch.manual_seed(0)
    states = torch.randn(5, whole.network.config.width)
    logits = whole.logits(states)[:, frequent]
    expected = logits.float().log_softmax(-1).topk(4)
    tokens, logprobs = cut.best(cut.logits(states), 4)
    assert tokens.tolist() == frequent[expected.indices].tolist()
    np.testing.assert_allclose(logprobs, expected.values, rtol=1e-5)
    cut_head = cut.head_parameters
    assert whole.num_parameters + cut_head == cut.num_parameters
    assert whole.shape.text_parameters - cut.shape.text_parameters == whole.head_parameters - cut_head > 0


@pytest.mark.parametrize("kind", [*KINDS, "mtp"])
def test_decoding_with_a_cut_vocabulary_is_lossless(
    pair: Pair, prompts: dict[str, Inputs], folders: dict[str, Path], kind: str
) -> None:
    """Greedy and sampled, on the host and over fixed buffers. A sampled draft is coupled in the target's vocabulary."""
    target = Target(pair.target)
    plain = Decoder(target)
    draft = loaded(folders[kind], target, vocabulary=SHARE)
    num_accepted = 0
    for mode in ("eager", "fixed"):
        decoder = Decoder(target, draft, tree={"policy": "eagle2", "depth": 3, "k": 3, "budget": 8}, mode=mode)
        for settings in ({}, {"temperature": 0.8, "seed": 3}):
            inputs: dict[str, Any] = {**prompts["image"], "max_new_tokens": 24, **settings}
            found = decoder.generate(**inputs)
            assert torch.equal(found.sequences, plain.generate(**inputs).sequences)
            num_accepted += sum(found.stats.accepted_lengths)
    assert num_accepted > 0 or kind == "mtp", "a new head agrees with nothing"
    assert draft.subnet.vocabulary == SHARE


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("workload")
    image = write_image(folder / "0.png", 0)
    lines = [{"split": "tune", "max_new_tokens": 16, "prompt": "And 2?", "images": [image]}]
    return load_workload(str(write_workload(folder, lines)), "tune")


def test_traces_propose_frequent_tokens(
    pair: Pair, folders: dict[str, Path], workload: Workload, tmp_path: Path
) -> None:
    pool = ModelPool(str(pair.target_folder), [str(folders["star"])], "cpu")
    (star,) = pool.references
    bounds = ForestBounds(depth=2, num_proposals=3)
    trace = record_trace(recorder_of(pool, tmp_path), pool, (star, Subnet(vocabulary=SHARE)), workload, bounds)
    proposed = trace.forest.child_token[trace.forest.child_logprob > -np.inf]
    assert trace.header.subnet.vocabulary == SHARE and len(proposed) > 0 and (proposed % 2 == 1).all()


@pytest.mark.parametrize(
    ("subnet", "name"), [({"vocabulary": SHARE}, "vocabulary-0.5"), ({"weights": "float8"}, "weights-float8")]
)
def test_a_cost_table_prices_vocabularies_and_weights_apart(subnet: dict[str, Any], name: str) -> None:
    table, other = cost_table(), Subnet(vocabulary=0.25, weights="float8")
    (whole, *_) = table.drafts
    cut = whole.model_copy(update={"subnet": Subnet(**subnet)})
    both = table.model_copy(update={"drafts": [*table.drafts, cut]})
    assert both.costs_of(whole.draft, Subnet(**subnet)) is cut and both.costs_of(whole.draft) is whole
    assert cut.name == f"{whole.name} {name}"
    with pytest.raises(UserError, match=r"vocabulary=0\.25.* it has: .*; measure that draft first"):
        both.costs_of(whole.draft, other)


@pytest.mark.parametrize(
    ("kind", "subnet", "message"),
    [
        ("dream", {"vocabulary": SHARE}, r"dream draft has no token frequencies.* got vocabulary 0\.5; leave it out"),
        ("dream", {"operator": "pool"}, "only a specvlm draft compresses visual tokens; got operator pool for dream"),
        (
            "specvlm",
            {"operator": "convolve", "operator_ratio": 5},
            "only prune and pool have a ratio to choose; got 5 for convolve",
        ),
        *(
            ("independent", subnet, "leave heads, injection_layer, operator, vocabulary and weights out")
            for subnet in ({"vocabulary": SHARE}, {"operator": "pool"}, {"weights": "float8"})
        ),
    ],
)
def test_subnets_that_a_draft_does_not_have_are_refused(
    pair: Pair, tmp_path: Path, kind: str, subnet: dict[str, Any], message: str
) -> None:
    target, folder = Target(pair.target), pair.draft_folder
    if kind != "independent":
        folder = tmp_path
        with torch.inference_mode():
            agreeing_draft(kind, target, injection_layer=4).network.save(folder)  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        load_draft(str(folder), target, Subnet(**subnet))


def test_only_plain_heads_are_cut(pair: Pair, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherLinear(torch.nn.Linear):
        """As a quantized layer, whose rows cannot be copied."""

    target = Target(pair.target)
    size, vocabulary = target.text.config.hidden_size, target.vocab_size
    monkeypatch.setattr(pair.target, "get_output_embeddings", lambda: OtherLinear(size, vocabulary))
    with pytest.raises(UserError, match=r"plain linear output head .* this one is OtherLinear; leave vocabulary out"):
        loaded(folders["star"], Target(pair.target), vocabulary=SHARE)
