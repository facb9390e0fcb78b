"""A check's result for machines that show it to people: JUnit XML, Markdown, GitHub's annotations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from autotune.check.result import CheckResult, Gate, Timing
from autotune.files import write_bytes

MARKS = {"passed": "✅", "warned": "⚠️", "failed": "❌", "inconclusive": "❔", "skipped": "➖"}  # noqa: RUF001
SUMMARY_FILE = "GITHUB_STEP_SUMMARY"


def junit(result: CheckResult) -> bytes:
    """One test case for each gate and workload; what stayed open is skipped, not passed."""
    suite = ElementTree.Element(
        "testsuite",
        name="autotune check",
        tests=str(len(result.gates)),
        failures=str(sum(gate.verdict == "failed" for gate in result.gates)),
        errors="0",
        skipped=str(sum(gate.verdict in ("inconclusive", "skipped") for gate in result.gates)),
        timestamp=result.provenance.created,
    )
    for gate in result.gates:
        case = ElementTree.SubElement(suite, "testcase", classname=f"autotune.check.{gate.workload}", name=gate.name)
        if gate.verdict == "failed":
            ElementTree.SubElement(case, "failure", message=gate.summary).text = "\n".join(gate.details)
        elif gate.verdict in ("inconclusive", "skipped"):
            ElementTree.SubElement(case, "skipped", message=f"{gate.verdict}: {gate.summary}")
        if gate.verdict != "failed":
            ElementTree.SubElement(case, "system-out").text = "\n".join([str(gate), *gate.details])
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def markdown(result: CheckResult) -> str:
    """A page for a pull request or a step's summary."""
    against = f" against {result.against}" if result.against else ""
    lines = [
        f"### autotune check: {result.verdict.partition(':')[0]}",
        "",
        f"`{result.profile}`{against} on {result.hardware.model}, {result.hardware.num_cores} cores",
        "",
        "| | gate | workload | |",
        "|---|---|---|---|",
        *(
            f"| {MARKS[gate.verdict]} {gate.verdict} | {gate.name} | {_cell(gate.workload)} | {_cell(gate.summary)} |"
            for gate in result.gates
        ),
    ]
    for workload in result.workloads:
        lines += [
            "",
            f"{workload.name}: {workload.speedup:.2f}x over plain decoding ({workload.ci95[0]:.2f}-{workload.ci95[1]:.2f}), "
            f"{workload.identical_outputs}/{workload.num_prompts} outputs identical, {workload.precision}",
        ]
        if workload.timing is not None:
            lines += ["", *_timing(workload.timing)]
    for gate in result.gates:
        if gate.details:
            lines += [
                "",
                f"<details><summary>{gate.name}, {_cell(gate.workload)}</summary>",
                "",
                *(f"- {_cell(one)}" for one in gate.details),
                "",
                "</details>",
            ]
    return "\n".join(lines) + "\n"


def _timing(timing: Timing) -> list[str]:
    low, high = timing.ci95
    return [
        "| base | head | pairs | slowdown | 95 % interval | p (at most "
        f"{100 * timing.tolerance:g} %) | p (at least {100 * timing.limit:g} %) |",
        "|---|---|---|---|---|---|---|",
        f"| {_cell(timing.base)} | {_cell(timing.head)} | {len(timing.pairs)} | {100 * timing.slowdown:+.1f} % | {100 * low:+.1f} to {100 * high:+.1f} % "
        f"| {timing.p_within_tolerance:.2g} | {timing.p_beyond_limit:.2g} |",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def github_annotations(result: CheckResult) -> list[str]:
    """Workflow commands that GitHub shows beside a run: one for each gate that needs an eye."""
    levels = {"failed": "error", "inconclusive": "warning", "warned": "warning"}
    return [
        f"::{levels[gate.verdict]} title={_property(f'autotune check: {gate.name}')}::{_message(gate)}"
        for gate in result.gates
        if gate.verdict in levels
    ]


def _message(gate: Gate) -> str:
    return _escaped("\n".join([f"{gate.workload}: {gate.summary}", *gate.details[:10]]))


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def add_to_step_summary(result: CheckResult, environment: Mapping[str, str] = os.environ) -> None:
    """The page on GitHub's own summary of the run, where there is one."""
    if environment.get(SUMMARY_FILE):
        with Path(environment[SUMMARY_FILE]).open("a", encoding="utf-8") as file:
            file.write(markdown(result))


def write_outputs(result: CheckResult, *, junit_path: Path | None, markdown_path: Path | None) -> None:
    """The files that were asked for."""
    if junit_path is not None:
        write_bytes(junit_path, junit(result))
    if markdown_path is not None:
        write_bytes(markdown_path, markdown(result).encode())
