"""A check's result for other programs: JUnit XML, Markdown, and annotations on GitHub Actions."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from autotune.check.result import CheckResult, Timing
from autotune.documents.provenance import stamp
from autotune.files import write_bytes

MARKS = {"passed": "✅", "warned": "⚠️", "failed": "❌", "inconclusive": "❔", "skipped": "➖"}  # noqa: RUF001
LEVELS = {"failed": "error", "inconclusive": "warning", "warned": "warning"}  # of GitHub's annotations
SUMMARY_FILE = "GITHUB_STEP_SUMMARY"


def junit(result: CheckResult) -> bytes:
    """JUnit XML with a test case per gate and workload; inconclusive gates are reported as skipped."""
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
            continue
        if gate.verdict in ("inconclusive", "skipped"):
            ElementTree.SubElement(case, "skipped", message=f"{gate.verdict}: {gate.summary}")
        ElementTree.SubElement(case, "system-out").text = "\n".join([str(gate), *gate.details])
    return _xml(suite)


def junit_of_error(error: Exception) -> bytes:
    """JUnit XML of a check that an error ended: one test case, with the error."""
    suite = ElementTree.Element(
        "testsuite", name="autotune check", tests="1", failures="0", errors="1", skipped="0", timestamp=stamp().created
    )
    case = ElementTree.SubElement(suite, "testcase", classname="autotune.check", name="check")
    ElementTree.SubElement(case, "error", type=type(error).__name__, message=str(error))
    return _xml(suite)


def _xml(suite: ElementTree.Element) -> bytes:
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def report_error(error: Exception, junit: Path | None, github: bool) -> None:
    """Write an error that ends a check where its result would have been written."""
    if junit is not None:
        write_bytes(junit, junit_of_error(error))
    if github:
        print(f"::error title=autotune check::{_escaped(f'{type(error).__name__}: {error}')}", file=sys.stderr)


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
    ]
    for gate in result.gates:
        cells = (f"{MARKS[gate.verdict]} {gate.verdict}", gate.name, gate.workload, gate.summary)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    for workload in result.workloads:
        low, high = workload.ci95
        lines += [
            "",
            f"{workload.name}: {workload.speedup:.2f}x over plain decoding ({low:.2f}-{high:.2f}), "
            f"{workload.identical_outputs}/{workload.num_prompts} outputs identical, {workload.precision}",
        ]
        if workload.timing is not None:
            lines += ["", *_timing_table(workload.timing)]
    for gate in result.gates:
        if gate.details:
            lines += ["", f"<details><summary>{gate.name}, {_cell(gate.workload)}</summary>", ""]
            lines += [*(f"- {_cell(detail)}" for detail in gate.details), "", "</details>"]
    return "\n".join(lines) + "\n"


def _timing_table(timing: Timing) -> list[str]:
    low, high = timing.ci95
    columns = {
        "base": _cell(timing.base),
        "head": _cell(timing.head),
        "pairs": str(len(timing.pairs)),
        "slowdown": f"{100 * timing.slowdown:+.1f} %",
        "95 % interval": f"{100 * low:+.1f} to {100 * high:+.1f} %",
        f"p (at most {100 * timing.tolerance:g} %)": f"{timing.p_within_tolerance:.2g}",
        f"p (at least {100 * timing.limit:g} %)": f"{timing.p_beyond_limit:.2g}",
    }
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", f"| {' | '.join(columns.values())} |"]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def github_annotations(result: CheckResult) -> list[str]:
    """GitHub workflow commands, one per gate that failed, warned or is inconclusive."""
    lines = []
    for gate in result.gates:
        if gate.verdict in LEVELS:
            title = _escaped(f"autotune check: {gate.name}").replace(":", "%3A").replace(",", "%2C")
            message = _escaped("\n".join([f"{gate.workload}: {gate.summary}", *gate.details[:10]]))
            lines.append(f"::{LEVELS[gate.verdict]} title={title}::{message}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def add_to_step_summary(result: CheckResult, environment: Mapping[str, str] = os.environ) -> None:
    """Append the page to the summary of the step, on GitHub Actions."""
    if environment.get(SUMMARY_FILE):
        with Path(environment[SUMMARY_FILE]).open("a", encoding="utf-8") as file:
            file.write(markdown(result))
