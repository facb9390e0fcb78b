"""A check's result for other programs: JUnit XML, and annotations on GitHub Actions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from autotune.check.result import CheckResult
from autotune.documents.provenance import stamp
from autotune.files import write_bytes

LEVELS = {"failed": "error", "inconclusive": "warning", "warned": "warning"}  # of GitHub's annotations


def junit(result: CheckResult) -> bytes:
    """JUnit XML with a test case per gate and workload; inconclusive gates are reported as skipped."""
    cases = []
    for gate in result.gates:
        case = ElementTree.Element("testcase", classname=f"autotune.check.{gate.workload}", name=gate.name)
        if gate.verdict == "failed":
            ElementTree.SubElement(case, "failure", message=gate.summary).text = "\n".join(gate.details)
        elif gate.verdict in ("inconclusive", "skipped"):
            ElementTree.SubElement(case, "skipped", message=f"{gate.verdict}: {gate.summary}")
        ElementTree.SubElement(case, "system-out").text = "\n".join([str(gate), *gate.details])
        cases.append(case)
    return _suite(cases)


def _suite(cases: Sequence[ElementTree.Element]) -> bytes:
    """XML of a suite of these test cases."""
    root = ElementTree.Element("testsuites")
    outcomes = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {name: str(sum(case.find(tag) is not None for case in cases)) for name, tag in outcomes.items()}
    known = {"name": "autotune check", "tests": str(len(cases)), "timestamp": stamp().created}
    ElementTree.SubElement(root, "testsuite", known | counts).extend(cases)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def report_error(error: Exception, junit: Path | None, github: bool) -> None:
    """Write an error that ends a check where its result would have been written: as the one test case of a suite."""
    if junit is not None:
        case = ElementTree.Element("testcase", classname="autotune.check", name="check")
        ElementTree.SubElement(case, "error", type=type(error).__name__, message=str(error))
        write_bytes(junit, _suite([case]))
    if github:
        print(f"::error title=autotune check::{_escaped(f'{type(error).__name__}: {error}')}", file=sys.stderr)


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
