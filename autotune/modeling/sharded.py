"""Targets and independent drafts that processes of torchrun hold together, and the loop of those that follow rank 0."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import torch

from autotune.console import Console
from autotune.documents.execution import CUDA_GRAPH, FIXED
from autotune.documents.provenance import DISTRIBUTION, version_of
from autotune.errors import UserError, first_line
from autotune.modeling.gguf import find_gguf
from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.loading import DEVICE_MAP, META, SHARD_DRAFT, Dtype, load_model, reference
from autotune.modeling.quantization import quantization_of
from autotune.modeling.ranks import FAILURE, Ranks, is_transport, join_ranks, joined
from autotune.modeling.shard_plan import shard_plan
from autotune.modeling.step import Layout
from autotune.modeling.target import Target
from autotune.trees.limits import Ints

FAULT = 70  # exit code of a follower that fails


def load_target(
    name: str,
    *,
    device: str = "cpu",
    dtype: Dtype | None = None,
    random_weights: bool = False,
    console: Console | None = None,
) -> Target:
    """Load a target; where torchrun has started several processes, as their shards. Arguments as of ``load_model``.

    Raises:
        UserError: the target cannot be loaded or divided, or the processes differ in their files.
    """
    ranks, device_map = joined(), os.environ.get(DEVICE_MAP)
    if ranks is None and SHARD_DRAFT in os.environ:
        raise UserError(
            "--shard-draft divides a draft among the processes of torchrun; start the command with torchrun "
            "--nproc-per-node N -m autotune, or leave --shard-draft out"
        )
    if ranks is None or device == META:
        device_map = None if device == META else device_map
        options: dict[str, Any] = {"dtype": dtype, "random_weights": random_weights, "device_map": device_map}
        target = Target(load_model(name, device=device, console=console, **options))
        if device_map is not None and console is not None:
            console.say(
                f"{name}: its layers are on {target.num_devices} devices, which compute one after the other, eagerly; "
                "torchrun --nproc-per-node N -m autotune lets them divide each layer, and compute at the same time"
            )
        return target
    if device_map is not None:
        raise UserError("--device-map auto and torchrun are two ways to use several GPUs; give one of them")
    if random_weights:
        raise UserError(f"{name}: weights made at random are not divided; leave --random-weights or torchrun out")
    if torch.device(device) != ranks.device:
        raise UserError(f"device {device}: under torchrun each process uses its own, {ranks.device} here; give auto")
    ranks.num_drafts = 0
    ranks.send("load", name, dtype)
    target = Target(_shard(ranks, name, dtype, console))
    target.ranks = ranks
    return target


def load_draft_model(
    name: str, target: Target, *, dtype: Dtype | None = None, random_weights: bool = False
) -> tuple[Any, Ranks | None]:
    """Load the model of an independent draft; returns the processes that divide it too, which do so where they divide
    the target and ``--shard-draft`` is given. Arguments as of ``load_model``.

    Raises:
        UserError: the model cannot be loaded or divided.
    """
    ranks = target.ranks
    if ranks is None or SHARD_DRAFT not in os.environ:
        return load_model(name, device=str(target.device), dtype=dtype, random_weights=random_weights), None
    # The others end where they cannot load a model, so that this process looks first.
    empty = load_model(name, device=META, random_weights=True)
    shard_plan(empty, name, ranks.size, is_whole=find_gguf(name) is None and quantization_of(empty.config) is None)
    ranks = ranks.of_next_draft()
    ranks.send("load", name, dtype)
    return _shard(ranks, name, dtype), ranks


def require_no_shards(name: str, kind: str) -> None:
    """Refuse ``--shard-draft`` for a draft that is not independent."""
    if SHARD_DRAFT in os.environ:
        raise UserError(
            f"{name}: --shard-draft divides independent drafts, and this one is of kind {kind}; leave --shard-draft out"
        )


def _shard(ranks: Ranks, name: str, dtype: Dtype | None, console: Console | None = None) -> Any:
    """This process's part of a model, which all processes load at the same time."""
    ranks.require_same({"versions of autotune": version_of(DISTRIBUTION), f"files of {name}": reference(name).sha256})
    return load_model(name, device=str(ranks.device), dtype=dtype, num_shards=ranks.size, console=console)


def lead_or_follow() -> None:
    """Join the other processes of torchrun. Rank 0 returns, to run its verb; the others follow it until it ends, and
    leave all messages to it.
    """
    if os.environ.get("RANK", "0") == "0":
        join_ranks()
        return
    warnings.simplefilter("ignore")
    code = 0
    try:
        _follow(join_ranks())
    except UserError:
        pass  # rank 0 has met the same
    except Exception as error:
        if (ranks := joined()) is not None and not is_transport(error):
            ranks.store.set(FAILURE, f"process {ranks.rank}: {first_line(error)}")
            code = FAULT
    os._exit(code)  # nothing is left to do, and NCCL may wait for a process that is gone


@torch.inference_mode()
def _follow(ranks: Ranks) -> None:
    """Run what rank 0 sends, of the target and of drafts, whose layers alone are run here."""
    models: list[Any] = []
    while True:
        operation, number, arguments = ranks.receive()
        if operation == "load":
            del models[number:]
            models.append(Target(_shard(ranks, *arguments)))
            models[number].ranks = ranks
        elif operation == "generate":
            inputs, settings, seed = arguments
            torch.manual_seed(seed)
            models[number].model.generate(**inputs, **settings)
        elif operation == "step":
            _run_step(models[number], *arguments)
        else:
            getattr(models[number], operation)(*arguments)


def _run_step(model: Target, layout: Layout, integers: Ints, moves: list[int], is_captured: bool, is_new: bool) -> None:
    """Run a packed step after the moves of the cache."""
    cache = model.cache
    while moves:
        (cache.length, count), moves = moves[:2], moves[2:]
        cache.keep(moves[:count])
        moves = moves[count:]
    model.use_mode(CUDA_GRAPH if is_captured else FIXED)
    runner, key = model.graph_runner, GraphKey(layout)
    assert runner is not None
    if is_new:
        runner.forget(key)
    forward = runner.prepared(key)
    forward.integers[:] = integers
    runner.launch(forward, partial(model._forward_over_buffers, key))
