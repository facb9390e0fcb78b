"""A GGUF model as a folder of safetensors in bfloat16, which vLLM loads.

    PYTHONPATH=. python -m benchmarks.dequantized smollm2 FOLDER

transformers does not save a model that it dequantized, so its weights are copied into a new one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotune.modeling.gguf import find_gguf


def dequantize(name: str, folder: Path) -> None:
    path = find_gguf(name)
    assert path is not None, f"{name} is no GGUF model"
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model = type(loaded)(loaded.config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    dequantize(sys.argv[1], Path(sys.argv[2]))
