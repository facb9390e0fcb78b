"""Answers of llama.cpp with a GGUF file beside those of the dequantized model: how many are equal, and where the first
difference lies.

    python benchmarks/gguf_answers.py smollm2 .autotune/engines/KEY/plain.jsonl [--dtype float32]

The file holds the plain answers that ``autotune search --backend llama.cpp`` recorded. One forward pass over each gives
the greedy choice of the dequantized model after every prefix, so that its first other choice is where greedy decoding
would leave llama.cpp's answer. Takes about 20 seconds for 24 answers of a model of 135M parameters.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from autotune.engines.served import Served
from autotune.files import read_lines


@click.command(help=__doc__)
@click.argument("target")
@click.argument("answers", type=click.Path(exists=True, path_type=Path))
@click.option("--dtype", default="float32", show_default=True)
def main(target: str, answers: Path, dtype: str) -> None:
    import torch

    from autotune.modeling.loading import load_model

    model = load_model(target, dtype=dtype)
    firsts, gaps, same, total = [], [], 0, 0
    for row in read_lines(answers):
        answer = Served.model_validate(row)
        with torch.inference_mode():
            logits = model(torch.tensor([[*answer.prompt_tokens, *answer.tokens]])).logits[0].float()
        chosen = torch.tensor(answer.tokens)
        at_answer = logits[len(answer.prompt_tokens) - 1 : -1]
        others = (at_answer.argmax(-1) != chosen).nonzero().flatten().tolist()
        total, same = total + len(chosen), same + len(chosen) - len(others)
        if others:
            firsts.append(others[0])
            gaps.append(float(at_answer[others[0]].max() - at_answer[others[0], chosen[others[0]]]))
        first = f"first difference at token {others[0]}, logits {gaps[-1]:.3f} apart" if others else "equal"
        print(f"{len(chosen)} tokens after {len(answer.prompt_tokens)}: {first}")
    count = len(list(read_lines(answers)))
    print(
        f"{count - len(firsts)} of {count} answers equal; {100 * same / total:.1f} % of {total} tokens are the greedy choice after llama.cpp's text"
    )
    if firsts:
        print(
            f"first differences at token {min(firsts)} to {max(firsts)}, median {np.median(firsts):.0f}; logits there {min(gaps):.3f} to {max(gaps):.3f} apart"
        )


if __name__ == "__main__":
    main()
