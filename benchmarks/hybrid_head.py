"""The speedup of chains by an MTP head on a hybrid: a small Qwen3.5 with Gated DeltaNet layers, trained here.

The target learns answers about grids of digits, as texts without their images, and the head learns from the target by
``autotune train``. Chains of every depth decode held-out questions in turns with plain decoding, in float32, and all
outputs must be plain decoding's. Prints the speedups with 95 % intervals, tokens a round, and the times of a plain
step, a verification and a draft. Takes about 15 minutes on two cores; a second call with the same folder only decodes.

    OMP_NUM_THREADS=1 python benchmarks/hybrid_head.py [FOLDER] [--output benchmarks/results/hybrid-head.json]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import torch
import transformers

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR
from autotune.documents.table import Table, with_interval
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.summary import summarize
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.modeling.loading import BUNDLED_TARGET, load_processor
from autotune.search.model_pool import ModelPool
from autotune.workloads.workload import load_workload
from benchmarks.evidence.result import stamped
from drafts.digits.make.digits import Split, make_example

DEPTHS = (1, 2, 3, 4, 6)
TASKS = ("read", "count", "sort", "describe")
TEXTS = 3000  # of each task, to train the target
WINDOW = 128  # tokens of a row of a training batch
SIZES = {
    **{"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "max_position_embeddings": 2048},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
"""Of the target, of which every fourth layer has full attention, as in Qwen3.5."""
RECIPE = """\
schema: autotune.recipe/1
name: hybrid/mtp
description: A head for the small hybrid
model: mtp
teacher: ../target
data: {file: ../examples.jsonl}
stages:
  - {steps: 300, batch_size: 4, optimizer: muon, learning_rate: 5.0e-3, warmup_steps: 20, gradient_clip: 0.5, unrolled_steps: 4}
"""


def lines(split: Split, first: int, count: int) -> list[dict[str, str]]:
    """Answered prompts of all tasks in turn."""
    examples = [make_example(split, task, first + index) for index in range(count) for task in TASKS]
    return [{"prompt": known.prompt, "answer": f" {known.answer}", "task": known.task} for known in examples]


def train_target(folder: Path, steps: int, batch_size: int) -> None:
    """Train the target on questions and answers, and save it with the tokenizer of the bundled target."""
    processor = load_processor(BUNDLED_TARGET)
    tokenizer = processor.tokenizer
    tokenizer.chat_template = processor.chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.Qwen3_5TextConfig(vocab_size=len(tokenizer), **SIZES, **special)
    model = transformers.AutoModelForCausalLM.from_config(config)
    texts = [f"USER: {line['prompt']} ASSISTANT:{line['answer']}</s>" for line in lines("train", 0, TEXTS)]
    tokens = torch.tensor([token for text in texts for token in tokenizer(text).input_ids])
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")
    optimizers = [muon, torch.optim.AdamW(others, lr=0.003)]
    schedules = [torch.optim.lr_scheduler.LinearLR(known, 1.0, 0.02, steps) for known in optimizers]
    for step in range(steps):
        starts = torch.randint(len(tokens) - WINDOW, (batch_size, 1))
        rows = tokens[starts + torch.arange(WINDOW)]
        loss = model(rows, labels=rows).loss
        loss.backward()
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        if step % 25 == 0:
            click.echo(f"step {step}: loss {loss.item():.3f}")
    model.save_pretrained(folder)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path(".autotune/hybrid-head"))
@click.option("--prompts", default=32, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="Longest answer.")
@click.option("--steps", default=400, show_default=True, help="To train the target.")
@click.option("--batch-size", default=8, show_default=True, help="To train the target.")
@click.option("--output", type=click.Path(path_type=Path), default=None)
def main(folder: Path, prompts: int, tokens: int, steps: int, batch_size: int, output: Path | None) -> None:
    target, head = folder / "target", folder / "head"
    if not (target / "model.safetensors").exists():
        target.mkdir(parents=True, exist_ok=True)
        train_target(target, steps, batch_size)
    if not (head / "model.safetensors").exists():
        head.mkdir(exist_ok=True)
        write(folder / "examples.jsonl", lines("train", TEXTS, 100))
        (head / "recipe.yaml").write_text(RECIPE)
        subprocess.run([sys.executable, "-m", "autotune", "train", str(head / "recipe.yaml")], check=True)
    write(folder / "workload.jsonl", lines("held-out", 0, prompts // len(TASKS)))
    workload = load_workload(str(folder / "workload.jsonl"), "evaluate", is_whole=True).cut(prompts, tokens)
    pool, console = ModelPool(str(target), [str(head)], "cpu", dtype="float32"), Console()
    arms, monitor = pool.arms(None), ContentionMonitor("cpu")
    chains = [arms.arm(f"chain {n}", Configuration(tree={"policy": "chain", "depth": n})) for n in DEPTHS]
    with console.stage("decoding") as update:
        runs = race(arms.runner(), [arms.plain, *chains], workload.prompts, Everyone(), report=update).runs
    values, cells = [], []
    for name, decoded in runs.items():
        summary = summarize(name, decoded, runs[AR])
        assert summary.identical_outputs == len(decoded), "not lossless"
        row = {"arm": name, "speedup": summary.speedup, "low": summary.ci95[0], "high": summary.ci95[1]}
        row["tokens_per_round"] = summary.tokens_per_round
        row["round_ms"] = sum(run.decode_ms for run in decoded) / sum(run.rounds for run in decoded)
        row["verify_ms"] = sum(run.verify_ms for run in decoded) / sum(run.target_forwards for run in decoded)
        row["draft_ms"] = sum(run.draft_ms for run in decoded) / max(1, sum(run.draft_forwards for run in decoded))
        values.append(row)
        figures = [f"{row[key]:.2f}" for key in ("tokens_per_round", "round_ms", "verify_ms", "draft_ms")]
        cells.append([name, with_interval(summary.speedup, summary.ci95), *figures])
    title = f"{len(runs[AR])} held-out prompts; outputs equal plain decoding's"
    console.show(Table(title, ["arm", "speedup", "M", "round ms", "target ms", "draft ms"], cells))
    if output is not None:
        samples = [
            {"arm": name, "prompt": run.prompt, "task": run.task, "tokens": run.new_tokens, "rounds": run.rounds}
            | {"decode_ms": run.decode_ms, "tokens_sha256": run.tokens_sha256}
            for name, decoded in runs.items()
            for run in decoded
        ]
        fields = {"command": "python benchmarks/hybrid_head.py", "contention": monitor.contention()}
        stamped(output.stem, **fields, samples={"runs": samples}, values={"arms": values}).save(output)


if __name__ == "__main__":
    main()
