"""A GGUF model as a folder of safetensors in bfloat16, which vLLM loads.

    python benchmarks/dequantized.py smollm2 FOLDER

transformers does not save a model that it dequantized, so its weights are copied into a new one. Takes about 10 seconds for a model of
135M parameters.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotune.modeling.gguf import find_gguf


@click.command(help=__doc__)
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
def main(name: str, folder: Path) -> None:
    path = find_gguf(name)
    if path is None:
        raise click.BadParameter(f"{name} is no GGUF model")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model = type(loaded)(loaded.config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main()
