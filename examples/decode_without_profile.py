"""Decode with a draft and a tree of your own choice, without a profile, and compare with plain decoding.

Usage: python examples/decode_without_profile.py TARGET DRAFT "prompt"
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import autotune


def main(target_name: str, draft_name: str, prompt: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(target_name)
    draft = AutoModelForCausalLM.from_pretrained(draft_name)
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    inputs = tokenizer(prompt, return_tensors="pt")

    plain = autotune.Decoder(target=target, draft=None)
    speculative = autotune.Decoder(target=target, draft=draft, tree={"policy": "sage", "d_max": 6})
    expected = plain.generate(**inputs, max_new_tokens=64, temperature=0.7, seed=1)
    output = speculative.generate(**inputs, max_new_tokens=64, temperature=0.7, seed=1)

    assert output.sequences.tolist() == expected.sequences.tolist(), "speculative decoding changes no token"
    print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))
    print(
        f"{expected.stats.target_forwards} target forward passes without a draft, {output.stats.target_forwards} with it"
    )


if __name__ == "__main__":
    main(*sys.argv[1:4])
