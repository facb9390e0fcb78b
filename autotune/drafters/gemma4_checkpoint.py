"""Loads assistants of Gemma 4, which transformers 5.23 cannot build by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from autotune.drafters.gemma4_assistant import Gemma4AssistantDraft
from autotune.modeling.loading import load_model
from autotune.modeling.target import Target


def load_assistant(name: str, target: Target, *, random_weights: bool = False) -> Gemma4AssistantDraft:
    """Load an assistant in its target's precision.

    Raises:
        UserError: as of ``load_model`` and ``attach``, or a checkpoint that lacks weights.
    """
    with keys_of_another_model():
        model = load_model(
            name, device=str(target.device), random_weights=random_weights, dtype=target.dtype, is_complete=True
        )
    draft = Gemma4AssistantDraft(model)
    draft.attach(target)
    return draft


@contextmanager
def keys_of_another_model() -> Iterator[None]:
    """Within the context, transformers builds assistants. Release 5.23 looks for the layers that compute keys and values among
    the assistant's own, of which there are none, and raises.
    """
    with ExitStack() as stack:
        for config_type in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            original: Any = config_type.kv_sharing_modes

            def modes(config: Any, original: Any = original) -> list[str | None]:
                if config.num_kv_shared_layers == config.num_hidden_layers:
                    return ["reuse"] * config.num_hidden_layers
                return original.fget(config)  # type: ignore[no-any-return]

            stack.callback(setattr, config_type, "kv_sharing_modes", original)
            config_type.kv_sharing_modes = property(modes)
        yield
