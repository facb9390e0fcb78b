"""Quantized models: what they are called, whether this machine can run them, and how large they really are.

Transformers loads every method through ``quantization_config``. Nothing here depends on the method, except the names of
the packages to install.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

from autotune.documents.provenance import version_of
from autotune.errors import UserError

if TYPE_CHECKING:
    from torch import nn

_OWN_PACKAGES = ("aqlm", "auto-round", "bitsandbytes", "compressed-tensors", "eetq", "hqq", "torchao")
PACKAGES: dict[str, tuple[str, ...]] = {
    **{method: (method,) for method in _OWN_PACKAGES},
    **{"awq": ("gptqmodel",), "gptq": ("gptqmodel", "optimum"), "quanto": ("optimum-quanto",)},
    **{"fbgemm_fp8": ("fbgemm-gpu",), "fp8": ("accelerate",)},
}
"""Packages that transformers needs for a method, as pip names them."""
_DETAILS = ("bits", "weight_bits", "format", "quant_algo", "weights")
"""Keys of a method's settings of which the first one that is set tells its variants apart."""


def quantization_of(config: Any) -> str | None:
    """Method and variant by which a model with this config is quantized, ``torchao Int8WeightOnly`` or ``gptq 4-bit``;
    None for other models.
    """
    content = _settings(config)
    if content is None:
        return None
    method = str(getattr(content["quant_method"], "value", content["quant_method"]))
    return " ".join([method, *_variant(content)])


def quantization_versions(quantization: str | None) -> list[str]:
    """Versions of the packages whose kernels a quantized model runs; empty for other models."""
    packages = () if quantization is None else PACKAGES.get(quantization.split()[0], ())
    return [f"{package} {version_of(package)}" for package in packages]


def _settings(config: Any) -> Mapping[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    content = dict(found) if isinstance(found, Mapping) else found.to_dict()
    if content.get("load_in_4bit") or content.get("load_in_8bit"):  # early checkpoints do not name the method
        content.setdefault("quant_method", "bitsandbytes")
    content.setdefault("quant_method", "unknown")
    return content


def _variant(content: Mapping[str, Any]) -> list[str]:
    """Tells the variants of a method apart; empty where the method has one only."""
    if content.get("load_in_4bit"):
        return ["4-bit", str(content.get("bnb_4bit_quant_type", "fp4"))]
    if content.get("load_in_8bit"):
        return ["8-bit"]
    kinds = content.get("quant_type")  # torchao: a config by module, by default one for all
    if isinstance(kinds, Mapping):
        default = kinds.get("default", kinds)
        sizes = default.get("_data", {}) if isinstance(default, Mapping) else {}
        group = sizes.get("group_size")
        kind = str(default.get("_type", "")).removesuffix("Config") if isinstance(default, Mapping) else str(default)
        weight = sizes.get("weight_dtype", {})
        dtype = str(weight.get("_data", "")).removeprefix("torch.") if isinstance(weight, Mapping) else ""
        return [part for part in (kind, dtype, f"group {group}" if group else "") if part]
    found = [content[key] for key in _DETAILS if content.get(key)]
    return [f"{detail}-bit" if isinstance(detail, int) else str(detail) for detail in found[:1]]


def usable_quantizer(config: Any, *, name: str, device: str) -> Any:
    """Transformers' quantizer of a quantized model, after a check that the installed packages can run it on a device.

    Args:
        name: the model in error messages.

    Raises:
        UserError: transformers does not know the method, a package is missing, or the method needs another device.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantization = str(quantization_of(config))
    packages = PACKAGES.get(quantization.split()[0], ())
    try:
        quantizer = AutoHfQuantizer.from_config(deepcopy(config.quantization_config), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
        return quantizer
    except (ImportError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        install = f"pip install {' '.join(packages)}, or " if packages else ""
        raise UserError(
            f"{name}: quantized with {quantization}, which cannot run on {device} with the installed packages ({reason}); "
            f"{install}give the checkpoint without quantization, or another device"
        ) from None


def is_dense_once_loaded(quantizer: Any) -> bool:
    """Whether the weights of a model that this quantizer (``usable_quantizer``) loads are dense once it runs:
    transformers has no kernels for those of compressed-tensors, and none for ``fp8`` on most devices, the CPU among
    them.
    """
    settings = quantizer.quantization_config
    return settings.quant_method == "compressed-tensors" or bool(getattr(settings, "dequantize", False))


def decompress(model: Any) -> None:
    """Make the weights of a model of compressed-tensors dense now, as its own first forward pass would: forward passes
    of its layers alone would not, and until then its memory is not that of decoding.
    """
    if hasattr(model, "ct_decompress_hook"):
        model.hf_quantizer.compressor.decompress_model(model)


def weight_bytes(module: nn.Module) -> int:
    """Bytes that the parameters and buffers of a module take, each once, scales and packed weights included."""
    tensors = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    return sum(map(_bytes_of, tensors.values()))


def _bytes_of(tensor: Any) -> int:
    """Bytes of a tensor; of a subclass, as torchao's, those of the plain tensors that it is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def unquantized(model: Any) -> Any:
    """The model that a quantized one was made from, without memory for its weights: layers of quantized models hide
    their shapes in packed tensors. Another model is returned as it is.
    """
    if quantization_of(model.config) is None:
        return model
    import torch

    config = deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        return type(model)(config)


def num_parameters(model: Any) -> int:
    """Parameters of a model, those of packed weights included."""
    return sum(parameter.numel() for parameter in unquantized(model).parameters())
