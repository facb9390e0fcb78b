"""Use a decoding profile inside Hugging Face's ``generate``: the same tokens, fewer forward passes.

Usage: python examples/transformers_generate.py profile.json "prompt"
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import autotune


def main(profile: Path, prompt: str) -> None:
    decoder = autotune.load(profile)
    model, processor = decoder.target_model, decoder.processor
    inputs = processor(text=prompt, return_tensors="pt")

    plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    speculative = model.generate(**inputs, max_new_tokens=64, do_sample=False, custom_generate=decoder)

    assert torch.equal(plain, speculative), "speculative decoding changes no token"
    print(processor.decode(speculative[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
