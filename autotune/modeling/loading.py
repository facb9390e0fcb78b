"""Loads models by bundled name, local path or Hugging Face id."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.documents.draft_kinds import TOKEN_DRAFTS, is_own_draft, refuse_dflash
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError, nearest
from autotune.files import data_root, known_sha256_of, read_json
from autotune.machine.device import check_room, multiplies_bfloat16
from autotune.modeling.gguf import GGUF_ADVICE, PACKAGED, UNQUANTIZED, file_type, find_gguf, gguf_models, read_metadata
from autotune.modeling.hub import cached_models, is_id, listed, repository, suggestion, weight_files
from autotune.modeling.known_models import KNOWN_MODELS
from autotune.modeling.processors import image_processor_class
from autotune.modeling.quantization import decompress, is_dense_once_loaded, quantization_of, usable_quantizer
from autotune.modeling.weight_files import FILES_ADVICE, check_weights, check_whole, load_errors

if TYPE_CHECKING:
    from autotune.console import Console

BUNDLED_TARGET = "digits/target"
BUNDLED_DRAFT = "digits/independent"
BUNDLED_DRAFTS = (BUNDLED_DRAFT, "digits/star", "digits/dream", "digits/specvlm", "digits/mtp")
RETRIEVAL = "retrieval"
"""Name of the draft that needs no model; a folder of this name is ``./retrieval``."""
LARGEST_SIZES = {
    **{"num_hidden_layers": 1000, "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12, "head_dim": 1 << 12},
    **{"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "vocab_size": 1 << 24, "max_position_embeddings": 1 << 30},
    **{"image_size": 1 << 14, "patch_size": 1 << 10},
}
DRAFT_KEYS = {"draft_vocab_size", "speculators_model_type"}
"""Keys that only configs of published EAGLE-3 heads have."""
MTP_SUFFIX = ":mtp"
"""Ends the name of a draft that is the multi-token prediction head of a target's own checkpoint: ``FOLDER:mtp``."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Data types in which a model can be loaded (``--dtype``)."""
DEVICE_MAP = "AUTOTUNE_DEVICE_MAP"
"""Variable of the environment: ``auto`` where targets are spread over all GPUs (``--device-map``)."""
SHARD_DRAFT = "AUTOTUNE_SHARD_DRAFT"
"""Variable of the environment: set where torchrun divides independent drafts too (``--shard-draft``)."""
META = "meta"
"""Torch's device for tensors without content."""
DEFAULT_DRAFTS = (*BUNDLED_DRAFTS, RETRIEVAL)
DEFAULT_PAIR = BUNDLED_TARGET.partition("/")[0]


def bundled_models() -> dict[str, Path]:
    """Bundled models by name, ``<pair>/<model>``."""
    root = data_root() / "drafts"
    return {
        f"{path.parent.parent.name}/{path.parent.name}": path.parent
        for path in sorted(root.glob("*/*/model.safetensors"))
    }


def resolve(name: str, *, weights: bool = True, local_only: bool = False) -> str:
    """Return the folder for ``from_pretrained``; of a GGUF model the path of the file. A model of the Hugging Face Hub
    is downloaded into the Hub's cache.

    Args:
        weights: of a model of the Hub, download its weights, not its config and tokenizer alone.
        local_only: download nothing.

    Raises:
        UserError: an unknown model of a bundled pair, a path without a model, an adapter, a folder that has the name of
            a model of the Hub, or as ``find_gguf`` and ``Repository``.
    """
    bundled = bundled_models()
    if name in bundled:
        return str(bundled[name])
    path, is_folder = Path(name), os.path.isdir(name)
    if (gguf := find_gguf(name, local_only=local_only)) is not None:
        return str(gguf)
    if is_folder:
        if is_id(name) and (name in KNOWN_MODELS or name in cached_models()):
            raise UserError(
                f"{name}: a folder here and a model of the Hugging Face Hub have this name; give ./{name} for the folder, or "
                "run in another folder for the model of the Hub"
            )
        check_model_folder(path, name, os.listdir(path))
        return name
    is_of_pair = name.partition("/")[0] in {*PACKAGED, *(known.partition("/")[0] for known in bundled)}
    if is_of_pair or os.path.exists(name) or not is_id(name):
        raise UserError(f"{name:.200}: no such model; {suggestion(name) or nearest(name, [*bundled, *PACKAGED])}")
    source = repository(name, local_only=local_only)
    check_model_folder(source.model(weights=False), name, source.files)
    return str(source.model(weights=weights))


def check_model_folder(folder: Path, name: str, files: Collection[str]) -> None:
    """Refuse a folder of adapters, of which transformers would use the base alone, and one without ``config.json``."""
    if "adapter_config.json" in files:
        adapter = read_json(folder / "adapter_config.json")
        kind = (
            f"{adapter.get('peft_type', 'PEFT')} adapter for {adapter.get('base_model_name_or_path', 'another model')}"
        )
        raise UserError(
            f"{name}: holds a {kind}, and adapters are not applied; merge it with merge_and_unload of peft, and give the folder "
            "of the merged model"
        )
    if "config.json" in files:
        return
    if models := gguf_models(files):
        raise UserError(f"{name}: a repository of GGUF files; name one of them, such as {name}:{listed(list(models))}")
    raise UserError(
        f"{name}: a model folder has a config.json or a GGUF file; this one has neither; give a folder written by "
        "save_pretrained" + (f", or run in another folder for a model of the Hub named {name}" if is_id(name) else "")
    )


def reference(name: str, *, weights: bool = True) -> ModelReference:
    """The model's name and the hash of its weights and config; without a hash if there is none.

    Args:
        weights: of a model of the Hub, download its weights.
    """
    if name in TOKEN_DRAFTS:
        return ModelReference(id=name, sha256="")
    path = Path(resolve(name.removesuffix(MTP_SUFFIX), weights=weights))
    files = [path] if path.is_file() else [*weight_files(path), path / "config.json"]
    return ModelReference(id=name, sha256=known_sha256_of(*(file for file in files if file.exists())))


def load_model(
    name: str,
    *,
    device: str = "cpu",
    dtype: Dtype | None = None,
    random_weights: bool = False,
    num_shards: int = 1,
    device_map: str | None = None,
    console: Console | None = None,
) -> Any:
    """Load a model for inference. GGUF weights are dequantized.

    Args:
        device: ``meta`` for a model of sizes without weights, with ``random_weights``.
        dtype: None: the checkpoint's; of GGUF files bfloat16 where the device multiplies it natively.
        random_weights: make the weights at random. Only the config is needed, and latency does not depend on weights.
        num_shards: processes of ``torch.distributed`` that divide the layers (``shard_plan``).
        device_map: ``auto`` spreads the layers over all GPUs; None: the model is on ``device``.
        console: is told what was done to a GGUF file.

    Raises:
        UserError: transformers cannot load it or divide it, it does not fit on the device, or it cannot run there in
            ``dtype``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    from autotune.modeling.attention import choose_attention
    from autotune.modeling.shard_plan import shard_bytes, shard_plan

    logging.disable_progress_bar()
    source, gguf = _pretrained(name, weights=not random_weights)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    with load_errors(name, GGUF_ADVICE if gguf else FILES_ADVICE):
        if not gguf:
            _check_type(Path(source), name)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **gguf)
        factory = AutoModelForImageTextToText if _is_vlm(config) else AutoModelForCausalLM
        _check_sizes(config, name=name)
        is_quantized = quantization_of(config) is not None
        if gguf:
            options = _dequantized(name, gguf, config, device, dtype, console)
        if random_weights and is_quantized and device != META:
            raise UserError(
                f"{name}: weights of a quantized model cannot be made at random; give its checkpoint, or a config without "
                "quantization_config"
            )
        files = [] if gguf or random_weights else weight_files(Path(source))
        for path in files:
            check_whole(path)
        if device != META:
            is_packed = is_quantized and not is_dense_once_loaded(usable_quantizer(config, name=name, device=device))
            packed_bytes = sum(path.stat().st_size for path in files) if is_packed else 0
            with torch.device(META):
                empty = factory.from_config(config, dtype=options.get("dtype", config.dtype))
            if num_shards > 1:
                options["distributed_config"] = shard_plan(empty, name, num_shards, is_whole=not (gguf or is_quantized))
            weights = packed_bytes or shard_bytes(empty, num_shards)
            if device_map is None:
                check_room(device, {"weights": weights}, what=name, advice="free some, or load a smaller model")
            options |= {"device_map": device_map or {"": device}} if num_shards == 1 else {}
        if random_weights:
            with torch.device(device):  # a processor takes minutes for billions of weights
                model = factory.from_config(config, dtype=options.get("dtype", config.dtype)).to(device)
        else:
            model = _with_weights(factory, source, options, name=name)
    choose_attention(device)
    model.eval().requires_grad_(False)
    if device != META:
        _check_runs(model, dtype, name)
    return model


def _dequantized(
    name: str, gguf: dict[str, str], config: Any, device: str, dtype: Dtype | None, console: Console | None
) -> dict[str, Any]:
    """Options with which transformers loads the weights of a GGUF file dequantized."""
    from transformers import GgufConfig
    from transformers import modeling_gguf_pytorch_utils as conversion

    conversion.tqdm = lambda tensors, **_: tensors  # no setting of transformers hides this progress
    # A config that is given is not parsed again, which takes seconds. Transformers would keep weights packed where it
    # finds kernels for them.
    dense = {"config": config, "quantization_config": GgufConfig(dequantize=True)}
    return {**gguf, **dense, "dtype": _gguf_dtype(name, gguf["gguf_file"], device, dtype, console)}


def _with_weights(factory: Any, source: str, options: dict[str, Any], *, name: str) -> Any:
    """The model with the weights of its checkpoint. They go straight to their devices: the host never holds all weights
    of a GPU, and some quantized models cannot be moved.
    """
    model, info = factory.from_pretrained(
        source,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # ``check_weights`` names them
        trust_remote_code=False,
        **options,
    )
    check_weights(model, info, name=name)
    decompress(model)
    return model


def _pretrained(name: str, *, weights: bool = True) -> tuple[str, dict[str, str]]:
    """A model's folder, as ``from_pretrained`` takes it, and ``gguf_file`` for a GGUF file, whose metadata are checked.
    ``weights`` as in ``resolve``.
    """
    source = Path(resolve(name, weights=weights))
    if not source.is_file():
        return str(source), {}
    read_metadata(source, name)
    return str(source.parent), {"gguf_file": str(source.absolute())}


def _check_type(folder: Path, name: str) -> None:
    """Refuse a draft where a whole model is asked for, and a type of model that only code of its repository can run."""
    from transformers import CONFIG_MAPPING

    config = read_json(folder / "config.json")
    refuse_dflash(name, config)
    is_published = DRAFT_KEYS & config.keys() or "Eagle" in "".join(config.get("architectures") or ())
    if is_published or is_own_draft(config):
        raise UserError(
            f"{name}: a draft, which proposes tokens for another model and answers nothing alone; give it as --draft, with its "
            "target as --target"
        )
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise UserError(
            f"{name}: models of type {config.get('model_type')} need code of their repository, which is not run; give a model of a "
            "type that transformers has"
        )


def _gguf_dtype(name: str, file: str, device: str, dtype: Dtype | None, console: Console | None) -> str:
    """The data type for the weights of a GGUF file; says what becomes of them."""
    stored = file_type(read_metadata(Path(file), name))
    say = (lambda _: None) if console is None else console.say
    if stored not in UNQUANTIZED:
        kind = stored.removeprefix("MOSTLY_")
        say(f"{name}: {kind} weights are dequantized; the tokens are those of the dequantized model")
    if dtype is not None:
        return dtype
    is_native = multiplies_bfloat16(device)
    chosen = "bfloat16" if is_native else UNQUANTIZED.get(stored, "float32")
    does = "multiplies" if is_native else "does not multiply"
    say(f"{name}: loaded in {chosen}, because {device} {does} bfloat16 natively; --dtype chooses another type")
    return chosen


def _check_runs(model: Any, dtype: Dtype | None, name: str) -> None:
    """Check that a model reads a token, in the data type that was asked for: quantized weights may allow one only, and
    a damaged config may show nowhere else.
    """
    import torch

    reason = f"it runs in {found}" if (found := str(model.dtype).removeprefix("torch.")) != (dtype or found) else ""
    if not reason:
        try:
            with torch.inference_mode():
                tokens = torch.zeros(1, 1, dtype=torch.long, device=model.device)
                states = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
            reason = "" if bool(states.isfinite().all()) else "its states are not finite"
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    if reason:
        quantization = quantization_of(model.config)
        what = "" if quantization is None else f", quantized with {quantization},"
        advice = (
            "restore its config.json, or load another checkpoint"
            if dtype is None
            else "leave --dtype out, or give another"
        )
        raise UserError(
            f"{name}{what} cannot run in {found if dtype is None else dtype} on {model.device} ({reason}); {advice}"
        )


def _check_sizes(config: Any, *, name: str) -> None:
    """Refuse sizes that no model has, of which transformers would make modules until the memory is full."""
    for part in (config, *(getattr(config, key, None) for key in ("text_config", "vision_config"))):
        for key, largest in LARGEST_SIZES.items():
            value = getattr(part, key, None)
            if isinstance(value, int) and not 0 <= value <= largest:
                raise UserError(f"{name}: {key} is at most {largest}; got {value:.6g}; restore its config.json")


def _is_vlm(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def load_tokenizer(name: str) -> Any | None:
    """The tokenizer in a model's folder; None if there is none."""
    if _has_tokenizer(name):  # transformers would make an empty one for some model types
        with suppress(UserError):
            return getattr(processor := load_processor(name), "tokenizer", processor)
    return None


def _has_tokenizer(name: str) -> bool:
    """Whether a model's folder holds the files of a tokenizer; True for a GGUF file."""
    folder = Path(resolve(name, weights=False))
    return folder.is_file() or any(folder.glob("*token*")) or any(folder.glob("vocab*"))


def load_processor(name: str, *, or_bundled: bool = False) -> Any:
    """The processor of a VLM, or the tokenizer of a text model, whichever processor the tokenizer's own settings name.

    Args:
        or_bundled: return the tokenizer of the bundled target where a model with random weights has none of its own.

    Raises:
        UserError: there is none, or it needs a package.
    """
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer
    from transformers.utils import is_torchvision_available

    source, gguf = _pretrained(name, weights=False)
    if gguf:
        with load_errors(name, GGUF_ADVICE):
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **gguf)
    if or_bundled and not _has_tokenizer(name):
        return load_processor(BUNDLED_TARGET).tokenizer
    _check_type(Path(source), name)
    try:
        is_vlm = _is_vlm(AutoConfig.from_pretrained(source, trust_remote_code=False))
    except Exception:  # loading the model reports the error
        is_vlm = True
    try:
        if not is_vlm:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if not is_torchvision_available() and (kind := image_processor_class(source)) is not None:
            return kind.from_pretrained(source, trust_remote_code=False)
        return AutoProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain exceptions
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{name}: its processor cannot be loaded ({reason}); save it beside the model, or install what it needs"
        ) from None
