"""Draws the figures of the documentation, writes its tables from ``benchmarks/results``, and names the sentences of
``benchmarks/evidence/sentences.yaml`` whose numbers differ. Takes about ten seconds.

python benchmarks/figures.py            # make figures
python benchmarks/figures.py --check    # changes nothing; exit code 1 where anything is not what the results give
"""

from __future__ import annotations

import sys

import click

from benchmarks.evidence import pages
from benchmarks.evidence.drawing import FIGURES, pictures, wrong_pictures
from benchmarks.evidence.result import ROOT, load_all


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; say what differs.")
def main(check: bool) -> None:
    results = load_all()
    if not check:
        FIGURES.mkdir(exist_ok=True)
        drawn = dict(pictures(results))
        for path in FIGURES.glob("*.svg"):
            if path.name not in drawn:
                path.unlink()
        for name, content in drawn.items():
            (FIGURES / name).write_text(content)
        for page in pages.pages():
            text = page.read_text()
            new = pages.updated(text, results)
            if new != text:
                page.write_text(new)
                click.echo(f"{page.relative_to(ROOT)} written")
        click.echo(f"{len(drawn)} figures in {FIGURES.relative_to(ROOT)}")
    found = [problem for page in pages.pages() for problem in pages.problems(page.read_text(), results, page)]
    found += wrong_pictures(results)
    for problem in found:
        click.echo(problem)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
