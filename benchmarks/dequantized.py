"""A GGUF model as a folder of safetensors in bfloat16, which vLLM loads.

    python benchmarks/dequantized.py smollm2 FOLDER

transformers does not save a model that it dequantized, so its weights are copied into a new one. Takes about 10 seconds
for a model of 135M parameters.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command(help=__doc__)
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
def main(name: str, folder: Path) -> None:
    import torch

    from autotune.modeling.loading import load_model, load_processor

    loaded = load_model(name, dtype="bfloat16")
    config = type(loaded.config).from_dict({**loaded.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    load_processor(name).save_pretrained(folder)


if __name__ == "__main__":
    main()
