"""``autotune bench-server``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options


@click.command(short_help="Compare vLLM with the prediction of its export.")
@click.argument("profile", type=click.Path(path_type=Path))
@options.prompt_options
@click.option(
    "--engine",
    default="vllm",
    show_default=True,
    help="Address of a vLLM that runs the exported settings, http://HOST:PORT, or 'vllm' to start vLLM with them.",
)
@click.option(
    "--export",
    "folder",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of the export that the engine runs.  [default: exports/vllm]",
)
@click.option(
    "--engine-command",
    default=None,
    help="Executable of --engine vllm with further arguments, in one word.  [default: vllm on the PATH, or of make engines]",
)
@options.device
@options.as_json
def command(profile: Path, engine: str, as_json: bool, **choices: Any) -> None:
    """Send prompts to a vLLM that runs exported settings, and compare its answers and rounds with the prediction
    of the export.
    """
    from autotune.cli.preflight import evaluation_prompts
    from autotune.serving.client import EngineClient
    from autotune.serving.vllm_server import VllmEngine

    chosen, choices = evaluation_prompts(profile, choices)
    chosen_engine = VllmEngine.find(choices["engine_command"], "") if engine == "vllm" else EngineClient(engine)
    prompts = chosen.load()

    from autotune.console import Console
    from autotune.device import choose_device
    from autotune.serving.comparison import bench

    what = (profile, prompts, choose_device(choices["device"]), Console())
    result = bench(*what, engine=chosen_engine, folder=choices["folder"])
    if as_json:
        options.print_json(result)
