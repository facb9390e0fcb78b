"""The drafts and prompts with which a target is tuned where the user names none, found by configs alone. Loads no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.documents.draft_kinds import MTP_PROMISES, is_eagle3, is_own_draft
from autotune.files import read_json
from autotune.modeling.gguf import PACKAGED, gguf_sizes
from autotune.modeling.hub import cached_ids
from autotune.modeling.loading import DEFAULT_DRAFTS, DEFAULT_PAIR, MTP_SUFFIX, RETRIEVAL, bundled_models, resolve
from autotune.workloads.workload import SHIPPED

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin")  # suffixes


def default_workload(target: str) -> str:
    """The prompts for a target: those of a packaged model or of the bundled pair; for other targets the shipped ones,
    with images where the target's config has a vision model.

    Raises:
        UserError: as ``resolve``.
    """
    if target in PACKAGED:
        return target
    if target in bundled_models():
        return DEFAULT_PAIR
    sets = SHIPPED if "vision_config" in _sizes_of(target)[1] else SHIPPED[:-1]
    return ",".join(sets)


def default_drafts(target: str) -> tuple[str, ...]:
    """The drafts that compete for a target: those of a packaged model or of the bundled pair; for other targets the
    head of the target's own checkpoint, and the heads in the Hub's cache and beside a target of this machine that name
    it or have its sizes; and retrieval. A head may turn out not to fit when it is loaded.

    Raises:
        UserError: as ``resolve``.
    """
    if target in PACKAGED:
        return (*(name for name in bundled_models() if name.startswith(f"{target}/")), RETRIEVAL)
    if target in bundled_models():
        return DEFAULT_DRAFTS
    folder, sizes = _sizes_of(target)
    own = [target + MTP_SUFFIX] if _has_own_head(folder, sizes) else []
    heads = [name for name, config in (*_cached(), *_beside(target)) if _is_for(config, target, sizes)]
    return (*own, *heads, RETRIEVAL)


def _sizes_of(target: str) -> tuple[Path, Mapping[str, Any]]:
    """The folder of a target, and its config with the keys of its text model; of a GGUF file the sizes alone."""
    path = Path(resolve(target, weights=False))
    if path.is_file():
        return path.parent, gguf_sizes(path)
    config = _config_in(path)
    text = config.get("text_config")
    return path, config | (text if isinstance(text, dict) else {})


def _config_in(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    return config if isinstance(config, dict) else {}


def _has_own_head(folder: Path, sizes: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's list of weights has a head; of a checkpoint in one file, whether its config promises
    one.
    """
    is_promised = any(sizes.get(key) for key in MTP_PROMISES)
    if not (folder / INDEX).is_file():
        return is_promised
    after_the_last = f"layers.{sizes.get('num_hidden_layers')}."
    names = read_json(folder / INDEX).get("weight_map", {})
    return any("mtp." in name or (is_promised and after_the_last in name) for name in names)


def _cached() -> Iterator[tuple[str, dict[str, Any]]]:
    """Models in the Hub's cache with their weights: id and config."""
    from huggingface_hub import try_to_load_from_cache

    for id in cached_ids():
        path = try_to_load_from_cache(id, CONFIG)
        if isinstance(path, str) and any(file.suffix in WEIGHTS for file in Path(path).parent.iterdir()):
            yield id, _config_in(Path(path).parent)


def _beside(target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Folders next to a target of this machine: name and config."""
    if Path(target).exists():
        for path in sorted(Path(target).parent.glob(f"*/{CONFIG}")):
            yield str(path.parent), _config_in(path.parent)


def _is_for(config: dict[str, Any], target: str, sizes: Mapping[str, Any]) -> bool:
    """Whether a config is of a head that names a target, or that has its sizes."""
    hidden = sizes.get("hidden_size")
    if is_own_draft(config):
        return (config.get("hidden_size"), config.get("num_target_layers")) == (hidden, sizes.get("num_hidden_layers"))
    with suppress(AttributeError, TypeError):  # a config of other types than a head's
        layer = config.get("transformer_layer_config") or config
        verifier = (config.get("speculators_config") or {}).get("verifier", {}).get("name_or_path")
        read = config.get("target_hidden_size") or layer.get("hidden_size")
        is_named = verifier is not None and target.partition("@")[0] in (verifier, verifier.rpartition("/")[2])
        has_sizes = hidden is not None and (read, layer.get("vocab_size")) == (hidden, sizes.get("vocab_size"))
        return is_eagle3(config) and (is_named or has_sizes)
    return False
