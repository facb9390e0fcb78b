"""Results of a check for other programs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from autotune.check.output import github_annotations, junit
from autotune.check.result import verdict_of
from autotune.cli.check import reported_errors
from autotune.cli.main import main
from autotune.errors import NotComparable
from tests.check.sample_documents import check_result, gate

GATES = [
    gate("passed", "lossless"),
    gate("warned", "counts", details=["a: rounds 1 -> 2"]),
    gate("failed", "time against the base", summary='slower | by <8 %> & "more"', details=["plain decoding: +0.1 %"]),
    gate("inconclusive", "minimum speedup"),
    gate("skipped", "counts of the base"),
]


def test_junit_has_a_case_for_each_gate_and_workload() -> None:
    suite = ElementTree.fromstring(junit(check_result(*GATES))).find("testsuite")
    assert suite is not None
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["5", "1", "0", "2"]
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == [one.name for one in GATES]
    assert {case.get("classname") for case in suite} == {"autotune.check.digits"}
    failure = cases["time against the base"].find("failure")
    assert failure is not None
    assert (failure.get("message"), failure.text) == ('slower | by <8 %> & "more"', "plain decoding: +0.1 %")
    for name in ("minimum speedup", "counts of the base"):
        assert cases[name].find("skipped") is not None
    assert [
        len(cases[name].findall("failure") + cases[name].findall("skipped")) for name in ("lossless", "counts")
    ] == [0, 0]


def test_an_error_that_ends_a_check_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotComparable), reported_errors(tmp_path / "check.xml", github=True):
        raise NotComparable("100 % other <weights>")
    suite = ElementTree.parse(tmp_path / "check.xml").find("testsuite")
    assert suite is not None and [suite.get(key) for key in ("tests", "failures", "errors")] == ["1", "0", "1"]
    error = suite.find("testcase/error")
    assert error is not None and (error.get("type"), error.get("message")) == ("NotComparable", "100 % other <weights>")
    expected = "::error title=autotune check::NotComparable: 100 %25 other <weights>\n"
    assert capsys.readouterr().err == expected
    with pytest.raises(KeyboardInterrupt), reported_errors(tmp_path / "check.xml", github=False):
        raise KeyboardInterrupt
    assert not (tmp_path / "check.xml").exists(), "an old result does not stand for a check that was killed"


@pytest.mark.parametrize("words", [("gone.json",), ("gone.json", "--limit", "1%", "--tolerance", "2%")])
def test_a_mistake_in_the_command_is_reported(words: tuple[str, ...], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["check", *words, "--junit", str(tmp_path / "check.xml")])
    error = ElementTree.parse(tmp_path / "check.xml").find("testsuite/testcase/error")
    assert done.exit_code == 2 and error is not None and str(error.get("message")) in done.stderr


def test_github_annotates_gates_that_did_not_pass() -> None:
    lines = github_annotations(check_result(*GATES))
    assert lines == [
        "::warning title=autotune check%3A counts::digits: it warned%0Aa: rounds 1 -> 2",
        '::error title=autotune check%3A time against the base::digits: slower | by <8 %25> & "more"%0Aplain decoding: +0.1 %25',
        "::warning title=autotune check%3A minimum speedup::digits: it inconclusive",
    ]


def test_all_gates_make_one_exit_code() -> None:
    for gates, inconclusive_fails, expected in (
        (GATES[:2], True, ("passed", 0)),
        (GATES, True, ('failed: slower | by <8 %> & "more"', 1)),
        (GATES[3:], True, ("inconclusive: it inconclusive", 3)),
        (GATES[3:], False, ("inconclusive: it inconclusive", 0)),
        (GATES[4:], True, ("passed", 0)),
    ):
        assert verdict_of(gates, inconclusive_fails=inconclusive_fails) == expected
