"""Writes the cards of trained drafts: tokens per round on held-out prompts, by task and by depth, and how each was trained.

    python benchmarks/draft_cards.py measure drafts/digits/star [--heads 0.5] [--injection-layer 9] [--visual-keep 0.1]
    autotune train drafts/digits/dream/ablations/without-final.yaml --output FOLDER
    python benchmarks/draft_cards.py measure FOLDER --card drafts/digits/dream --label without-final
    python benchmarks/draft_cards.py write drafts/digits/star

``measure`` adds rows to the card's ``acceptance.jsonl``, one for each value of each option, and skips rows that exist for
the same weights; a row takes about a minute. ``write`` writes ``README.md`` in a second. Rows whose label is the name of a
recipe in the draft's ``ablations`` are compared with its ``baseline``, and with the paper's ablation.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch

from autotune.acceptance.recorder import Recorder
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.files import append_line, read_json, read_lines, read_yaml, sha256_of
from autotune.modeling.loading import BUNDLED_TARGET, load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.training.curve import draw_curve
from autotune.workloads.workload import load_workload

TREE = {"policy": "eagle2", "k": 4, "depth": 6, "budget": 32}
ROWS = "acceptance.jsonl"
BASELINE = "baseline"
PUBLISHED: dict[str, dict[str, tuple[float, float, float]]] = {
    # Accepted length on MMT-Bench, SEED-Bench and ScienceQA relative to the full design (DREAM, table 2).
    "dream": {
        "without-initial": (0.59, 0.58, 0.61),
        "without-crossing": (0.44, 0.41, 0.32),
        "without-final": (0.63, 0.65, 0.71),
        "two-crossings": (1.09, 1.13, 1.10),
    }
}
PAPERS_ABLATION = {
    "dream": (
        "In table 2 of DREAM, the accepted length drops most without the cross-attention block, and grows with a second one. In "
        "figure 4a, the layer of least entropy gives the highest speedup, and 75 % is the best of the static layers."
    )
}


def measured(decoder: Decoder, recorder: Recorder, num_prompts: int) -> dict[str, Any]:
    """Tokens per round on held-out prompts, by task, and acceptance by depth; counts outputs equal to plain decoding's."""
    workload = load_workload("digits", "evaluate", num_prompts=num_prompts)
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
@click.option("--subnet", type=(float, int, float), help="Share of heads, injection layer, share of visual tokens.")
@click.option("--prompts", default=48, show_default=True)
def measure(
    draft: Path,
    card: Path | None,
    label: str,
    heads: tuple[float, ...],
    injection_layer: tuple[int, ...],
    visual_keep: tuple[float, ...],
    subnet: tuple[float, int, float] | None,
    prompts: int,
) -> None:
    """Decode held-out prompts with a draft or with subnets of it."""
    target, processor = Target(load_model(BUNDLED_TARGET)), load_processor(BUNDLED_TARGET)
    recorder = Recorder(target, reference(BUNDLED_TARGET), processor, Path(".autotune"))
    own_keep = load_draft(str(draft), target).visual_keep
    subnets = [Subnet(heads=share, visual_keep=own_keep) for share in heads]
    subnets += [Subnet(injection_layer=layer, visual_keep=own_keep) for layer in injection_layer]
    subnets += [Subnet(visual_keep=keep) for keep in visual_keep]
    if subnet is not None:
        subnets.append(Subnet(heads=subnet[0], injection_layer=subnet[1], visual_keep=subnet[2]))
    path = (card or draft) / ROWS
    known = [(row["sha256"], Subnet(**row["subnet"]), row["prompts"]) for row in read_lines(path)]
    sha256 = sha256_of(draft / "model.safetensors")
    for choice in subnets or [Subnet(visual_keep=own_keep)]:
        if (sha256, choice, prompts) in known:
            continue
        loaded = load_draft(str(draft), target, choice)
        decoder = Decoder(target, loaded, tree=TREE, visual_keep=choice.visual_keep, processor=processor)
        row = {"label": label, "sha256": sha256, "subnet": choice.model_dump(exclude_none=True)}
        row |= {"parameters": loaded.num_parameters, **measured(decoder, recorder, prompts)}
        append_line(path, row)
        click.echo(f"{label} {choice.name}: M {row['tokens_per_round']:.2f}, {row['identical']}/{prompts} identical")


def table(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Lines of a Markdown table."""
    tasks = list(rows[0]["by_task"])
    lines = [f"| | M | {' | '.join(tasks)} |", "|---" * (2 + len(tasks)) + "|"]
    for name, row in zip(names, rows, strict=True):
        cells = " | ".join(f"{row['by_task'][task]:.2f}" for task in tasks)
        lines.append(f"| {name} | **{row['tokens_per_round']:.2f}** | {cells} |")
    return lines


def ablation_section(draft: Path, kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """Lines that compare the drafts trained from the recipes in ``ablations`` with their baseline; empty without one.

    The last row measured of each recipe counts.
    """
    recipes = {path.stem: read_yaml(path) for path in sorted((draft / "ablations").glob("*.yaml"))}
    measured = {row["label"]: row for row in rows if row["label"] in recipes}
    if BASELINE not in measured:
        return []
    full = measured[BASELINE]["tokens_per_round"]
    names = [BASELINE, *(name for name in recipes if name in measured and name != BASELINE)]
    num_steps = sorted({sum(stage["steps"] for stage in recipes[name]["stages"]) for name in names})
    lines = [
        "",
        "## Ablations",
        "",
        f"Drafts trained for {' or '.join(f'{steps:,}' for steps in num_steps)} steps by the recipes in [`ablations`](ablations), on "
        f"{measured[BASELINE]['prompts']} held-out prompts. {PAPERS_ABLATION.get(kind, '')}".rstrip(),
        "",
        "| recipe | difference | M | M / baseline | paper |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        tokens, published = measured[name]["tokens_per_round"], PUBLISHED.get(kind, {}).get(name)
        paper = "-" if published is None else f"{min(published):.2f} to {max(published):.2f}"
        difference = recipes[name]["name"].partition(", ")[2]
        lines.append(f"| `{name}` | {difference} | {tokens:.2f} | {tokens / full:.2f} | {paper} |")
    return lines


@main.command()
@click.argument("draft", type=click.Path(path_type=Path, exists=True))
def write(draft: Path) -> None:
    """Write the card from the measured rows. Notes below a line "## Notes" are kept."""
    config, recipe, rows = read_json(draft / "config.json"), read_yaml(draft / "recipe.yaml"), read_lines(draft / ROWS)
    sha256 = sha256_of(draft / "model.safetensors")
    own = [row for row in rows if row["sha256"] == sha256 and row["subnet"].keys() == {"visual_keep"}]
    full = next(row for row in own if row["subnet"]["visual_keep"] == config.get("visual_keep", 1.0))
    kind, data = config.get("kind", "independent"), recipe.get("data", {}).get("num_examples")
    examples = f"{data:,} examples" if data else "every example once"
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
        f"| target | [`{draft.parent.name}/target`](../target) |",
        f"| trained by | `autotune train drafts/{draft.parent.name}/{draft.name}/recipe.yaml`: {steps} |",
        f"| data | the training split of the bundled digits, {examples}; the target's distributions along the reference answers |",
        f"| parameters | {full['parameters']:,}{'' if kind == 'independent' else '; embeddings and output head are those of the target'} |",
        "| licence | Apache-2.0 |",
        f"| sha256 of `model.safetensors` | `{sha256}` |",
        "",
        f"## Acceptance on {full['prompts']} held-out prompts",
        "",
        f"Tokens per round M with an EAGLE-2 tree (k 4, depth 6, 32 nodes); {full['identical']} of {full['prompts']} outputs equal plain decoding.",
        "",
        *table([full], ["full draft"]),
        "",
        "Acceptance rate by depth, among the rounds that accepted the depth before:",
        "",
        "| depth | " + " | ".join(map(str, range(1, len(full["by_depth"]) + 1))) + " |",
        "|---" * (1 + len(full["by_depth"])) + "|",
        "| accepted | " + " | ".join(f"{100 * share:.1f} %" for share in full["by_depth"]) + " |",
        "",
        "![Loss and agreement in training](training.png)",
    ]
    full_value = {
        "heads": 1.0,
        "injection_layer": config.get("num_target_layers"),
        "visual_keep": config.get("visual_keep"),
    }
    titles = {
        "heads": "Share of heads kept",
        "injection_layer": "Injection layer of the target",
        "visual_keep": "Share of visual tokens kept",
    }
    for key, title in titles.items():
        subnets = [
            row
            for row in rows
            if row["sha256"] == sha256 and key in row["subnet"] and row is not full and not row["label"]
        ]
        values = [(row["subnet"][key], row) for row in subnets if key != "visual_keep" or row in own]
        if values:
            values = sorted([*values, (full_value[key], full)], key=lambda item: -item[0])
            lines += ["", f"## {title}", "", *table([row for _, row in values], [f"{value:g}" for value, _ in values])]
    if section := ablation_section(draft, kind, rows):
        lines += section
    elif others := [row for row in rows if row["label"]]:
        lines += ["", "## Ablations", "", *table(others, [row["label"] for row in others])]
    if notes:
        lines += ["", "## Notes", notes.rstrip()]
    path.write_text("\n".join(lines) + "\n")
    draw_curve(draft / "training.jsonl", draft / "training.png")
    click.echo(f"{path} written")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
