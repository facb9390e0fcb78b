"""Processes that hold a target together, as torchrun starts them, forked from a server that has the runtime."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autotune.cli.main import main
from autotune.drafters.checkpoint import load_draft
from autotune.machine.device import fingerprint
from autotune.modeling import sharded
from autotune.modeling.loading import SHARD_DRAFT
from autotune.modeling.sharded import lead_or_follow, load_target
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.cli.processes import PRELOADED
from tests.families import FAMILIES, Family, load, load_processor, random_inputs, save

NEW_TOKENS = 12
sent: list[int] = []
"""Bytes of each broadcast of this process for a request."""


def start(number: int, work: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Start ``work(*arguments)`` in so many processes with the environment of torchrun."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "autotune.modeling.sharded", "tests.sharded.processes"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = []
    for rank in range(number):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": number,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        processes.append(context.Process(target=_start, args=(place, work, arguments)))
        processes[-1].start()
    return processes


def _start(place: dict[str, Any], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    work(*arguments)


@dataclass(frozen=True)
class Request:
    """A request to a decoder."""

    tree: dict[str, Any]
    inputs: dict[str, Any]
    temperature: float
    visual_keep: float = 1.0


@dataclass(frozen=True)
class Reply:
    """The answer, and what a group of processes sent for it."""

    tokens: list[int]
    forwards: int
    draft_forwards: int
    broadcasts: int
    num_bytes: int


def with_heads(name: str, num_heads: int, num_kv_heads: int) -> Family:
    """A family whose text model has other numbers of heads, of 16 numbers each."""
    family, size = FAMILIES[name], 16 * num_heads
    text = {"hidden_size": size, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    vision = family.vision_options | ({"out_hidden_size": size} if "out_hidden_size" in family.vision_options else {})
    return replace(family, text_options={**family.text_options, **text}, vision_options=vision)


def save_family(family: Family, folder: Path, dtype: torch.dtype = torch.float64) -> None:
    """Save target and draft of a family in a data type."""
    save(family, folder)
    for part in ("target", "draft"):
        load(folder / part, dtype=dtype).save_pretrained(folder / part)


def requests_of(family: Family, folder: Path, trees: list[dict[str, Any]], number: int) -> list[Request]:
    """Random requests: each tree at both temperatures, text and what else the family sees in turn."""
    processor, rng = load_processor(family, folder / "target"), np.random.default_rng(3)
    sights = [None, *(sight for sight in family.sees if sight == "image")]
    requests = []
    for index in range(number):
        tree, temperature = trees[index // 2 % len(trees)], float(index % 2)
        inputs = random_inputs(family, processor, rng, sight=sights[index // (2 * len(trees)) % len(sights)])
        requests.append(Request(tree, inputs, temperature, (1.0, 0.5)[index // 2 % 2]))
    return requests


def counted_steps(draft: Any) -> list[Any]:
    """The steps that a draft evaluates from now on."""
    evaluate, steps = draft.evaluate_step, []

    def count(*step: Any) -> Any:
        steps.append(step)
        return evaluate(*step)

    draft.evaluate_step = count
    return steps


def replies(target: Target, folder: Path, requests: list[Request]) -> list[Reply]:
    """Decode requests with the draft of a folder."""
    draft, found, decoders = load_draft(str(folder / "draft"), target), [], {}
    drafted = counted_steps(draft)
    for request in requests:
        key = repr((request.tree, request.visual_keep))
        if key not in decoders:
            decoders[key] = Decoder(target, draft, tree=request.tree, visual_keep=request.visual_keep)
        sent.clear()
        drafted.clear()
        out = decoders[key].generate(
            **request.inputs, max_new_tokens=NEW_TOKENS, temperature=request.temperature, seed=5
        )
        tokens = out.sequences[0, request.inputs["input_ids"].shape[1] :].tolist()
        found.append(Reply(tokens, out.stats.target_forwards, len(drafted), len(sent), sum(sent)))
    return found


def decode_in_ranks(folder: Path, *, with_shards_of_draft: bool = False) -> None:
    """Decode ``folder/requests`` in a process of torchrun; rank 0 writes the replies, or its error, beside them."""
    lead_or_follow()
    if with_shards_of_draft:
        os.environ[SHARD_DRAFT] = "1"
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, source: int) -> None:
        sent.append(tensor.nbytes)
        broadcast(tensor, source)

    dist.broadcast = counted
    requests: list[Request] = pickle.loads((folder / "requests").read_bytes())
    try:
        content: Any = replies(load_target(str(folder / "target")), folder, requests)
    except Exception as error:
        content = str(error)
    (folder / "replies").write_bytes(pickle.dumps(content))
    (folder / "device").write_text(fingerprint("cpu").model_dump_json())


def replies_of_ranks(number: int, folder: Path, requests: list[Request], *, with_shards_of_draft: bool = False) -> Any:
    """The replies of several processes, or the error of rank 0. All of them end."""
    (folder / "requests").write_bytes(pickle.dumps(requests))
    processes = start(number, partial(decode_in_ranks, with_shards_of_draft=with_shards_of_draft), folder)
    for process in processes:
        process.join(timeout=600)
        assert process.exitcode == 0
    return pickle.loads((folder / "replies").read_bytes())


def _run_verb(folder: Path, arguments: list[str]) -> None:
    """Run a verb, whose standard error is ``folder/error`` in rank 0, and a file that nobody expects in others."""
    name = "error" if os.environ["RANK"] == "0" else "error of a follower"
    with (folder / name).open("w", buffering=1) as sys.stderr:
        main(arguments)


def _record(folder: Path) -> None:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    _run_verb(folder, ["record", *pair, "--workload", "chat", "--prompts", "1", "-o", str(folder / "traces")])


def other_version(folder: Path) -> None:
    """Record where one process has another version of the package."""
    if os.environ["RANK"] == "1":
        sharded.version_of = lambda _: "0.0"
    _record(folder)


def failing_follower(folder: Path) -> None:
    """Record where the other process fails in its first step."""

    def fail(*_: Any) -> None:
        raise RuntimeError("the memory is full")

    sharded._run_step = fail
    _record(folder)


def killed_follower(folder: Path) -> None:
    """Record where the other process is killed in its first step."""
    sharded._run_step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    _record(folder)
