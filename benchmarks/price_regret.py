"""How much a search loses by errors of its prices: cost tables are measured on a simulated machine whose true prices
are known, and the configuration that the search then chooses is compared with the truly fastest one.

Needs a study folder of ``autotune search``: its traces are replayed, the prices of its cost table are taken as the
truth, and the configurations are those of its tree search. The simulated machine is quiet (samples vary by 4 %), shared
(another process halves the speed in every second second, and samples vary by 8 %) or hostile (bursts of 0.2 to 3 s in
which steps take two to six times as long, and one sample in twenty is off by up to four times). Finalists run on it
too. With ``--base``, another checkout chooses from the same samples' distribution. Prints the regret by machine and
version, median and 95th percentile.

    python benchmarks/price_regret.py .autotune/STUDY [--base CHECKOUT] [--tables 20] [--seconds 24]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

MACHINES = ("quiet", "shared", "hostile")
PARTS = ("decode", "verify")
RUN_NOISE = 0.02  # relative deviation of the time of a run, besides the machine's speed


# -------- runs in either checkout, as a worker


class Machine:
    """A clock whose speed varies."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seconds, self.rng = name, 0.0, np.random.default_rng(seed)
        self.burst = (0.0, 0.0, 1.0)  # begin, end, factor

    def take(self, ms: float, deviation: float | None = None) -> float:
        usual = {"quiet": 0.04, "shared": 0.08, "hostile": 0.08}[self.name] if deviation is None else deviation
        factor = float(np.exp(self.rng.normal(0, usual)))
        if self.name == "shared" and self.seconds % 2 < 1:
            factor *= 2
        if self.name == "hostile":
            if self.seconds > self.burst[1]:
                begin = self.seconds + self.rng.exponential(2.0)
                self.burst = (begin, begin + self.rng.uniform(0.2, 3.0), self.rng.uniform(2, 6))
            if self.seconds > self.burst[0]:
                factor *= self.burst[2]
            if deviation is None and self.rng.random() < 0.05:
                factor *= self.rng.uniform(1, 4)
        self.seconds += factor * ms / 1e3
        return factor * ms


class SimulatedBench:
    """Times single steps at true prices."""

    def __init__(self, machine: Machine, surfaces: Mapping[str, Any], draft: int) -> None:
        self.machine, self.surfaces, self.draft = machine, surfaces, draft

    def _time(self, part: str, tokens: int, kv_length: int) -> float:
        true = self.surfaces[part].latency_ms(np.array([float(tokens)]), np.array([float(kv_length)]))[0, 0]
        return self.machine.take(float(true))

    def decode_ms(self, kv_length: int) -> float:
        return self._time("decode", 1, kv_length)

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        return self._time("verify", tokens, kv_length)

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        return self._time(f"draft_first {self.draft}", tokens, kv_length)

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        return self._time(f"draft_level {self.draft}", tokens, kv_length)


class SimulatedArms:
    """Makes arms that run in no time, at true prices."""

    def __init__(self, machine: Machine, truth: Any) -> None:
        self.machine, self.truth = machine, truth
        self.plain = SimulatedArm("ar", None, self)

    def arm(self, name: str, configuration: Any) -> SimulatedArm:
        return SimulatedArm(name, configuration, self)


class SimulatedArm:
    keeps_state = False

    def __init__(self, name: str, configuration: Any, arms: SimulatedArms) -> None:
        self.name, self.configuration, self.arms = name, configuration, arms
        self.key = name if configuration is None else configuration.key

    def prepare(self, prompts: Sequence[Any]) -> None:
        """Nothing is captured."""

    def decode(self, prompt: Any) -> Any:
        from autotune.documents.decoded import Decoded

        number = int(prompt.name)
        times = self._times(self.configuration, number)
        factor = self.arms.machine.take(sum(times.values()), RUN_NOISE) / sum(times.values())
        times = {name: factor * ms for name, ms in times.items()}
        return Decoded(
            arm=self.key,
            prompt=prompt.name,
            prompt_sha256=prompt.name,
            tokens_sha256="",
            new_tokens=int(self._tokens[number]) + 1,
            rounds=max(1, int(self._rounds[number])),
            target_forwards=1,
            draft_forwards=1,
            target_prefill_ms=1.0,
            draft_prefill_ms=times["prefill"],
            draft_ms=times["draft"],
            verify_ms=times["verify"],
            decode_ms=sum(times.values()),
            verified_nodes=int(self._nodes[number]),
        )

    def _times(self, configuration: Any, number: int) -> dict[str, float]:
        if configuration is None:
            trace = next(iter(self.arms.truth.traces.values()))
            self._tokens = np.diff(trace.answer_start) - 1
            self._rounds, self._nodes = self._tokens, 0 * self._tokens
            return {"verify": float(self.arms.truth.ar_ms[number]), "draft": 0.0, "prefill": 0.0, "overhead": 0.0}
        result = self.arms.truth.replay(configuration)
        self._tokens, self._rounds, self._nodes = result.tokens, result.rounds, result.verified_nodes
        return {
            "verify": float(result.verify_ms[number]),
            "draft": float(result.draft_ms[number]),
            "prefill": float(result.draft_prefill_ms[number]),
            "overhead": float(result.overhead_ms[number]),
        }


def work(path: Path) -> None:
    """Choose a configuration for every machine and seed; prints the true speedups of the choices and of the best."""
    from autotune.console import Console
    from autotune.cost.request_costs import Overhead, PrefillCost
    from autotune.cost.surface import Point, Surface
    from autotune.cost.table import CostTable, DraftCosts
    from autotune.documents.configuration import Configuration
    from autotune.documents.fingerprint import Fingerprint
    from autotune.documents.provenance import ModelReference, stamp
    from autotune.documents.published_defaults import COMPARED_DEFAULTS
    from autotune.documents.subnet import Subnet
    from autotune.evaluation.runner import ArmRunner
    from autotune.measuring.sampling import Sampler
    from autotune.measuring.settings import CostSettings
    from autotune.replay.evaluator import Evaluator
    from autotune.replay.trace import load_trace
    from autotune.search import finalists
    from autotune.search.finalists import Races
    from autotune.search.thresholds import KEPT_PROMPTS
    from autotune.search.tree_search import TreeSearchResult
    from autotune.search.tuning_prompts import TuningPrompts
    from autotune.workloads.prompt import Prompt, WorkloadPrompt
    from autotune.workloads.workload import Workload

    given = json.loads(path.read_text())
    traces = [load_trace(Path(name)) for name in given["traces"]]
    is_joint = not hasattr(CostSettings(), "min_samples")

    def surface(points: Sequence[Sequence[float]]) -> Any:
        return Surface(points=[Point(tokens=int(n), kv_length=int(m), samples_ms=[ms]) for n, m, ms in points])

    references = [ModelReference(**draft["reference"]) for draft in given["drafts"]]
    subnets = [Subnet.model_validate(draft["subnet"], strict=False) for draft in given["drafts"]]

    def table_of(surfaces: Mapping[str, Any], ratios: Sequence[Mapping[str, float]]) -> Any:
        return CostTable(
            provenance=stamp(),
            device=Fingerprint.model_validate(given["device"], strict=False),
            precision="float32",
            target=ModelReference(**given["target"]),
            decode=surfaces["decode"],
            verify=surfaces["verify"],
            prefill=PrefillCost.model_validate(given["prefill"], strict=False),
            drafts=[
                DraftCosts(
                    draft=reference,
                    subnet=subnet.of_price,
                    draft_first=surfaces[f"draft_first {number}"],
                    draft_level=surfaces[f"draft_level {number}"],
                    prefill=PrefillCost.model_validate(draft["prefill"], strict=False),
                    overhead=Overhead.model_validate(draft["overhead"], strict=False),
                    **of_draft,
                )
                for number, (reference, subnet, draft, of_draft) in enumerate(
                    zip(references, subnets, given["drafts"], ratios, strict=True)
                )
            ],
        )

    true_surfaces = {name: surface(points) for name, points in given["surfaces"].items()}
    truth = Evaluator(traces, table_of(true_surfaces, [{}] * len(references)))
    configurations = [Configuration.model_validate(c, strict=False) for c in given["configurations"]]
    configurations = [c for c in configurations if truth.can_replay(c)]
    prompts = tuple(WorkloadPrompt(f"{n}", Prompt(prompt=f"{n}"), ()) for n in range(traces[0].num_prompts))
    workload = Workload("recorded", "tune", prompts)
    true_speedups = {c.key: truth.evaluate(c).speedup for c in configurations}
    lengths = sorted({int(m) for _, m, _ in given["surfaces"]["verify"]})
    settings: dict[str, Any] = {"kv_lengths": (lengths[0], lengths[len(lengths) // 2], lengths[-1]), "every_row": True}
    if not is_joint:
        settings["held_out_kv_length"] = (lengths[0] + lengths[len(lengths) // 2]) // 2
    networks = {reference.id: number for number, reference in enumerate(dict.fromkeys(references))}
    drafts_by_name = {
        name: d.model_copy(update={"draft": given["default_drafts"][name]}) for name, d in COMPARED_DEFAULTS.items()
    }
    finalists.published_defaults = lambda pool: {
        name: truth.resolve(d) for name, d in drafts_by_name.items() if truth.can_replay(d)
    }
    for name in MACHINES:
        for seed in range(given["tables"]):
            machine = Machine(name, seed)
            benches = [SimulatedBench(machine, true_surfaces, number) for number in range(len(references))]
            options: dict[str, Any] = {"clock": lambda machine=machine: machine.seconds}
            if is_joint:
                options["subnets"] = [(networks[r.id], s) for r, s in zip(references, subnets, strict=True)]
            sampler = Sampler(benches, CostSettings(**settings, seed=seed), **options)
            sampler.run(given["seconds"])
            ratios: list[dict[str, float]] = [{} for _ in references]
            if is_joint:
                surfaces = sampler.surfaces()
                for number, (ratio, error) in sampler.observations().verify_ratios.items():
                    ratios[number] = {"verify_ratio": ratio, "verify_error": error}
            else:
                surfaces = {part: sampler.surface(grid) for part, grid in sampler.grids.items()}
                ratios = [{"verify_ratio": sampler.verify_ratio(number)} for number in range(len(references))]
            found = TuningPrompts.of(workload, Evaluator(traces, table_of(surfaces, ratios)))
            candidates = sorted((found.choosing.evaluate(c) for c in configurations), key=lambda c: c.rank)
            trees = TreeSearchResult(candidates, num_replayed=len(candidates), optuna_study="")
            endless = SimpleNamespace(deadline_of=lambda _: float("inf"), limit_of=lambda _: float("inf"))
            tuning: Any = SimpleNamespace(
                pool=None, clock=endless, console=Console(), settings=SimpleNamespace(seed=seed)
            )
            plan: Any = SimpleNamespace(kept_prompts=KEPT_PROMPTS[0])
            arms: Any = SimulatedArms(machine, truth)
            races = Races(arms, ArmRunner(key_of=lambda prompt: prompt.name), tuning.console)
            measured = finalists.measure_finalists(tuning, plan, found, trees, races)
            chosen = truth.evaluate(measured.winner.configuration).speedup
            best = max(true_speedups.values())
            by_price = true_speedups[candidates[0].key]
            predicted = candidates[0].speedup
            row = {
                "machine": name,
                "seed": seed,
                "chosen": chosen,
                "best": best,
                "by price": by_price,
                "predicted": predicted,
            }
            print(json.dumps(row), flush=True)


# -------- driver


def described(study: Path, most: int) -> dict[str, Any]:
    """Everything that workers need of a study, in a form that other checkouts read too."""
    from autotune.cost.joint_fit import choice_of  # noqa: F401  # this checkout has the joint fit
    from autotune.cost.table import CostTable
    from autotune.documents.published_defaults import COMPARED_DEFAULTS
    from autotune.study.document import load_study
    from autotune.study.ledger import Ledger
    from autotune.study.storage import LEDGER

    document = load_study(study)
    tables = [CostTable.load(path) for path in sorted(study.glob("*.cost.json"))]
    table = next(table for table in tables if table.content_hash == document.cost_table)
    ledger = Ledger(study / LEDGER)
    records = ledger.records(document.records["trees"])
    configurations = [c["configuration"] for record in records.values() for c in record["fastest"]]
    by_text = {json.dumps(configuration, sort_keys=True): configuration for configuration in configurations}
    names = [costs.draft.id for costs in table.drafts]
    kinds = {draft.reference.id: draft.kind for draft in document.drafts}

    def points(surface: Any) -> list[tuple[int, int, float]]:
        return [(point.tokens, point.kv_length, point.latency_ms) for point in surface.points]

    surfaces = {"decode": points(table.decode), "verify": points(table.verify)}
    for number, costs in enumerate(table.drafts):
        surfaces[f"draft_first {number}"] = points(costs.draft_first)
        surfaces[f"draft_level {number}"] = points(costs.draft_level)
    first = "digits/independent" if "digits/independent" in names else names[0]
    by_kind = {kind: id for id, kind in kinds.items()}

    def plain(part: Any) -> dict[str, Any]:
        return {key: value for key, value in part.model_dump(mode="json").items() if key != "uncertainty"}

    return {
        "traces": [str(path) for path in sorted(study.glob("traces/*/*.trace.json"))],
        "surfaces": surfaces,
        "target": table.target.model_dump(mode="json"),
        "device": table.device.model_dump(mode="json"),
        "prefill": plain(table.prefill),
        "drafts": [
            {
                "reference": costs.draft.model_dump(mode="json"),
                "subnet": {"heads": costs.subnet.heads, "vocabulary": costs.subnet.vocabulary},
                "prefill": plain(costs.prefill),
                "overhead": plain(costs.overhead),
            }
            for costs in table.drafts
        ],
        "default_drafts": {name: by_kind.get(name, first) for name in COMPARED_DEFAULTS},
        "configurations": [*by_text.values()][:: max(1, len(by_text) // most)],
    }


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--base", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Another checkout.")
@click.option("--tables", default=20, show_default=True, help="Cost tables of each machine and version.")
@click.option("--seconds", default=24.0, show_default=True, help="Simulated time in which steps are timed.")
@click.option("--configurations", default=800, show_default=True, help="Configurations to choose from, at most.")
def main(study: Path, base: Path | None, tables: int, seconds: float, configurations: int) -> None:
    import pandas as pd

    given = {**described(study.absolute(), configurations), "tables": tables, "seconds": seconds}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "given.json"
        path.write_text(json.dumps(given))
        checkouts = {"this": Path(__file__).parents[1]} | ({"base": base.absolute()} if base else {})
        for version, checkout in checkouts.items():
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            command = [sys.executable, __file__, WORKER, str(path)]
            done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            rows += [{"version": version, **json.loads(line)} for line in lines]
    frame = pd.DataFrame(rows)
    frame["regret"] = frame.best / frame.chosen - 1
    frame["regret by price"] = frame.best / frame["by price"] - 1
    frame["predicted over true"] = frame.predicted / frame["by price"] - 1
    columns = ["regret", "regret by price", "predicted over true"]
    quantiles = frame.groupby(["machine", "version"], sort=False)[columns].quantile([0.5, 0.95]).unstack()
    click.echo((100 * quantiles).round(2).to_string())


WORKER = "--worker"
if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(Path(sys.argv[2]))
    else:
        main()
