"""The target's embeddings of a prompt, against the hidden states of the model itself."""

from __future__ import annotations

import torch

from autotune.modeling.target import Target
from tests.tiny_models import Inputs, Pair


def test_embeddings_are_the_input_of_the_first_layer(pair: Pair, text_pair: Pair, prompts: dict[str, Inputs]) -> None:
    """With and without images, and in a text model, whose prompts hold tokens only."""
    for model, names in ((pair.target, ["text", "image", "long"]), (text_pair.target, ["text"])):
        target = Target(model)
        for name in names:
            with torch.inference_mode():
                (prompt,) = target.encode(prompts[name]).prompts
                expected = model(**prompts[name], output_hidden_states=True).hidden_states[0][0]
                torch.testing.assert_close(target.embeddings(prompt), expected)
            assert (prompt.embeddings is None) == (model is text_pair.target)
