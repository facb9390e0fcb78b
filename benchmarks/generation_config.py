"""Times transformers' ``generate`` with the file of ``autotune export --as generation-config`` against ``generate``
without it, prompt by prompt in random order, and compares the tokens. Takes about five minutes with 16 prompts.

    python benchmarks/generation_config.py profile.json [--prompts 16] [--workload WORKLOAD] [--draft-tokens N]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from autotune.console import Console
from autotune.documents.decoding_profile import HF
from autotune.engines.formats import Export, exported_text
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import HuggingFaceArm, RuntimeArms
from autotune.evaluation.summary import summarize
from autotune.runtime.load import load
from autotune.runtime.stats import DecodingStats
from autotune.workloads.prompt import Prompt
from autotune.workloads.workload import load_workload

EXPORTED = "generation-config"


class ExportedArm(HuggingFaceArm):
    """``generate`` with the settings of the file: the assistant's own, or the model's where there is no assistant."""

    def __init__(self, arms: RuntimeArms, fields: dict[str, Any]) -> None:
        is_lookup = "prompt_lookup_num_tokens" in fields
        super().__init__(EXPORTED, arms, None if is_lookup else arms.decoder.draft.standalone_model)
        self.fields = fields

    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        config = (self.assistant or self.arms.decoder.target_model).generation_config
        before = {name: getattr(config, name) for name in self.fields}
        config.update(**self.fields)
        try:
            return super().generate(inputs, settings)
        finally:
            config.update(**before)


@click.command(help=__doc__)
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--prompts", default=16, show_default=True, help="Number of held-out prompts.")
@click.option("--workload", help="Workload.  [default: that of the profile]")
@click.option("--draft-tokens", type=int, help="As autotune export takes it, for a profile of trees.")
@click.option("--seed", default=0, show_default=True)
def main(profile: Path, prompts: int, workload: str | None, draft_tokens: int | None, seed: int) -> None:
    console = Console()
    decoder = load(profile, context_tokens=0, console=console)
    document, runtime = decoder.profile, RuntimeArms(decoder)
    assert document is not None
    fields = json.loads(exported_text(EXPORTED, Export(document, console, draft_tokens, Path("exports"))))
    chosen = load_workload(workload or document.workload.name, "evaluate", num_prompts=prompts)
    arms: list[Arm] = [HuggingFaceArm(HF, runtime), ExportedArm(runtime, fields)]
    with console.stage("generate") as update:
        runs = race(runtime.runner(), arms, chosen.prompts, Everyone(), seed=seed, report=update).runs
    summary = summarize(EXPORTED, runs[EXPORTED], runs[HF], seed=seed)
    click.echo(
        f"{summary.speedup:.2f} times as fast as generate without it (95 % interval {summary.ci95[0]:.2f} to {summary.ci95[1]:.2f}), "
        f"{summary.identical_outputs} of {summary.num_prompts} answers the same"
    )


if __name__ == "__main__":
    main()
