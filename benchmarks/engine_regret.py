"""The loss by replaying few settings of each type: regret of the settings that backends replay against fine grids.

    python benchmarks/engine_regret.py chat=.autotune/engines/KEY/plain.jsonl code=... -o regret.json

The files hold the plain answers that a search recorded in llama-server; the transcripts of tests/engines are added.
Each type's grid is the one that searches replayed before, of 75 to 640 settings. Every setting is replayed over every
file and priced four ways, as verifications cost on a CPU with four bits, with bfloat16 in either engine, and on an
accelerator. The regret is how much longer the fastest of the few settings, the types' defaults or no speculation take
than the fastest of the grids or no speculation. With --choose N, the best N settings of each engine are found greedily
instead. Takes two minutes.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.llama_cpp import LlamaBackend
from autotune.engines.ngram_drafters import KnownRequest
from autotune.engines.replay import RequestReplay, replay_speculation
from autotune.engines.served import Served
from autotune.engines.vllm import VllmBackend
from autotune.files import read_lines
from benchmarks.evidence.result import stamped

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 8192
SIZES, LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
PRICES = {
    "CPU, Q4_1": ([1, 2, 4, 8, 16, 64], [1.0, 2.3, 3.4, 5.6, 9.8, 38.7]),
    "CPU, BF16 of llama.cpp": ([1, 2, 4, 8, 16, 64], [1.0, 1.6, 2.2, 2.8, 4.5, 15.0]),
    "CPU, bfloat16 of vLLM": ([1, 2, 4, 8, 16, 32, 64], [1.0, 1.0, 1.1, 1.3, 1.6, 2.5, 4.3]),
    "accelerator": ([1, 64], [1.0, 1.3]),
}
"""Passes over numbers of tokens, in plain steps: of searches of llama.cpp and of vLLM on two cores, and a model."""


def grids() -> dict[str, list[tuple[float, ...]]]:
    """Values of the options of each type."""
    pools = itertools.product((*SIZES, 20), (0, 1, 2, 4, 8, 48), (*LENGTHS, 64))
    few, lengths = SIZES[:-1], (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
    return {
        "ngram-simple": [(n, m) for n in SIZES for m in LENGTHS if m >= n],
        "ngram-mod": [(n, least, most) for n, least, most in pools if least <= most],
        "ngram": [(n, most, k) for most in few for n in few for k in lengths if n <= most],
        "suffix": list(itertools.product((8, 24), (0.5, 1.0, 2.0, 4.0), (0.05, 0.1, 0.2, 0.3, 0.5), (3, 5, 8, 24))),
    }


TABLES = {name: np.interp(np.arange(80), *points).tolist() for name, points in PRICES.items()}


def steps(request: RequestReplay, price: str) -> float:
    """Time of a request in plain steps."""
    return sum(number * TABLES[price][n] for (n, _), number in request.passes.items())


def times(kind: str, values: tuple[float, ...], answers: list[list[Served]]) -> list[float]:
    """Time of each file by each price, over that of plain decoding."""
    one = Speculation(type=kind, options=dict(zip(OPTIONS[kind], values, strict=True)))
    replays = [replay_speculation(one, map(KnownRequest, file), CONTEXT) for file in answers]
    return [
        sum(steps(request, price) for request in file) / sum(request.num_tokens for request in file)
        for file in replays
        for price in PRICES
    ]


def regret(rows: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Regret of the fastest of rows of times, or of no speculation."""
    return np.minimum(1.0, rows.min(axis=0)) / np.minimum(1.0, best) - 1


@click.command(help=__doc__)
@click.argument("files", nargs=-1)
@click.option("--choose", default=0, help="Settings of each engine to find, with the defaults.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None)
def main(files: tuple[str, ...], choose: int, output: Path | None) -> None:
    names, answers = list[str](), list[list[Served]]()
    for name, _, path in (file.partition("=") for file in files):
        names.append(name)
        answers.append([Served.model_validate(row) for row in read_lines(Path(path))])
    for engine in ("llama", "vllm"):
        rows = json.loads((ROOT / f"tests/engines/{engine}_transcript.json").read_text())["prompts"]
        names.append(f"transcript of {engine}")
        answers.append([Served.of(**{k: value for k, value in row.items() if k != "text"}) for row in rows])
    scenarios = [(name, price) for name in names for price in PRICES]
    regrets, settings = list[dict[str, Any]](), list[dict[str, Any]]()
    spaces = {**LlamaBackend.space, **VllmBackend.space}
    for engine, kinds in (("llama.cpp", ("ngram-simple", "ngram-mod")), ("vllm", ("ngram", "suffix"))):
        labels, defaults = list[tuple[str, tuple[float, ...]]](), list[int]()
        for kind in kinds:
            defaults.append(len(labels))
            values = [tuple(OPTIONS[kind].values()), *grids()[kind], *spaces[kind]]
            labels += [(kind, one) for one in dict.fromkeys(values)]
        rows = np.array([times(*label, answers) for label in labels])
        best = rows.min(axis=0)
        chosen = list(defaults) if choose else [n for n, (kind, one) in enumerate(labels) if one in spaces[kind]]
        chosen = list(dict.fromkeys([*defaults, *chosen]))
        while choose and len(chosen) < choose:
            worst = [regret(rows[[*chosen, at]], best) for at in range(len(labels))]
            chosen.append(min(range(len(labels)), key=lambda at: (worst[at].max(), worst[at].sum())))
        lost = regret(rows[chosen], best)
        print(f"{engine}: {len(labels)} settings, {len(chosen)} chosen, regret at most {lost.max():.2%}")
        for at in chosen:
            print("   ", *labels[at], flush=True)
        gains = 1 / np.minimum(1.0, best)
        for (name, price), one, gain in zip(scenarios, lost.tolist(), gains.tolist(), strict=True):
            print(f"{engine}; {name}; {price}: at best {gain:.2f}x, regret {one:.2%}")
            row = {"answers": name, "prices": price, "best": round(gain, 3), "regret": round(one, 4)}
            regrets.append({"engine": engine, **row})
        most = {"replayed": len(chosen), "before": len(labels), "most_regret": round(float(lost.max()), 4)}
        settings.append({"engine": engine, **most})
    if output:
        fields = {
            "source": "counted",
            "machine": "any",
            "command": f"python benchmarks/engine_regret.py {' '.join(f'{name}=FILE' for name in names[:-2])}",
            "note": "answers of SmolLM2-135M-Instruct in Q4_1; the settings were chosen on the same answers",
            "values": {"settings": settings, "regret": regrets},
        }
        stamped(output.stem, **fields).save(output)


if __name__ == "__main__":
    main()
