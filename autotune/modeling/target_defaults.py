"""The drafts and prompts with which a target is tuned where the user names none, found by configs alone. Loads no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.documents.draft_kinds import MTP_PROMISES, is_dflash, is_eagle3, is_own_draft
from autotune.errors import UserError
from autotune.files import read_json
from autotune.modeling.gguf import PACKAGED, gguf_sizes
from autotune.modeling.hub import cached_models
from autotune.modeling.loading import DEFAULT_DRAFTS, DEFAULT_PAIR, MTP_SUFFIX, RETRIEVAL, bundled_models, resolve
from autotune.modeling.weight_files import load_errors
from autotune.workloads.workload import SHIPPED, TEXTS

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin")  # suffixes
OWN, DFLASH = "own", "dflash"  # kinds of a draft of this project, and of one that engines alone run


def default_workload(target: str, *, has_config: bool = True) -> str:
    """The prompts for a target: those of a packaged model or of the bundled pair; for other targets the shipped ones,
    with images where the target's config has a vision model. Without ``has_config`` only an engine reads the target.

    Raises:
        UserError: as ``resolve``.
    """
    if target in PACKAGED:
        return target
    if target in bundled_models():
        return DEFAULT_PAIR
    return ",".join(SHIPPED if has_config and "vision_config" in sizes_of(target)[1] else TEXTS)


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
    folder, sizes = sizes_of(target)
    own = [target + MTP_SUFFIX] if has_own_head(folder, sizes) else []
    heads = [name for name, kind in heads_near(target, sizes).items() if kind != DFLASH]
    return (*own, *heads, RETRIEVAL)


def heads_near(target: str, sizes: Mapping[str, Any]) -> dict[str, str]:
    """Heads that name a target or have its sizes, in the Hub's cache and beside a target of this machine: their names
    and kinds, ``OWN`` for drafts that ``autotune train`` wrote.
    """
    beside = Path(target).parent.glob(f"*/{CONFIG}") if Path(target).exists() else ()
    folders = cached_models() | {str(path.parent): path.parent for path in sorted(beside)}
    kinds = {name: _kind_of(path, target, sizes) for name, path in folders.items()}
    return {name: kind for name, kind in kinds.items() if kind}


def sizes_of(target: str) -> tuple[Path, Mapping[str, Any]]:
    """The folder of a target, and its config with the keys of its text model; of a GGUF file the sizes alone."""
    path = Path(resolve(target, weights=False))
    if path.is_file():
        return path.parent, gguf_sizes(path)
    with load_errors(target):
        config = read_json(path / CONFIG)
        return path, config | (config.get("text_config") or {})


def has_own_head(folder: Path, sizes: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's list of weights has a head; of a checkpoint in one file, whether its config promises
    one.
    """
    is_promised = any(sizes.get(key) for key in MTP_PROMISES)
    if not (folder / INDEX).is_file():
        return is_promised
    after_the_last = f"layers.{sizes.get('num_hidden_layers')}."
    return any(
        "mtp." in name or (is_promised and after_the_last in name)
        for name in read_json(folder / INDEX).get("weight_map", {})
    )


def _kind_of(folder: Path, target: str, sizes: Mapping[str, Any]) -> str:
    """The kind of a folder's head, if it names a target or has its sizes, and has its weights; else empty."""
    hidden = sizes.get("hidden_size")
    with suppress(UserError, OSError, AttributeError, TypeError):  # other models may be incomplete or damaged
        config = read_json(folder / CONFIG)
        layer = config.get("transformer_layer_config") or config
        verifier = (config.get("speculators_config") or {}).get("verifier", {}).get("name_or_path")
        read = config.get("target_hidden_size") or layer.get("hidden_size"), layer.get("vocab_size")
        is_named = verifier is not None and Path(verifier).name == Path(target.partition("@")[0]).name
        has_sizes = hidden is not None and read == (hidden, sizes.get("vocab_size"))
        if is_own_draft(config):
            own = config.get("hidden_size"), config.get("num_target_layers")
            return OWN if own == (hidden, sizes.get("num_hidden_layers")) else ""
        if any(file.suffix in WEIGHTS for file in folder.iterdir()) and (is_named or has_sizes):
            return DFLASH if is_dflash(config) else "eagle3" if is_eagle3(config) else ""
    return ""
