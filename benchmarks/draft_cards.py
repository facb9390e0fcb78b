"""Writes the cards of trained drafts: tokens per round on held-out prompts, by task and by depth, and how each was
trained.

    python benchmarks/draft_cards.py measure drafts/digits/star [--heads 0.5] [--injection-layer 9] [--visual-keep 0.1]
    [--temperature 1] autotune train drafts/digits/dream/ablations/without-final.yaml --output FOLDER python
    benchmarks/draft_cards.py measure FOLDER --card drafts/digits/dream --label without-final python
    benchmarks/draft_cards.py measure drafts/digits/specvlm --operator pool python benchmarks/draft_cards.py measure
    drafts/digits/star --visual-keep 0.1 --visual-ranking all_queries python benchmarks/draft_cards.py operators
    drafts/digits/specvlm python benchmarks/draft_cards.py write drafts/digits/star

``measure`` adds rows to the card's ``acceptance.jsonl``, one for each value of each option (``--visual-ranking``: for
each pair with a value of ``--visual-keep``), and skips rows that exist for the same weights; a row takes about a
minute. ``operators`` writes ``operators.jsonl``: the loss of every operator of a compressor by task, the choice of its
gate, and by how much: the mean gap between its two largest shares. ``write`` writes ``README.md`` in a second. Rows
whose label is the name of a recipe in the draft's ``ablations`` are compared with its ``baseline``, and with the
paper's ablation.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch
from accelerate import Accelerator

from autotune import files
from autotune.documents.loss_settings import LossSettings
from autotune.documents.subnet import VISUAL_RANKINGS, Operator, Subnet, VisualRanking
from autotune.drafters.checkpoint import load_draft, load_network
from autotune.drafters.compression import SELECTED
from autotune.drafters.specvlm import SpecVlmNetwork
from autotune.files import append_line, read_json, read_yaml, sha256_of
from autotune.modeling.gguf import PACKAGED
from autotune.modeling.loading import BUNDLED_TARGET, load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.modeling.target_defaults import default_workload
from autotune.recording.recorder import Recorder
from autotune.runtime.decoder import Decoder
from autotune.training.examples import JsonlExamples, read_examples
from autotune.training.teacher import Teacher
from autotune.workloads.prompt import AnsweredPrompt
from autotune.workloads.row_files import read_jsonl
from autotune.workloads.workload import bundled_file, load_workload
from benchmarks.evidence.training_curve import distilled_layers, draw_curve, logged

TREE = {"policy": "eagle2", "k": 4, "depth": 6, "budget": 32}
ROWS, OPERATOR_ROWS = "acceptance.jsonl", "operators.jsonl"
BASELINE = "baseline"
DEFAULT_RANKING: VisualRanking = Subnet().visual_ranking
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    # Accepted length on MMT-Bench, SEED-Bench and ScienceQA relative to the full design (DREAM, table 2).
    "dream": {
        "without-initial": (0.59, 0.58, 0.61),
        "without-crossing": (0.44, 0.41, 0.32),
        "without-final": (0.63, 0.65, 0.71),
        "two-crossings": (1.09, 1.13, 1.10),
    },
    # Average accepted length relative to selection (SpecVLM, table 3).
    "specvlm": {"weigh": (3.71 / 3.69,), "concatenate": (3.67 / 3.69,), "none": (3.53 / 3.69,)},
}
PAPERS_ABLATION = {
    "dream": (
        "In table 2 of DREAM, the accepted length drops most without the cross-attention block, and grows with a second one. In "
        "figure 4a, the layer of least entropy gives the highest speedup, and 75 % is the best of the static layers."
    ),
    "specvlm": (
        "In table 3 of SpecVLM, the average accepted length on LLaVA-1.6-7B is 3.69 with a gate that selects, 3.71 with one that "
        "weighs, 3.67 with concatenation and 3.53 without a compressor."
    ),
}


def target_of(card: Path) -> str:
    """The target of a draft's card, by the folder of its drafts."""
    name = card.resolve().parent.name
    return name if name in PACKAGED else BUNDLED_TARGET


def measured(decoder: Decoder, recorder: Recorder, name: str, num_prompts: int, temperature: float) -> dict[str, Any]:
    """Tokens per round on held-out prompts, by task, and acceptance by depth; counts outputs equal to plain
    decoding's.
    """
    workload = load_workload(name, "evaluate", num_prompts=num_prompts)
    if temperature > 0:
        workload = workload.sampled(temperature)
    answers = recorder.answers(workload)
    tokens: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    reached: Counter[int] = Counter()
    num_identical = 0
    for prompt, answer in zip(workload.prompts, answers, strict=True):
        inputs = prompt.inputs(recorder.processor)
        out = decoder.generate(**inputs, **prompt.settings.generation)
        num_identical += out.sequences[0, answer.prompt_length :].tolist() == answer.tokens
        task, lengths = prompt.settings.task, out.stats.accepted_lengths
        tokens[task] += sum(lengths) + len(lengths)
        rounds[task] += len(lengths)
        for length in lengths:
            reached.update(range(length + 1))
    return {
        "prompts": num_prompts,
        "identical": num_identical,
        "tokens_per_round": tokens.total() / rounds.total(),
        "by_task": {task: tokens[task] / rounds[task] for task in tokens},
        "by_depth": [reached[depth] / max(reached[depth - 1], 1) for depth in range(1, TREE["depth"] + 1)],
    }


@click.group()
def main() -> None:
    """Measure trained drafts, and write their cards."""


@main.command()
@click.argument("draft", type=click.Path(path_type=Path, exists=True))
@click.option("--card", type=click.Path(path_type=Path), help="Folder of the card.  [default: the draft's]")
@click.option("--label", default="", help="Name of the row.")
@click.option("--heads", type=float, multiple=True)
@click.option("--injection-layer", type=int, multiple=True)
@click.option("--visual-keep", type=float, multiple=True)
@click.option("--visual-ranking", type=click.Choice(VISUAL_RANKINGS), multiple=True)
@click.option("--operator", type=click.Choice(SELECTED), multiple=True)
@click.option("--subnet", type=(float, int, float), help="Share of heads, injection layer, share of visual tokens.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--prompts", default=48, show_default=True)
def measure(
    draft: Path,
    card: Path | None,
    label: str,
    heads: tuple[float, ...],
    injection_layer: tuple[int, ...],
    visual_keep: tuple[float, ...],
    visual_ranking: tuple[VisualRanking, ...],
    operator: tuple[Operator, ...],
    subnet: tuple[float, int, float] | None,
    temperature: float,
    prompts: int,
) -> None:
    """Decode held-out prompts with a draft or with subnets of it."""
    name = target_of(card or draft)
    target, processor = Target(load_model(name, dtype="float32")), load_processor(name)
    recorder = Recorder(target, reference(name), processor, Path(".autotune"))
    own_keep = load_draft(str(draft), target).visual_keep
    subnets = [Subnet(heads=share, visual_keep=own_keep) for share in heads]
    subnets += [Subnet(injection_layer=layer, visual_keep=own_keep) for layer in injection_layer]
    rankings = visual_ranking or (DEFAULT_RANKING,)
    subnets += [Subnet(visual_keep=keep, visual_ranking=one) for keep in visual_keep for one in rankings]
    subnets += [Subnet(operator=name, visual_keep=own_keep) for name in operator]
    if subnet is not None:
        subnets.append(Subnet(heads=subnet[0], injection_layer=subnet[1], visual_keep=subnet[2]))
    path = (card or draft) / ROWS
    known = [
        (row["sha256"], Subnet(**row["subnet"]), row["prompts"], row.get("temperature", 0.0))
        for row in files.read_lines(path)
    ]
    sha256 = sha256_of(draft / "model.safetensors")
    for choice in subnets or [Subnet(visual_keep=own_keep)]:
        if (sha256, choice, prompts, temperature) in known:
            continue
        loaded = load_draft(str(draft), target, choice)
        keep, ranking = choice.visual_keep, choice.visual_ranking
        decoder = Decoder(target, loaded, tree=TREE, visual_keep=keep, visual_ranking=ranking, processor=processor)
        row = {
            "label": label,
            "sha256": sha256,
            "subnet": choice.model_dump(exclude_defaults=True) | {"visual_keep": keep},
        }
        if temperature > 0:
            row["temperature"] = temperature
        figures = measured(decoder, recorder, default_workload(name), prompts, temperature)
        row |= {"parameters": loaded.num_parameters, **figures}
        append_line(path, row)
        click.echo(f"{label} {choice.name}: M {row['tokens_per_round']:.2f}, {row['identical']}/{prompts} identical")


@main.command()
@click.argument("draft", type=click.Path(path_type=Path, exists=True))
def operators(draft: Path) -> None:
    """Measure the loss of every operator of a compressor by task, and what its gate chooses, on the bundled prompts."""
    target, processor = Target(load_model(BUNDLED_TARGET)), load_processor(BUNDLED_TARGET)
    network, teacher = load_network(draft), Teacher(target)
    assert isinstance(network, SpecVlmNetwork)
    layer, names = network.config.num_target_layers, network.config.compression.operators
    path, recorder = bundled_file("digits"), Recorder(target, reference(BUNDLED_TARGET), processor, Path(".autotune"))
    by_task: dict[str, list[tuple[int, AnsweredPrompt]]] = {}
    for number, line in read_jsonl(path, AnsweredPrompt):
        if line.images:
            answered = line.model_copy(update={"answer": f" {line.answer}"})
            by_task.setdefault(line.task, []).append((number, answered))
    rows = []
    for task, prompts in by_task.items():
        lines = read_examples(path, prompts, recorder, Accelerator())
        batches = JsonlExamples(lines, target, processor, batch_size=8)
        losses, agreement, chosen, margins = [], [], [], []
        for number in range(batches.num_batches):
            batch = teacher.read(batches[number], layers=())
            found = network.operator_losses(batch, LossSettings(), torch.Generator().manual_seed(number))
            questions = batch.hidden[layer][torch.arange(8), batch.loss_start]
            scores = network.compressor.scores(network.target_features({layer: questions}))
            best = (scores / network.config.compression.temperature).softmax(-1).topk(2)
            chosen.append(best.indices[:, 0])
            margins.append(best.values[:, 0] - best.values[:, 1])
            losses.append(found.losses)
            agreement.append(found.agreement)
        choice, loss = torch.cat(chosen), torch.cat(losses)
        rows.append(
            {
                "sha256": sha256_of(draft / "model.safetensors"),
                "task": task,
                "examples": len(choice),
                "losses": dict(zip(names, loss.mean(0).tolist(), strict=True)),
                "agreement": dict(zip(names, torch.cat(agreement).mean(0).tolist(), strict=True)),
                "gate_loss": loss.gather(1, choice[:, None]).mean().item(),
                "margin": torch.cat(margins).mean().item(),
                "chosen": {name: int((choice == number).sum()) for number, name in enumerate(names)},
            }
        )
        click.echo(json.dumps(rows[-1]))
    (draft / OPERATOR_ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def operator_section(rows: list[dict[str, Any]]) -> list[str]:
    """Lines about the losses of the operators by task and the choice of the gate; empty without measurements."""
    if not rows:
        return []
    names = list(rows[0]["losses"])
    lines = [
        "",
        "## What the gate chooses",
        "",
        f"The losses of the recipe on {rows[0]['examples']} held-out examples of each task with images, with each operator forced; in brackets "
        "the agreement with the target. The last column but one is the loss with the gate's choice, relative to the best operator of the task; the margin is "
        "the mean gap between the gate's two largest shares.",
        "",
        f"| task | {' | '.join(names)} | the gate chooses | gate / best | margin |",
        "|---" * (4 + len(names)) + "|",
    ]
    for row in rows:
        cells = " | ".join(f"{row['losses'][name]:.4f} ({100 * row['agreement'][name]:.1f} %)" for name in names)
        chosen = {name: count for name, count in row["chosen"].items() if count}
        choice = ", ".join(f"{name} {100 * count / row['examples']:.0f} %" for name, count in chosen.items())
        ratio = row["gate_loss"] / min(row["losses"].values())
        lines.append(f"| {row['task']} | {cells} | {choice} | {ratio:.4f} | {row['margin']:.3f} |")
    return lines


def table(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Lines of a Markdown table."""
    tasks = list(rows[0]["by_task"])
    lines = [f"| | M | {' | '.join(tasks)} |", "|---" * (2 + len(tasks)) + "|"]
    for name, row in zip(names, rows, strict=True):
        cells = " | ".join(f"{row['by_task'][task]:.2f}" for task in tasks)
        lines.append(f"| {name} | **{row['tokens_per_round']:.2f}** | {cells} |")
    return lines


def sampled_label(row: dict[str, Any]) -> str:
    return f"temperature {row['temperature']:g}, {row['prompts']} prompts"


def ablation_section(draft: Path, kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """Lines that compare the drafts trained from the recipes in ``ablations`` with their baseline; empty without one,
    and for drafts without a published ablation of these names.

    The last row measured of each recipe counts.
    """
    recipes = {path.stem: read_yaml(path) for path in sorted((draft / "ablations").glob("*.yaml"))}
    measured = {row["label"]: row for row in rows if row["label"] in recipes}
    if BASELINE not in measured or kind not in PUBLISHED:
        return []
    full = measured[BASELINE]["tokens_per_round"]
    names = [BASELINE, *(name for name in recipes if name in measured and name != BASELINE)]
    num_steps = sorted({sum(stage["steps"] for stage in recipes[name]["stages"]) for name in names})
    lines = [
        "",
        "## Ablations",
        "",
        f"Drafts trained for {' or '.join(f'{steps:,}' for steps in num_steps)} steps by the recipes in [`ablations`](ablations), on "
        f"{measured[BASELINE]['prompts']} held-out prompts. {PAPERS_ABLATION[kind]}",
        "",
        "| recipe | difference | M | M / baseline | paper |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        tokens, published = measured[name]["tokens_per_round"], PUBLISHED[kind].get(name)
        paper = (
            "-" if published is None else " to ".join(f"{one:.2f}" for one in sorted({min(published), max(published)}))
        )
        difference = recipes[name]["name"].partition(", ")[2]
        lines.append(f"| `{name}` | {difference} | {tokens:.2f} | {tokens / full:.2f} | {paper} |")
    return lines


def ranking_section(rows: list[dict[str, Any]]) -> list[str]:
    """Lines with M by ranking and share of visual tokens; empty where one ranking was measured."""
    names = {"visual_keep", "visual_ranking"}
    by_ranking = {
        (row["subnet"].get("visual_ranking", DEFAULT_RANKING), row["subnet"]["visual_keep"]): row
        for row in rows
        if row["subnet"].keys() <= names
    }
    keeps = sorted({keep for ranking, keep in by_ranking if ranking != DEFAULT_RANKING}, reverse=True)
    if not keeps:
        return []
    lines = [
        "",
        "## Ranking of the visual tokens",
        "",
        "M by the share of visual tokens kept.",
        "",
        "| | " + " | ".join(f"{keep:g}" for keep in keeps) + " |",
        "|---" * (1 + len(keeps)) + "|",
    ]
    for ranking in VISUAL_RANKINGS:
        found = [by_ranking.get((ranking, keep)) for keep in keeps]
        cells = ["-" if row is None else f"{row['tokens_per_round']:.2f}" for row in found]
        lines.append(f"| `{ranking}` | {' | '.join(cells)} |")
    return lines


def layer_section(layers: dict[int, int]) -> list[str]:
    """Lines with the share of the logged steps that distilled each layer; empty without intermediate distillation."""
    if not layers:
        return []
    total = sum(layers.values())
    return [
        "",
        "## Distilled layers",
        "",
        f"Layer of the target that the first block imitated, as a share of {total:,} logged steps. DREAM and STAR choose the layer by "
        "attention entropy (section 3.2 of both). DREAM does not show which; figure 4 of STAR plots the entropies of its target by layer.",
        "",
        "| layer | " + " | ".join(map(str, layers)) + " |",
        "|---" * (1 + len(layers)) + "|",
        "| steps | " + " | ".join(f"{100 * number / total:.0f} %" for number in layers.values()) + " |",
    ]


@main.command()
@click.argument("draft", type=click.Path(path_type=Path, exists=True))
def write(draft: Path) -> None:
    """Write the card of a draft with a recipe from the measured rows. Notes below a line "## Notes" are kept."""
    config, recipe = read_json(draft / "config.json"), read_yaml(draft / "recipe.yaml")
    rows = files.read_lines(draft / ROWS)
    sha256 = sha256_of(draft / "model.safetensors")
    sampled = [row for row in rows if row["sha256"] == sha256 and row.get("temperature")]
    rows = [row for row in rows if not row.get("temperature")]
    measured_rows = [row for row in rows if row["sha256"] == sha256 and not row["label"]]
    full = next(row for row in measured_rows if row["subnet"] == {"visual_keep": config.get("visual_keep", 1.0)})
    kind, data = recipe["model"], recipe.get("data", {}).get("num_examples")
    examples = f"{data:,} examples" if data else "all examples"
    source = (
        "the training split of [`drafts/digits/make`](../make); the target's distributions along the reference answers"
    )
    if "magpie" in recipe.get("data", {}):
        source = "questions that the target wrote itself (`magpie`), and its answers to them"
    name = target_of(draft)
    target = f"`{name}`" if name in PACKAGED else f"[`{name}`](../target)"
    steps = " + ".join(f"{stage['steps']} steps of {stage['batch_size']}" for stage in recipe["stages"])
    path = draft / "README.md"
    notes = path.read_text().partition("\n## Notes\n")[2] if path.exists() else ""
    lines = [
        "---",
        "license: apache-2.0",
        "tags: [speculative-decoding, autotune]",
        "---",
        f"# `{draft.parent.name}/{draft.name}`",
        "",
        " ".join(recipe["description"].split()),
        "",
        "| | |",
        "|---|---|",
        f"| kind | `{kind}` |",
        f"| target | {target} |",
        f"| trained by | `autotune train drafts/{draft.parent.name}/{draft.name}/recipe.yaml`: {steps} |",
        f"| data | {source}, {examples} |",
        f"| parameters | {full['parameters']:,}; {'embeddings' if kind == 'eagle3' else 'embeddings and output head'} are those of the target |",
        "| licence | Apache-2.0 |",
        f"| sha256 of `model.safetensors` | `{sha256}` |",
        "",
        f"## Acceptance on {full['prompts']} held-out prompts",
        "",
        f"Tokens per round M with an EAGLE-2 tree (k 4, depth 6, 32 nodes); {full['identical']} of {full['prompts']} outputs equal plain decoding.",
        "",
        *table([full, *sampled], ["full draft", *map(sampled_label, sampled)]),
        "",
        "Acceptance rate by depth, among the rounds that accepted the depth before:",
        "",
        "| depth | " + " | ".join(map(str, range(1, len(full["by_depth"]) + 1))) + " |",
        "|---" * (1 + len(full["by_depth"])) + "|",
        "| accepted | " + " | ".join(f"{100 * share:.1f} %" for share in full["by_depth"]) + " |",
        "",
        "![Loss and agreement in training](training.png)",
        *layer_section(distilled_layers(logged(draft / "training.jsonl"))),
    ]
    full_value = {
        "heads": 1.0,
        "injection_layer": config.get("num_target_layers"),
        "visual_keep": full["subnet"]["visual_keep"],
    }
    titles = {
        "heads": "Share of heads kept",
        "injection_layer": "Injection layer of the target",
        "visual_keep": "Share of visual tokens kept",
    }
    for key, title in titles.items():
        others = full["subnet"] | {key: full_value[key]}  # the other choices are the full draft's
        values = {
            row["subnet"][key]: row
            for row in measured_rows
            if key in row["subnet"] and {**row["subnet"], key: full_value[key]} == others
        }
        if values.keys() - {full_value[key]}:
            values[full_value[key]] = full
            chosen = sorted(values, reverse=True)
            lines += ["", f"## {title}", "", *table([values[v] for v in chosen], [f"{value:g}" for value in chosen])]
    lines += ranking_section(measured_rows)
    forced = {row["subnet"]["operator"]: row for row in measured_rows if "operator" in row["subnet"]}
    if forced:
        note = (
            f"Every prompt is compressed by one operator, on {next(iter(forced.values()))['prompts']} held-out prompts."
        )
        lines += ["", "## Single operators", "", note, "", *table([*forced.values()], [*forced])]
    lines += operator_section([row for row in files.read_lines(draft / OPERATOR_ROWS) if row["sha256"] == sha256])
    if section := ablation_section(draft, kind, rows):
        lines += section
    if notes:
        lines += ["", "## Notes", notes.rstrip()]
    path.write_text("\n".join(lines) + "\n")
    draw_curve(draft / "training.jsonl", draft / "training.png")
    click.echo(f"{path} written")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
