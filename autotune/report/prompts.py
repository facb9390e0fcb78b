"""The recorded prompts, with their images, and tokens as text: what a report shows of a workload. Loads no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.modeling.loading import resolve
from autotune.report.sources import Sources
from autotune.workloads.workload import WorkloadPrompt, load_workload


def find_prompts(sources: Sources, workload: str | None) -> dict[str, WorkloadPrompt]:
    """The recorded prompts by name, or none where they cannot be found, or are not what was recorded.

    Raises:
        UserError: a workload that the user names cannot be read, or is another one.
    """
    if not sources.traces:
        return {}
    header = sources.traces[0].header
    study = sources.study
    names = [workload] if workload else [header.workload, *([study.workload] if study else [])]
    if workload is None and sources.folder is not None:  # a search runs where .autotune is
        names += [str(sources.folder.resolve().parents[1] / name) for name in names]
    for name in names:
        try:
            found = load_workload(name, "tune", num_prompts=len(header.prompts))
        except UserError:
            if workload is not None:
                raise
            continue
        if found.sha256 == header.workload_sha256:
            return {prompt.name: prompt for prompt in found.prompts}
    if workload is not None:
        raise UserError(
            f"--workload {workload}: its tuning prompts are not those that were recorded; give the workload of the search"
        )
    return {}


class TokenTexts:
    """Tokens as people read them: by the target's own tokenizer where it is at hand, else by number."""

    def __init__(self, target: str) -> None:
        self._tokenizer = _tokenizer(target)

    @property
    def is_known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def text(self, before: list[int], token: int) -> str:
        """What a token adds behind others: many tokenizers join words, and characters of several bytes."""
        if self._tokenizer is None:
            return f"[{token}]"
        if token < 0 or self._tokenizer.id_to_token(token) is None:
            return "?"
        context = before[-8:]
        prefix = self._tokenizer.decode(context, skip_special_tokens=False)
        whole = self._tokenizer.decode([*context, token], skip_special_tokens=False)
        return whole[len(prefix) :] if whole.startswith(prefix) else str(self._tokenizer.id_to_token(token))


def _tokenizer(target: str) -> Any | None:
    """``tokenizer.json`` beside the target, in its folder or in the Hugging Face cache; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    try:
        place = Path(resolve(target))
        path = place / "tokenizer.json" if place.is_dir() else try_to_load_from_cache(target, "tokenizer.json")
        return Tokenizer.from_file(str(path)) if isinstance(path, str | Path) and Path(path).exists() else None
    except Exception:  # tokenizers raises bare exceptions; a report without words is still a report
        return None
