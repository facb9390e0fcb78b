"""Decode a prompt with a decoding profile: all at once, and token by token.

Usage: python examples/decode_with_profile.py profile.json grid.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

import autotune


def main(profile: Path, image: Path) -> None:
    decoder = autotune.load(profile)
    processor = decoder.processor
    picture = {"type": "image", "image": Image.open(image)}
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [picture, {"type": "text", "text": "Sort each row."}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )

    output = decoder.generate(**inputs, max_new_tokens=128)  # temperature=, top_p=, top_k=, seed=
    new_tokens = output.sequences[0, output.stats.prompt_tokens :]
    print(processor.decode(new_tokens, skip_special_tokens=True))
    print(f"{output.stats.rounds} rounds, {output.stats.tokens_per_round:.2f} tokens per round")

    for token in decoder.stream(**inputs, max_new_tokens=128):
        print(processor.decode([token]), end="", flush=True)
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
