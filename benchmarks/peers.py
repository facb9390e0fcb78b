"""Compares a profile with other programs that speculate, in one run, prompt by prompt in random order.

Arms: plain decoding (``ar``), the profile (``tuned``), transformers' ``generate`` (``hf``), its assisted generation
where the profile's draft is a whole model (``hf-assisted``) and its prompt lookup (``hf-prompt-lookup``), and flashspec
0.3.1 for text targets: with prompt lookup (``flashspec-lookup``), and with its default where the draft is a whole model
(``flashspec``). All these arms decode greedily with the same loaded target. flashspec is installed without its
dependencies into a folder of its own, so that it changes no other package. ``--engine`` adds a serving engine, which
loads the model in its own format and is sent the same tokens: without speculation, and with the settings that it
recommends. Takes about 10 minutes with 16 prompts.

    python benchmarks/peers.py profile.json [--prompts 16] [--output peers.json] [--flashspec FOLDER] python
    benchmarks/peers.py profile.json --engine llama.cpp model.gguf llama-server --engine vllm FOLDER 'vllm
    --gpu-memory-utilization 0.1'
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from autotune.console import Console
from autotune.documents.decoding_profile import AR, HF, TUNED
from autotune.documents.published_defaults import HF_ASSISTED
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.engine_server import EngineServer
from autotune.engines.served import Served
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import DecoderArm, HuggingFaceArm, RuntimeArm, RuntimeArms
from autotune.evaluation.summary import summarize
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.modeling.host import limited_threads
from autotune.modeling.vision_timing import timed_forwards, vision_parts
from autotune.runtime.load import load
from autotune.runtime.stats import DecodingStats
from autotune.table import Table
from autotune.workloads.prompt import Prompt
from autotune.workloads.workload import load_workload
from benchmarks.engine_counts import ENGINES

FLASHSPEC = "flashspec==0.3.1"
DOCUMENTED: dict[str, tuple[str, str]] = {"llama.cpp": ("--spec-default", "ngram-mod"), "vllm": ("documented", "ngram")}
"""The speculation that an engine recommends: a label, and the type whose defaults it has."""
LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens of transformers' documentation


class PromptLookupArm(HuggingFaceArm):
    """Transformers' ``generate`` with ``prompt_lookup_num_tokens``."""

    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        config = self.arms.decoder.target_model.generation_config
        before, config.prompt_lookup_num_tokens = config.prompt_lookup_num_tokens, LOOKUP_TOKENS
        try:
            return super().generate(inputs, settings)
        finally:
            config.prompt_lookup_num_tokens = before


class FlashSpecArm(RuntimeArm):
    """flashspec's engine on the loaded target, greedy and eager, with prompt lookup or, with a draft, its default
    strategy.
    """

    def __init__(
        self, folder: Path, arms: RuntimeArms, draft: Any | None, stop_tokens: list[int], threads: int | None
    ) -> None:
        sys.path.insert(0, str(folder))
        import flashspec
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

        super().__init__("flashspec-lookup" if draft is None else "flashspec", arms)
        self.model = model = arms.decoder.target_model
        self.threads = threads
        device, dtype = model.device, model.dtype
        chosen: dict[str, Any] = {"drafter_strategy": "bandit", "bandit": flashspec.BanditConfig(n_arms=1)}
        drafters = [NgramDrafter()]
        if draft is not None:
            chosen, drafters = {}, [HuggingFaceDrafter("draft", device, dtype, model=draft)]
        sampling = flashspec.SamplingConfig(temperature=0.0)
        config = flashspec.FlashSpecConfig(
            device=str(device), compile=False, sampling=sampling, eos_token_ids=stop_tokens, **chosen
        )
        self.engine = flashspec.SpeculativeEngine(config, drafters, TargetModel("target", device, dtype, model=model))

    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        with limited_threads(self.threads), timed_forwards([self.model], self.model.device, first_only=True) as target:
            began = time.perf_counter()
            output = self.engine.generate(inputs["input_ids"], max_new_tokens=settings.max_new_tokens)
            total_ms = 1e3 * (time.perf_counter() - began)
        tokens = output.output_ids[0, : output.n_tokens_generated].tolist()
        return tokens, DecodingStats(
            prompt_tokens=inputs["input_ids"].shape[1],
            new_tokens=len(tokens),
            accepted_lengths=[step.emitted - 1 for step in output.arm_steps],
            target_forwards=target.num_forwards - 1,
            target_prefill_ms=target.ms,
            decode_ms=total_ms - target.ms,
        )


class EngineArm(RuntimeArm):
    """A serving engine, which decodes the tokens of a prompt greedily and streams its answer."""

    def __init__(self, name: str, arms: RuntimeArms, server: EngineServer) -> None:
        super().__init__(name, arms)
        self.server = server

    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        prompt = inputs["input_ids"][0].tolist()
        request = Served.of(prompt, prompt[-1:], settings.max_new_tokens)
        tokens, seconds = self.server.stream(request)
        return tokens, DecodingStats(
            prompt_tokens=len(prompt),
            new_tokens=len(tokens),
            target_prefill_ms=1e3 * seconds[0],
            decode_ms=1e3 * (seconds[-1] - seconds[0]),
        )


def engine_arms(arms: RuntimeArms, name: str, model: str, command: str, stack: ExitStack) -> list[Arm]:
    """An engine without speculation and with the settings that it recommends, each in a server that ends with the
    stack.
    """
    engine = ENGINES[name](model, command=command)
    label, kind = DOCUMENTED[name]
    speculation = Speculation(type=kind, options=OPTIONS[kind])
    settings = {name: None, f"{name} {label} {speculation.label}": speculation}
    return [EngineArm(arm, arms, stack.enter_context(engine.started(one))) for arm, one in settings.items()]


def install_flashspec(folder: Path) -> None:
    """Install flashspec without dependencies into a folder, unless it is there."""
    if not (folder / "flashspec").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), FLASHSPEC]
        subprocess.run(command, check=True)


def stop_tokens_of(model: Any) -> list[int]:
    """Tokens that end an answer, by the model's generation config."""
    stop = model.generation_config.eos_token_id
    return [] if stop is None else [stop] if isinstance(stop, int) else list(stop)


def peers_of(runtime: RuntimeArms, flashspec: Path | None) -> tuple[list[Arm], list[str]]:
    """The arms beside plain decoding and the profile, and what is left out and why."""
    model, threads, notes = runtime.decoder.target_model, runtime.decoder.threads, []
    arms: list[Arm] = [
        HuggingFaceArm(HF, runtime, threads=threads),
        PromptLookupArm("hf-prompt-lookup", runtime, threads=threads),
    ]
    draft = runtime.decoder.draft and runtime.decoder.draft.standalone_model
    if draft is None:
        notes.append(
            "the profile's draft is no whole model, so that assisted generation and flashspec's default cannot use it"
        )
    else:
        arms.append(HuggingFaceArm(HF_ASSISTED, runtime, draft, threads=threads))
    if flashspec is None or vision_parts(model):
        notes.append("flashspec takes text models only")
        return arms, notes
    install_flashspec(flashspec)
    stop = stop_tokens_of(model)
    arms += [FlashSpecArm(flashspec, runtime, one, stop, threads) for one in dict.fromkeys((None, draft))]
    return arms, notes


@click.command()
@click.argument("profile", type=click.Path(path_type=Path, exists=True))
@click.option("--prompts", default=16, show_default=True, help="Held-out prompts.")
@click.option("--workload", help="Left out: the profile's.")
@click.option("--max-new-tokens", type=int, help="Limit of every answer. Left out: each prompt's own.")
@click.option(
    "--flashspec", type=click.Path(path_type=Path), help="Folder of flashspec, installed there. Left out: without it."
)
@click.option(
    "--engine",
    "engines",
    nargs=3,
    multiple=True,
    type=(click.Choice(list(ENGINES)), str, str),
    help="Name of an engine, its model, and the command that starts it with further arguments.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs as JSON.")
@click.option("--seed", default=0, show_default=True)
def main(
    profile: Path,
    prompts: int,
    workload: str | None,
    max_new_tokens: int | None,
    flashspec: Path | None,
    engines: tuple[tuple[str, str, str], ...],
    output: Path | None,
    seed: int,
) -> None:
    console, began, stack = Console(), time.monotonic(), ExitStack()
    decoder = load(profile, context_tokens=0, console=console)
    runtime = RuntimeArms(decoder)
    document = decoder.profile
    assert document is not None
    chosen = load_workload(workload or document.workload.name, "evaluate", num_prompts=prompts)
    chosen = chosen.cut(prompts, max_new_tokens or document.workload.max_new_tokens)
    others, notes = peers_of(runtime, flashspec)
    others += [arm for one in engines for arm in engine_arms(runtime, *one, stack)]
    tuned = [DecoderArm(TUNED, decoder, runtime)] if decoder.draft is not None else []
    kept: list[Arm] = [runtime.plain, *tuned]
    for arm in others:  # a program that cannot decode these prompts is left out, and the reason is said
        failure = failure_of(arm, chosen.prompts[0])
        if failure is None:
            kept.append(arm)
        else:
            notes.append(f"{arm.name} is left out: {failure}")
    for note in notes:
        console.say(note)
    monitor = ContentionMonitor(str(decoder.target.device))
    with stack, console.stage("peers") as update:
        runs = race(runtime.runner(), kept, chosen.prompts, Everyone(), seed=seed, report=update).runs
    contention = monitor.contention()
    console.say(contention.describe("while runs were timed"))
    rows, records = [], []
    for name, of_arm in runs.items():
        summary = summarize(name, of_arm, runs[AR], seed=seed)
        interval = f"{summary.ci95[0]:.2f}-{summary.ci95[1]:.2f}"
        same = f"{summary.identical_outputs}/{summary.num_prompts}"
        tokens = f"{summary.tokens_per_round:.2f}" if summary.tokens_per_round else "-"
        rows.append([name, f"{summary.speedup:.2f}x", interval, tokens, f"{summary.tokens_per_second:.0f}", same])
        records += [
            {
                "arm": name,
                "prompt": run.prompt,
                "task": run.task or "",
                "decode_ms": round(run.decode_ms, 3),
                "request_ms": round(run.decode_ms + run.target_prefill_ms, 3),
                "tokens": run.new_tokens - 1,
                "rounds": run.rounds,
                "is_same": run.tokens_sha256 == plain.tokens_sha256,
            }
            for run, plain in zip(of_arm, runs[AR], strict=True)
        ]
    console.show(
        Table(
            f"{len(runs[AR])} held-out prompts",
            ["arm", "speedup", "95 % CI", "M", "tokens/s", "same output"],
            rows,
            emphasised=1 if tuned else None,
        )
    )
    if output is not None:
        seconds = round(time.monotonic() - began, 1)
        content = {
            "note": "; ".join(notes),
            "seconds": seconds,
            "contention": contention.model_dump(mode="json"),
            "runs": records,
        }
        output.write_text(json.dumps(content, indent=1))


def failure_of(arm: Arm, prompt: Any) -> str | None:
    """Why an arm cannot decode a prompt, in a line; None if it can."""
    try:
        arm.decode(prompt)
    except Exception as error:  # whatever another program raises for models that it does not support
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
    return None


if __name__ == "__main__":
    main()
