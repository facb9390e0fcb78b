"""Numbers that stand in sentences of the documentation. ``sentences.yaml`` has every such sentence, with a placeholder
for each number and the place of the number in a result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from autotune.files import read_yaml
from benchmarks.evidence.result import Result

SENTENCES = Path(__file__).with_name("sentences.yaml")


class Number(BaseModel):
    """A value of a result: the column ``value`` of the only row of ``table`` that has the values of ``where``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    result: str
    table: str
    where: dict[str, Any]
    value: str

    def of(self, results: dict[str, Result]) -> Any:
        """The value.

        Raises:
            KeyError: the result, the table, the row or the column does not exist.
            ValueError: several rows match.
        """
        rows = [row for row in results[self.result].values[self.table] if self.where.items() <= {**row}.items()]
        if not rows:
            raise KeyError(f"{self.result}: no row of {self.table} has {self.where}")
        (row,) = rows
        return row[self.value]


class Sentence(BaseModel):
    """A sentence of a page, such as ``On an H100 SmolLM2 reaches {:.2f}x.``"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    page: str
    """Relative to the root of the repository."""
    sentence: str
    numbers: list[Number]

    def text(self, results: dict[str, Result]) -> str:
        """The sentence with the numbers of the results."""
        return self.sentence.format(*(number.of(results) for number in self.numbers))


def sentences_of(page: str, results: dict[str, Result], path: Path = SENTENCES) -> list[str]:
    """The sentences that a page must contain, with the numbers of the results."""
    known = TypeAdapter(list[Sentence]).validate_python(read_yaml(path))
    return [sentence.text(results) for sentence in known if sentence.page == page]
