"""Targets that the processes of torchrun hold together, and the loop of the processes that follow rank 0."""

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
from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.loading import DEVICE_MAP, META, Dtype, load_model, reference
from autotune.modeling.ranks import FAILURE, Ranks, is_transport, join_ranks, joined
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
    ranks.send("load", name, dtype)
    return _shard(ranks, name, dtype, console)


def _shard(ranks: Ranks, name: str, dtype: Dtype | None, console: Console | None = None) -> Target:
    """This process's part of a target, which all processes load at the same time."""
    ranks.require_same({"versions of autotune": version_of(DISTRIBUTION), f"files of {name}": reference(name).sha256})
    target = Target(load_model(name, device=str(ranks.device), dtype=dtype, num_shards=ranks.size, console=console))
    target.ranks = ranks
    return target


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
    """Run what rank 0 sends."""
    target: Any = None
    while True:
        operation, arguments = ranks.receive()
        if operation == "load":
            del target
            target = _shard(ranks, *arguments)
        elif operation == "generate":
            inputs, settings, seed = arguments
            torch.manual_seed(seed)
            target.model.generate(**inputs, **settings)
        elif operation == "step":
            _run_step(target, *arguments)
        else:
            getattr(target, operation)(*arguments)


def _run_step(
    target: Target, layout: Layout, integers: Ints, moves: list[int], is_captured: bool, is_new: bool
) -> None:
    """Run a packed step after the moves of the cache."""
    cache = target.cache
    while moves:
        (cache.length, count), moves = moves[:2], moves[2:]
        cache.keep(moves[:count])
        moves = moves[count:]
    target.use_mode(CUDA_GRAPH if is_captured else FIXED)
    runner, key = target.graph_runner, GraphKey(layout)
    assert runner is not None
    if is_new:
        runner.forget(key)
    forward = runner.prepared(key)
    forward.integers[:] = integers
    runner.launch(forward, partial(target._forward_over_buffers, key))
