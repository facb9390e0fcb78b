"""A program that decodes, replays and searches with a policy that is given as JSON: ``test_added_policy.py`` runs it in
a copy of the package with one more policy.

Usage: python -m tests.trees.added_policy FOLDER TREE SPACE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoProcessor

from autotune.drafters.independent import IndependentDraft
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.replay.evaluator import Evaluator
from autotune.replay.replay import replay
from autotune.runtime.decoder import Decoder
from autotune.search.tree_search import search_trees
from autotune.study.ledger import Ledger
from autotune.study.spaces import bounds_of, load_space
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import load_workload
from tests.sample_documents import cost_table, free_prices, write_workload
from tests.tiny_models import vision_pair

PROMPTS = ("Count to ten, then stop.", "Read the digits row by row.", "And row 2?")


def main(folder: Path, tree: dict[str, object], space_path: str) -> None:
    pair = vision_pair(folder)
    target, draft, draft_reference = (
        Target(pair.target),
        IndependentDraft(pair.draft),
        reference(str(pair.draft_folder)),
    )
    processor = AutoProcessor.from_pretrained(pair.target_folder)
    lines = [{"split": "tune", "max_new_tokens": 24, "prompt": prompt} for prompt in PROMPTS]
    workload = load_workload(str(write_workload(folder, lines)), "tune")
    policy, space = parse_policy(tree), load_space(space_path)
    recorder = Recorder(target, reference(str(pair.target_folder)), processor, folder / "records")
    bounds = bounds_of(space)
    trace = recorder.trace(draft, draft_reference, workload, visual_keep=1.0, bounds=bounds)

    replayed = replay(trace, policy, free_prices())
    decoder, plain = Decoder(target, draft, tree=tree), Decoder(target, None)
    for p, prompt in enumerate(workload.prompts):
        inputs = prompt.inputs(processor) | prompt.settings.generation
        output = decoder.generate(**inputs)
        assert output.sequences.tolist() == plain.generate(**inputs).sequences.tolist()
        stats = output.stats
        assert replayed.accepted_lengths[p].tolist() == stats.accepted_lengths
        counted = replayed.rounds[p], replayed.draft_forwards[p], replayed.verified_nodes[p]
        assert counted == (stats.rounds, stats.draft_forwards, sum(stats.verified_nodes))

    evaluator = Evaluator([trace], cost_table(draft_reference), jobs=1)
    result = search_trees(evaluator, space, Ledger(folder / "ledger.db"), num_trials=8, documents="x")
    found = [candidate.configuration.tree for candidate in result.fastest]
    print(json.dumps({"accepted": int(sum(map(sum, replayed.accepted_lengths))), "found": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
