"""Speedups that papers published, predicted from datasheets and shapes alone, with the published tokens per round.

``published_speedups.csv`` has the pairs of (tokens per round, speedup) with their paper, table and row, and
``published_speedups.yaml`` the rule by which rows were taken, the models' shapes, the methods' rounds, and published
times of eager and captured plain steps, on one GPU and on several that share the target. Constants of
``DatasheetLimits`` (``autotune/cost/roofline.py``) are fitted here: ``eager_layer_ms`` to the eager steps,
``kernel_ms`` and ``host_ms`` to captured steps that were measured on an H100, and
``layers_outside`` to the speedups, which are eager, where every paper and page weighs the same. Every paper is also
predicted with the constant that the others give::

    python benchmarks/published_speedups.py

takes about five seconds. Nothing is measured.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pandas as pd
import yaml

from autotune.cost.roofline import KERNELS_OUTSIDE, DatasheetLimits, find_limits, step_ms
from autotune.cost.table import ModelShape
from autotune.documents.execution import CUDA_GRAPH
from autotune.trees.limits import Floats

HERE = Path(__file__).parent
CONSTANTS = find_limits("h100")  # which every datasheet has
KV_LENGTH = 1000  # of all pairs: papers do not state the lengths of prompts


class Pair(NamedTuple):
    """A row of ``published_speedups.csv``."""

    paper: str
    table: int
    model: str
    method: str
    temperature: int
    dataset: str
    device: str
    tokens_per_round: float
    speedup: float


def load() -> tuple[pd.DataFrame, dict[str, Any]]:
    """PublishedDefault pairs, a row for each, and the other inputs."""
    inputs: dict[str, Any] = yaml.safe_load((HERE / "published_speedups.yaml").read_text())
    return pd.read_csv(HERE / "published_speedups.csv"), inputs


@functools.cache
def limits_of(device: str, layers_outside: float) -> DatasheetLimits:
    return find_limits(device).model_copy(update={"layers_outside": layers_outside})


def shape_of(model: dict[str, int], layers: int | None = None) -> ModelShape:
    """A model in 16 bits, or a draft with some of its layers and its output head. Layers with norms of queries and keys
    have four.
    """
    num_layers = model["layers"] if layers is None else layers
    hidden, keys = model["hidden"], 2 * model["kv"]
    layer = hidden * (2 * model["q"] + keys + 3 * model["mlp"])
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden,
        text_parameters=num_layers * layer + hidden * model["vocab"],
        divided_parameters=num_layers * layer,
        vision_parameters=0,
        kv_bytes_per_token=2 * num_layers * keys,
        bytes_per_parameter=2,
        layer_kernels=24 + 8 * model.get("norms", 2),
    )


def predicted_speedup(pair: Pair, inputs: dict[str, Any], layers_outside: float) -> float:
    """Speedup over plain decoding by the roofline of the pair's device."""
    limits = limits_of(pair.device, layers_outside)
    name, _, window = pair.method.partition(" window ")
    method = inputs["methods"][name.split()[0]]
    levels, nodes = (int(window), int(window)) if window else (method["levels"], method["nodes"])
    target = shape_of(inputs["models"][pair.model])
    draft = shape_of(inputs["models"][pair.model], method["blocks"])
    round_ms = step_ms(draft, limits, pair.tokens_per_round, KV_LENGTH)
    round_ms += (levels - 1) * step_ms(draft, limits, method["k"], KV_LENGTH)
    round_ms += step_ms(target, limits, nodes + 1, KV_LENGTH) + limits.round_ms * (1 + levels / 8)
    return pair.tokens_per_round * step_ms(target, limits, 1, KV_LENGTH) / round_ms


def predictions(pairs: pd.DataFrame, inputs: dict[str, Any], layers_outside: float) -> Floats:
    """Predicted speedups of all pairs."""
    rows = (Pair(*row) for row in pairs.itertuples(index=False))
    return np.array([predicted_speedup(pair, inputs, layers_outside) for pair in rows])


def fit_layers_outside(pairs: pd.DataFrame, inputs: dict[str, Any]) -> float:
    """The ``layers_outside`` of least mean absolute log error, where every paper weighs the same."""
    from scipy.optimize import minimize_scalar

    def error(layers: float) -> float:
        logs = np.abs(np.log(predictions(pairs, inputs, layers) / pairs.speedup))
        return float(logs.groupby(pairs.paper).mean().mean())

    return float(minimize_scalar(error, bounds=(0.0, 20.0), method="bounded", options={"xatol": 0.01}).x)


def plain_layer_ms(inputs: dict[str, Any]) -> Floats:
    """Time of a layer's launches in every published plain step, which all take longer than their bounds by memory."""
    times = []
    for step in inputs["plain_steps"]:
        shape = shape_of(inputs["models"][step["model"]])
        launches_aside = find_limits(step["device"]).model_copy(update={"eager_layer_ms": 0.0})
        assert step_ms(shape, launches_aside, 1, KV_LENGTH) < step["ms"], step
        times.append(step["ms"] / (shape.num_layers + CONSTANTS.layers_outside))
    return np.array(times)


def captured_steps(steps: list[dict[str, Any]], inputs: dict[str, Any]) -> pd.DataFrame:
    """Captured steps, in milliseconds, and those predicted."""
    predicted = [
        step_ms(
            shape_of(inputs["models"][step["model"]], step.get("layers")),
            find_limits(step["device"]),
            step.get("tokens", 1),
            step.get("kv", KV_LENGTH),
            CUDA_GRAPH,
        )
        for step in steps
    ]
    frame = pd.DataFrame(steps)
    return frame.assign(predicted=predicted, error=predicted / frame.ms - 1)


def fit_captured(inputs: dict[str, Any]) -> tuple[float, float]:
    """``kernel_ms`` and ``host_ms`` of least mean squared log error over the captured steps that were measured."""
    from scipy.optimize import minimize

    steps = inputs["measured_steps"]
    shapes = [shape_of(inputs["models"][step["model"]], step.get("layers")) for step in steps]
    kernels = np.array([shape.num_layers * shape.layer_kernels + KERNELS_OUTSIDE for shape in shapes])
    frame = captured_steps(steps, inputs)
    device_ms = frame.predicted - kernels * CONSTANTS.kernel_ms - CONSTANTS.host_ms

    def error(constants: Floats) -> float:
        kernel_ms, host_ms = constants
        return float((np.log((device_ms + kernels * kernel_ms + host_ms) / frame.ms) ** 2).mean())

    kernel_ms, host_ms = minimize(error, [0.002, 0.2], method="Nelder-Mead", options={"xatol": 1e-6}).x
    return float(kernel_ms), float(host_ms)


def errors_table(pairs: pd.DataFrame, found: Floats, by: list[str]) -> pd.DataFrame:
    """Number of pairs, medians of published and predicted speedups, and medians of the errors and their sizes, by
    group.
    """
    frame = pairs.assign(predicted=found, error=found / pairs.speedup - 1, size=np.abs(found / pairs.speedup - 1))
    groups = frame.groupby(by, sort=False)
    columns = ["tokens_per_round", "speedup", "predicted", "error", "size"]
    return pd.concat([groups.size().rename("pairs"), groups[columns].median()], axis=1)


@click.command()
def main() -> None:
    """Predict published speedups from datasheets and shapes, and state the errors by paper."""
    pairs, inputs = load()
    times = plain_layer_ms(inputs)
    click.echo(f"eager_layer_ms {np.exp(np.log(times).mean()):.2f} ({times.min():.2f} to {times.max():.2f})")
    kernel_ms, host_ms = fit_captured(inputs)
    click.echo(
        f"kernel_ms {kernel_ms:.5f}, host_ms {host_ms:.2f}; captured steps with {CONSTANTS.kernel_ms}, {CONSTANTS.host_ms}:"
    )
    for name in ("measured_steps", "captured_steps", "shared_steps"):
        steps = captured_steps(inputs[name], inputs)
        click.echo(steps.to_string(float_format="{:.2f}".format))
        click.echo(f"{name}: median error {steps.error.abs().median():.1%}\n")
    fitted = fit_layers_outside(pairs, inputs)
    click.echo(f"layers_outside {fitted:.2f}; predictions below use {CONSTANTS.layers_outside}\n")
    found = predictions(pairs, inputs, CONSTANTS.layers_outside)
    for by in (
        ["paper"],
        ["device"],
        ["paper", "table", "device"],
        ["paper", "model"],
        ["paper", "table", "device", "model"],
    ):
        click.echo(errors_table(pairs, found, by).to_string(float_format="{:.2f}".format) + "\n")
    click.echo(f"all {len(pairs)} pairs: median error {np.median(np.abs(found / pairs.speedup - 1)):.1%}")
    share = float((pairs.speedup / pairs.tokens_per_round).median())
    naive = np.abs(share * pairs.tokens_per_round / pairs.speedup - 1)
    click.echo(
        f"{share:.2f} x tokens per round instead: {naive.median():.1%}, {naive.groupby(pairs.paper).median().round(3).to_dict()}"
    )
    impossible = pairs[pairs.speedup > pairs.tokens_per_round]
    click.echo(f"{len(impossible)} pairs have a speedup above their tokens per round: {set(impossible.model)}\n")
    for paper in pairs.paper.unique():
        others, own = pairs[pairs.paper != paper], pairs[pairs.paper == paper]
        layers = fit_layers_outside(others, inputs)
        error = np.median(np.abs(predictions(own, inputs, layers) / own.speedup - 1))
        click.echo(f"{paper} by a fit to the others: layers_outside {layers:.2f}, median error {error:.1%}")


if __name__ == "__main__":
    main()
