"""Times plain steps and rounds on a GPU: targets of published sizes and their EAGLE-3 heads, with random weights.

Latency does not depend on weights. A random head is hardly ever right, so a round emits about one token; its time is
the decoding time over the number of rounds. Trees are decoded in turns and in random order; the median over
``--repeats`` requests is printed.

    PYTHONPATH=. python benchmarks/gpu_rounds.py [--target llama] [--prompt-tokens 600] [--tokens 24] [--kernels]

It takes about 2 minutes for each target.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen2_5_VLConfig

from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.drafters.checkpoint import load_draft
from autotune.execution import CUDA_GRAPH, EAGER
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.loading import load_model
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder

LLAMA = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
QWEN = {
    **{"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000},
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}
TARGETS: dict[str, Any] = {
    "llama": (LlamaConfig(**LLAMA, dtype="bfloat16"), "SpecForge/llama3-8B"),
    "qwen-vl": (Qwen2_5_VLConfig(text_config=QWEN, dtype="bfloat16"), "SpecForge/qwen2-5-vl-7b"),
}
"""Configs of Llama-3.1-8B and Qwen2.5-VL-7B, and the published configs of their heads."""
HEADS = Path(__file__).parents[1] / "tests/drafters/published_eagle3.json"
LOGIT_STD = (
    6.0  # of the head's logits: its probabilities are then as peaked as those of a trained head, and trees as deep
)
TREES = ("chain", "dream", "eagle2", "sage", "wetap")


def write_head(folder: Path, config: dict[str, Any], device: str) -> Path:
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
        else (torch.randn(*shape, device=device) * (LOGIT_STD if name == "lm_head" else 1) * shape[1] ** -0.5)
        .bfloat16()
        .cpu()
        for name, shape in shapes.items()
    }
    kept = torch.arange(vocabulary)
    tensors |= {"d2t": torch.zeros_like(kept), "t2d": torch.arange(config["vocab_size"]) < vocabulary}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def time_requests(
    decoders: dict[str, Decoder], inputs: dict[str, Any], settings: dict[str, Any], repeats: int
) -> dict[str, tuple[float, float, float]]:
    """By decoder: milliseconds a round, draft levels and nodes a round; medians over requests."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in decoders}
    for repeat in range(repeats + 1):
        for name in random.Random(repeat).sample([*decoders], len(decoders)):
            stats = decoders[name].generate(**inputs, **settings, seed=repeat).stats
            if repeat:  # the first is a warm-up
                total = (stats.decode_ms - stats.draft_prefill_ms, stats.draft_forwards, sum(stats.verified_nodes))
                ms, levels, nodes = (value / stats.rounds for value in total)
                found[name].append((ms, levels, nodes))
    return {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in found.items()}


def print_kernels(decoder: Decoder, inputs: dict[str, Any]) -> None:
    """Print the kernels that take the most time of a few rounds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        stats = decoder.generate(**inputs, max_new_tokens=9, min_new_tokens=9, temperature=0.0).stats
    click.echo(f"{stats.rounds} rounds, decoded in {stats.decode_ms:.1f} ms while profiled, prefill included:")
    click.echo(profiled.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70))


@click.command()
@click.option(
    "--target", "targets", multiple=True, type=click.Choice([*TARGETS]), default=[*TARGETS], show_default=True
)
@click.option(
    "--prompt-tokens", "lengths", multiple=True, default=[600], show_default=True, help="Tokens of the prompt."
)
@click.option("--tokens", default=24, show_default=True, help="Tokens of an answer.")
@click.option("--repeats", default=3, show_default=True, help="Timed requests of each decoder.")
@click.option("--kernels", is_flag=True, help="Also print which kernels take the time of captured rounds.")
@click.option("--device", default="cuda:0", show_default=True)
def main(
    targets: tuple[str, ...], lengths: tuple[int, ...], tokens: int, repeats: int, kernels: bool, device: str
) -> None:
    """Print a table for every target and length."""
    for name in targets:
        config, head = TARGETS[name]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(Path(folder) / "target")
            target = Target(load_model(str(Path(folder) / "target"), device=device, random_weights=True))
            written = write_head(Path(folder) / "head", json.loads(HEADS.read_text())[head], device)
            draft: Any = load_draft(str(written), target)
        read = target.shape.text_parameters * target.shape.bytes_per_parameter
        click.echo(f"\n{name}, {read / 1e9:.1f} GB of weights read by a step; {torch.cuda.get_device_name(device)}")
        eager = {"eager plain": Decoder(target, None, mode=EAGER)}
        captured = {"plain": Decoder(target, None, mode=CUDA_GRAPH)}
        for tree in TREES:
            eager[f"eager {tree}"] = Decoder(target, draft, tree=PUBLISHED_DEFAULTS[tree].tree, mode=EAGER)
            captured[tree] = Decoder(target, draft, tree=PUBLISHED_DEFAULTS[tree].tree, mode=CUDA_GRAPH)
        for length in lengths:
            inputs = {"input_ids": torch.randint(10, 30000, (1, length), device=device)}
            for one in reversed(captured.values()):  # the largest trees first
                one.prepare(length + tokens)
            memory = graph_memory(target.device)
            click.echo(
                f"\nprompt of {length} tokens; {memory.num_kept} captures, {memory.memory_bytes / 2**30:.2f} GiB"
            )
            settings = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            greedy = time_requests(eager | captured, inputs, {**settings, "temperature": 0.0}, repeats)
            sampled = time_requests(captured, inputs, {**settings, "temperature": 1.0}, repeats)
            nucleus = time_requests(captured, inputs, {**settings, "temperature": 1.0, "top_p": 0.9}, repeats)
            click.echo(
                "| | levels | nodes | eager, ms | captured, ms | T=1 | T=1, top-p 0.9 |\n|---|---|---|---|---|---|---|"
            )
            for tree in captured:
                times = [greedy[f"eager {tree}"], *(found[tree] for found in (greedy, sampled, nucleus))]
                cells = [tree, *(f"{value:.1f}" for value in greedy[tree][1:]), *(f"{one[0]:.2f}" for one in times)]
                click.echo(f"| {' | '.join(cells)} |")
            if kernels:
                for tree in ("plain", "eagle2"):
                    print_kernels(captured[tree], inputs)
        del target, draft, eager, captured, one
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
