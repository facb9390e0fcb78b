"""Processors of vision-language models that transformers ties to torchvision, loaded without it and without videos."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def image_processor_class(source: str) -> Any | None:
    """The class of a model's processor without its video processor, which transformers has for torchvision only: it
    reads text and images. None if the model names no class that transformers has.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
    from transformers.utils import cached_file

    name = None
    for file in ("config", "tokenizer_config", "preprocessor_config", "processor_config"):  # the last one counts
        path = cached_file(source, f"{file}.json", _raise_exceptions_for_missing_entries=False)
        content = {} if path is None else json.loads(Path(path).read_text("utf-8"))
        name = content.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(content.get("model_type")) or name
    if name is None:
        return None
    kind = pixtral_processor() if name == "PixtralProcessor" else processor_class_from_name(name)
    return kind if kind is None or "video_processor" not in kind.get_attributes() else without_videos(kind)


def pixtral_processor() -> Any:
    """Pixtral's class, whose module cannot be imported without torchvision, although it needs a single function, which
    is also in the module of the image processor that needs no torchvision.
    """
    package = "transformers.models.pixtral"
    hidden = f"{package}.image_processing_pixtral"
    sys.modules[hidden] = import_module(f"{package}.image_processing_pil_pixtral")
    try:
        return import_module(f"{package}.processing_pixtral").PixtralProcessor
    finally:
        del sys.modules[hidden]


def without_videos(kind: Any) -> Any:
    """A class of the same name as a processor of transformers, whose objects have no video processor."""
    from transformers import ProcessorMixin

    names = kind.get_attributes()
    place = names.index("video_processor")

    class ImageProcessor(kind):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in names if name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: Any, processor_dict: dict[str, Any], **options: Any) -> Any:
            settings = {name: value for name, value in processor_dict.items() if name != "video_processor"}
            return super().from_args_and_dict([*args[:place], None, *args[place:]], settings, **options)

    ImageProcessor.__name__ = kind.__name__
    module = sys.modules[kind.__module__]
    if hasattr(module, "num2words"):  # SmolVLM's, which needs it and the settings of its videos for prompts without any
        vars(module)["num2words"] = module.num2words or str
        ImageProcessor.apply_chat_template = ProcessorMixin.apply_chat_template
    return ImageProcessor
