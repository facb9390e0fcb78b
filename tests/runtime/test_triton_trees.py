"""Triton kernels grow, prune, verify and accept as torch's operations do, bit for bit.

Without a GPU the kernels run in Triton's interpreter, in a process of its own: the interpreter is chosen by an environment
variable that must be set before Triton is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from autotune.runtime.tree_operations import Proposals, grown
from autotune.runtime.tree_selection import first_difference
from autotune.trees.policy import parse_policy
from tests.rehearsal import Rehearsal
from tests.runtime.test_device_rounds import SETTINGS, watch_trees
from tests.runtime.test_device_rounds import TREES as SMALL_TREES
from tests.runtime.test_device_trees import DRAFTS, ROOT_TOKEN, TREES, grown_on_device, without_empty_nodes
from tests.runtime.test_tree_selection import tensor_trees
from tests.tiny_models import Inputs, Pair, inputs_on, on_device

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
RUNS_KERNELS = IN_INTERPRETER or torch.cuda.is_available()
runs_kernels = pytest.mark.skipif(not RUNS_KERNELS, reason="run by test_kernels_in_the_interpreter")
needs_interpreter = pytest.mark.skipif(not IN_INTERPRETER, reason="run by test_kernels_in_the_interpreter")
DEVICE = torch.device("cpu" if IN_INTERPRETER else "cuda")


@pytest.mark.skipif(RUNS_KERNELS, reason="the kernels run in this process")
def test_kernels_in_the_interpreter() -> None:
    """The other tests of this module, those of the nightly tests left out."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not nightly", __file__]
    done = subprocess.run(command, env=env | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-8000:] + done.stderr[-2000:]


@runs_kernels
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: "-".join(str(v) for v in tree.values())[:40])
def test_trees_of_drafts_are_those_of_torch_s_operations(tree: dict[str, Any]) -> None:
    """The trees are those of ``test_device_trees``, and so of the compiled policies."""
    from autotune.runtime.triton_trees import triton_trees

    drafts = DRAFTS if num_pairs(tree) < 5_000 else DRAFTS[-2:]
    kernels = triton_trees(tensor_trees(tree, DEVICE))
    for draft in (without_empty_nodes(draft) for draft in drafts):
        expected, proposals = grown_on_device(tree, draft)
        given = [Proposals(*(values.to(DEVICE) for values in one)) for one in proposals]
        found = grown(kernels, given, torch.tensor([ROOT_TOKEN], device=DEVICE)).packed_tree
        assert torch.equal(found.cpu(), expected.packed)


def num_pairs(tree: dict[str, Any]) -> int:
    """Pairs of candidates that a level compares, by which the interpreter's time grows."""
    policy = parse_policy(tree)
    return (policy.limits.nodes + policy.limits.width * policy.num_proposals) ** 2


@runs_kernels
def test_random_trees_are_equal_in_every_field() -> None:
    from autotune.runtime.triton_trees import triton_trees

    for number, tree in enumerate(tree for tree in TREES if num_pairs(tree) < 5_000):
        dtype = (torch.bfloat16, torch.float16, torch.float32, torch.float64)[number % 4]
        trees = tensor_trees(tree, DEVICE, padding=number % 3, dtype=dtype)
        assert first_difference(trees, triton_trees(trees), num_trees=2, seed=number) is None, tree


@pytest.mark.nightly
@runs_kernels
def test_random_policies_grow_equal_trees() -> None:
    from autotune.runtime.triton_trees import triton_trees

    rng = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    for number in range(150):
        floor = [0.0, 0.0, 0.01, 0.25][draw(0, 3)]
        tree = {"policy": "eagle2", "depth": draw(1, 6), "k": draw(1, 16), "budget": draw(1, 128), "floor": floor}
        trees = tensor_trees(tree, DEVICE, padding=draw(0, 9))
        assert first_difference(trees, triton_trees(trees), num_trees=2, seed=number) is None, tree


NIGHTLY = [pytest.param(name, (0, 1), marks=pytest.mark.nightly) for name in ("eagle2", "eagle2-tight")]


@needs_interpreter
@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
@pytest.mark.parametrize(("name", "settings"), [("chain", (0,)), ("static", (1,)), ("eagle2-floor", (0, 1)), *NIGHTLY])
def test_rounds_on_a_rehearsed_device(
    pair: Pair, prompts: dict[str, Inputs], name: str, settings: tuple[int, ...]
) -> None:
    """Captured rounds emit the same tokens and verify the same trees, on a device that is not the current one."""
    found: list[list[Any]] = []
    for has_triton in (False, True):
        with Rehearsal(triton=has_triton) as rehearsal:
            there, outputs = on_device(pair, "cuda:1"), []
            decoder = Decoder(
                Target(there.target),
                as_draft(there.draft),
                tree=SMALL_TREES[name],
                mode="cuda-graph",
                capture_sizes=(1, 8),
            )
            trees = watch_trees(decoder)
            for number in settings:
                inputs = inputs_on(prompts["text"], "cuda:1")
                output = decoder.generate(**inputs, max_new_tokens=8, **SETTINGS[number])
                outputs.append((output.sequences.tolist(), output.stats.accepted_lengths))
            assert rehearsal.counts.captures > 0
            assert sum(sum(lengths) for _, lengths in outputs) > 0, "nothing was accepted"
            found.append([*outputs, trees])
    assert found[0] == found[1]


class Operations(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", SMALL_TREES)
def test_each_operation_is_one_kernel_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import triton_trees

    trees, launches = tensor_trees(SMALL_TREES[name]), []
    kernels = triton_trees.triton_trees(trees)
    proposals = [Proposals(torch.zeros(shape).long(), torch.zeros(shape)) for shape in trees.proposal_shapes]
    root, target_tokens = torch.zeros(1).long(), torch.zeros(trees.grower.num_nodes + 1).long()
    monkeypatch.setattr(triton_trees, "_launch", lambda kernel, *args, **options: launches.append(kernel.__name__))
    with Operations() as operations:
        packed_tree = grown(kernels, proposals, root).packed_tree
        kernels.verification_step(packed_tree)
        kernels.accepted(packed_tree, target_tokens)
    kind = "eagle2" if name.startswith("eagle2") else "fixed"
    levels = [f"grow_{kind}"] * len(proposals)
    assert launches == [*levels, f"prune_{kind}", "verification_step", "accept"]
    assert operations.count == 0


@pytest.mark.nightly
@pytest.mark.skipif(IN_INTERPRETER, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_kernels_compile_for_gpus(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No register is spilled by trees of usual size, and few by the largest; every GPU has the shared memory."""
    from benchmarks import tree_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, tree in tree_kernels.TREES.items():
        usages = tree_kernels.compiled_usage(tree, target)
        assert len(usages) == 4
        for kernel, usage in usages.items():
            assert usage.spilled_bytes <= (512 if "largest" in name else 0), (name, kernel, usage)
            assert usage.shared_bytes <= 32 << 10, (name, kernel, usage)
