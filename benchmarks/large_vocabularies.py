"""Time of a round that grows with the vocabulary, part by part, at real vocabulary sizes: models with random weights.

The target has the sizes of a published model, the draft is one layer of it. With random weights the draft is hardly
ever right, so that a round visits few rows. Takes five minutes.

    python benchmarks/large_vocabularies.py [--new-tokens 40]
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import click
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedConfig, Qwen2Config

from autotune.drafters import cached_draft
from autotune.drafters.independent import IndependentDraft
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.token_sampler import TokenSampler

CONFIGS: dict[str, Callable[[int], PreTrainedConfig]] = {
    "Qwen2.5-0.5B": lambda layers: Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers or 24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "Gemma 3 1B": lambda layers: Gemma3TextConfig(
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=layers or 26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262_144,
    ),
}
TREE = {"policy": "eagle2", "depth": 4, "k": 8, "budget": 32}
HEADS, PROPOSALS, NOISE, TOKENS = "output heads", "log-softmax and top-k of proposals", "noise", "the target's tokens"


class Timers:
    """Time spent in functions, by part; nested parts are subtracted."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self._nested: list[float] = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._nested.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = 1e3 * (time.perf_counter() - started)
                self.ms[part] += elapsed - self._nested.pop()
                self._nested[-1] += elapsed

        return call


@contextmanager
def timers(*heads: torch.nn.Module) -> Iterator[Timers]:
    found = Timers()
    with ExitStack() as stack:
        for owner, name, part in (
            (cached_draft, "top_proposals", PROPOSALS),
            (TokenSampler, "noise", NOISE),
            (TokenSampler, "token", TOKENS),
            (TokenSampler, "proposal_scores", PROPOSALS),
        ):
            stack.enter_context(patch.object(owner, name, found.timed(part, getattr(owner, name))))
        for head in heads:
            stack.enter_context(patch.object(head, "forward", found.timed(HEADS, head.forward)))
        yield found


@click.command()
@click.option("--new-tokens", default=40, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def main(new_tokens: int, dtype: str) -> None:
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        models = [
            AutoModelForCausalLM.from_config(config(layers), dtype=getattr(torch, dtype)).eval() for layers in (0, 1)
        ]
        target, draft = Target(models[0]), IndependentDraft(models[1])
        millions = sum(weight.numel() for weight in models[0].parameters()) / 1e6
        click.echo(
            f"{name}: {millions:.0f} million parameters, vocabulary of {target.vocab_size}, {dtype}, {torch.get_num_threads()} threads"
        )
        inputs = {"input_ids": torch.randint(0, target.vocab_size, (1, 64)), "max_new_tokens": new_tokens}
        for temperature in (0.0, 1.0):
            settings = {"temperature": temperature, "seed": 1, "do_sample": temperature > 0}
            decoder = Decoder(target, draft, tree=TREE)
            decoder.generate(**{**inputs, "max_new_tokens": 4}, **settings)
            with timers(*(model.get_output_embeddings() for model in models)) as found:
                stats = decoder.generate(**inputs, **settings).stats
            round_ms = (stats.draft_ms + stats.verify_ms + stats.overhead_ms) / stats.rounds
            parts = {
                **{part: ms / stats.rounds for part, ms in found.ms.items()},
                "outside the models": stats.overhead_ms / stats.rounds,
            }
            shares = ", ".join(f"{part} {ms:.2f} ms ({100 * ms / round_ms:.1f} %)" for part, ms in parts.items())
            click.echo(
                f"  T {temperature:g}: {stats.rounds} rounds of {round_ms:.0f} ms, M {stats.tokens_per_round:.2f}: {shares}"
            )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
