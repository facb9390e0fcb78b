"""The speedup of chains by an MTP head on a hybrid: a small Qwen3.5 with Gated DeltaNet layers, trained here.

The target learns the beginnings of answers about grids of digits, as texts without their images, and the head learns
from the target by ``autotune train``. Chains of every depth then decode further questions in turns with plain decoding,
in float32, and all outputs must be plain decoding's. Prints the speedups with 95 % intervals, tokens a round, and the
times of a round, of a forward pass of the target and of a draft step. Takes about 10 minutes on two shared cores; a
second call with the same folder only decodes.

    OMP_NUM_THREADS=1 python benchmarks/hybrid_head.py [FOLDER] [--output FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import torch
import transformers

from autotune.documents.configuration import Configuration
from autotune.documents.decoded import runs_dataframe
from autotune.documents.decoding_profile import AR
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import arms_of_pool
from autotune.evaluation.summary import summarize
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.modeling.loading import BUNDLED_TARGET, load_processor
from autotune.runtime.model_pool import ModelPool
from autotune.workloads.workload import load_workload
from benchmarks.evidence.result import RESULTS, stamped
from drafts.digits.make.digits import make_example

DEPTHS = (1, 2, 3, 4, 6)
TASKS = ("read", "count", "sort", "describe")
TEXTS, HEAD_TEXTS = 500, 60  # of each task, to train the target and the head
SIZES = {
    **{"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "max_position_embeddings": 2048},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
"""Layers of the target, of which every fourth layer has full attention, as in Qwen3.5."""
RECIPE = """\
schema: autotune.recipe/1
name: hybrid/mtp
description: A head for the small hybrid
model: mtp
teacher: ../target
data: {file: ../examples.jsonl}
stages:
  - {steps: 80, batch_size: 4, optimizer: muon, learning_rate: 5.0e-3, warmup_steps: 8, gradient_clip: 0.5, unrolled_steps: 4}
"""


def write_lines(path: Path, first: int, count: int, *left_out: str) -> list[dict[str, str]]:
    """Questions of all tasks in turn, with the first 240 characters of their answers."""
    examples = (make_example("held-out", task, first + index) for index in range(count) for task in TASKS)
    lines = [{"prompt": known.prompt, "answer": f" {known.answer[:240]}", "task": known.task} for known in examples]
    path.write_text("".join(json.dumps({key: line[key] for key in line.keys() - left_out}) + "\n" for line in lines))
    return lines


def train_target(folder: Path, steps: int) -> None:
    """Train the target on rows of 128 tokens of questions and answers; save it with the bundled target's tokenizer."""
    processor = load_processor(BUNDLED_TARGET)
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.save_pretrained(folder)
    special = {name: getattr(processor.tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(vocab_size=2048, **SIZES, **special))
    lines = write_lines(folder / "texts.jsonl", 0, TEXTS)
    texts = [f"USER: {line['prompt']} ASSISTANT:{line['answer']}" for line in lines]
    tokens = torch.tensor([token for text in texts for token in processor.tokenizer(text).input_ids])
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [model.model.embed_tokens.weight, *(weight for weight in model.parameters() if weight.ndim != 2)]
    muon = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")
    optimizers = [muon, torch.optim.AdamW(others, lr=0.003)]
    schedules = [torch.optim.lr_scheduler.LinearLR(known, 1.0, 0.02, steps) for known in optimizers]
    for _ in range(steps):
        rows = tokens[torch.randint(len(tokens) - 128, (4, 1)) + torch.arange(128)]
        model(rows, labels=rows).loss.backward()
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
    model.save_pretrained(folder)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path(".autotune/hybrid-head"))
@click.option("--prompts", default=16, show_default=True)
@click.option("--steps", default=120, show_default=True, help="To train the target.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "hybrid-head.json", show_default=True)
def main(folder: Path, prompts: int, steps: int, output: Path) -> None:
    target, head = folder / "target", folder / "head"
    head.mkdir(parents=True, exist_ok=True)
    if not (target / "model.safetensors").exists():
        train_target(target, steps)
    if not (head / "model.safetensors").exists():
        write_lines(folder / "examples.jsonl", TEXTS, HEAD_TEXTS)
        (head / "recipe.yaml").write_text(RECIPE)
        subprocess.run([sys.executable, "-m", "autotune", "train", str(head / "recipe.yaml")], check=True)
    write_lines(folder / "workload.jsonl", TEXTS + HEAD_TEXTS, prompts // len(TASKS), "answer")
    workload = load_workload(str(folder / "workload.jsonl"), "evaluate", is_whole=True).cut(prompts, 64)
    arms = arms_of_pool(ModelPool(str(target), [str(head)], "cpu", dtype="float32"), None)
    monitor = ContentionMonitor("cpu")
    chains = [arms.arm(f"chain {n}", Configuration(tree={"policy": "chain", "depth": n})) for n in DEPTHS]
    runs = race(arms.runner(), [arms.plain, *chains], workload.prompts, Everyone()).runs
    contention, frame, values = monitor.contention(), runs_dataframe(runs), []
    for name, total in frame.groupby("arm", sort=False).sum(numeric_only=True).iterrows():
        summary = summarize(name, runs[name], runs[AR])
        assert summary.identical_outputs == len(workload.prompts), "not lossless"
        row = {"arm": name, "speedup": summary.speedup, "low": summary.ci95[0], "high": summary.ci95[1]}
        times = {"round_ms": total.decode_ms / total.rounds, "target_ms": total.verify_ms / total.target_forwards}
        times["draft_ms"] = total.draft_ms / max(1, total.draft_forwards)
        values.append(row | {"tokens_per_round": summary.tokens_per_round} | times)
        click.echo(json.dumps(values[-1]))
    columns = ["arm", "prompt", "task", "new_tokens", "rounds", "decode_ms", "tokens_sha256"]
    fields = {"samples": {"runs": frame[columns].to_dict("records")}, "values": {"arms": values}}
    command = "python benchmarks/hybrid_head.py"
    stamped(output.stem, command=command, contention=contention, **fields).save(output)


if __name__ == "__main__":
    main()
