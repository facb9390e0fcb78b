"""Ids of models on the Hugging Face Hub that the documentation names, for the spelling of others."""

KNOWN_MODELS: tuple[str, ...] = ()
