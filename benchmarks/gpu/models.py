"""Models of the GPU battery, of published sizes and with random weights, and the arms that decode with them.

Latency does not depend on weights. A random head is hardly ever right, so a round emits about one token, and its time
is the decoding time over the number of rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen2_5_VLConfig

from autotune.documents.execution import CUDA_GRAPH, EAGER
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.modeling.loading import load_model
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from benchmarks.gpu.stage import DEVICE, ROOT, Job

LLAMA = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
QWEN = {
    **{"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000},
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}
TINY = {
    **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
TINY_ROTARY = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
TINY_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
CONFIGS: dict[str, Callable[[bool], Any]] = {
    "Llama-3.1-8B": lambda dry: LlamaConfig(**{**LLAMA, **(TINY if dry else {})}, dtype="bfloat16"),
    "Qwen2.5-VL-7B": lambda dry: Qwen2_5_VLConfig(
        text_config={**QWEN, **({**TINY, "rope_parameters": TINY_ROTARY} if dry else {})},
        vision_config={**TINY_VISION, "fullatt_block_indexes": [0]} if dry else None,
        dtype="bfloat16",
    ),
}
"""Configs of the targets; those of a dry run are tiny."""
HEADS = {"Llama-3.1-8B": "SpecForge/llama3-8B", "Qwen2.5-VL-7B": "SpecForge/qwen2-5-vl-7b"}
"""Published configs of their EAGLE-3 heads, in ``tests/drafters/published_eagle3.json``."""
LOGIT_STD = 6.0
"""Standard deviation of a head's logits: as peaked as those of a trained head, so that trees are as deep."""
PLAIN = "plain"
TREES: dict[str, Any] = {
    **{name: PUBLISHED_DEFAULTS[name].tree for name in ("chain", "dream", "eagle2", "sage", "wetap")},
    "priced": {"policy": "priced"},
}


def reference_attention() -> AbstractContextManager[Any]:
    """While it is entered, captures attend by SDPA with masks, as where Triton is missing."""
    reason = "the reference was asked for"
    return mock.patch("autotune.modeling.tree_attention.why_no_triton", lambda *_: reason)


@dataclass(frozen=True)
class Switch:
    """A way to run the same decoder."""

    mode: str = CUDA_GRAPH
    subnet: dict[str, Any] = field(default_factory=dict)
    """Sizes of the draft."""
    preparing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered while forward passes are captured."""


SWITCHES = {
    "base": Switch(),  # in a process whose package is that of ``--base``
    "captured": Switch(),
    "masks": Switch(preparing=reference_attention),
    "compiled": Switch("compiled"),
    "float8": Switch("compiled", {"weights": "float8"}),
    "eager": Switch(EAGER),
}


def write_models(job: Job, name: str) -> str:
    """Write the config of a target and its head, with weights, into the working folder, if they are not there. The
    target's folder has its name; returns that of the head.
    """
    head = f"{name}-EAGLE3"
    if not Path(head).exists():
        published = json.loads((ROOT / "tests/drafters/published_eagle3.json").read_text())[HEADS[name]]
        tiny = {**TINY, "head_dim": 16, "draft_vocab_size": 256, "rope_scaling": TINY_ROTARY if "VL" in name else None}
        CONFIGS[name](job.dry).save_pretrained(name)
        write_head(Path(head), {**published, **(tiny if job.dry else {})})
    return head


def write_head(folder: Path, config: dict[str, Any]) -> None:
    """Write an EAGLE-3 head of the config's size with random weights in bfloat16."""
    hidden, mlp, vocabulary = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj": (query, 2 * hidden),
        **{f"midlayer.self_attn.{name}_proj": (kv, 2 * hidden) for name in ("k", "v")},
        "midlayer.self_attn.o_proj": (hidden, query),
        **{f"midlayer.mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj": (hidden, mlp),
        **{f"midlayer.{name}": (hidden,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "fc": (hidden, 3 * hidden),
        "norm": (hidden,),
        "lm_head": (vocabulary, hidden),
    }
    tensors = {
        f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(*shape, device=DEVICE) * (LOGIT_STD if name == "lm_head" else 1) * shape[1] ** -0.5)
        .bfloat16()
        .cpu()
        for name, shape in shapes.items()
    }
    kept = torch.arange(vocabulary)
    tensors |= {"d2t": torch.zeros_like(kept), "t2d": torch.arange(config["vocab_size"]) < vocabulary}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def load_random(job: Job, name: str, **options: Any) -> Any:
    """Load a target, one of ``CONFIGS`` with random weights, on the device; on the CPU first where it is rehearsed."""
    write = name in CONFIGS and write_models(job, name)
    options = {**options, "device": "cpu" if job.dry else DEVICE, "random_weights": bool(write)}
    return load_model(name, **options).to(DEVICE)


def decoders(model: Any, head: str, switch: Switch, trees: Iterable[str]) -> Iterator[tuple[str, Decoder]]:
    """A decoder for plain steps and one for each tree. Captures belong to a ``Target``, so each switch has its own."""
    target = Target(model)
    draft: Any = load_draft(head, target, Subnet(**switch.subnet))
    yield PLAIN, Decoder(target, None, mode=switch.mode)
    for tree in trees:
        yield tree, Decoder(target, draft, tree=TREES[tree], mode=switch.mode)
