"""The recorded prompts with their images, and tokens as text. Loads no model."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.modeling.loading import load_processor, resolve
from autotune.report.sources import Sources
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload


def find_prompts(sources: Sources, workload: str | None) -> dict[str, WorkloadPrompt]:
    """The recorded prompts by name; empty if they cannot be found or have changed since.

    Raises:
        UserError: the workload that the user gave cannot be read, or is not the recorded one.
    """
    if not sources.traces or sources.study is None or sources.folder is None:
        return {}
    header, name = sources.traces[0].header, workload or sources.study.workload
    in_home = str(sources.folder.resolve().parents[1] / name)  # the folder of .autotune, where the search ran
    for path in (name, in_home):
        with nullcontext() if workload else suppress(UserError):
            loaded = load_workload(path, "tune", num_prompts=len(header.prompts))
            searched = loaded if sources.profile is None else loaded.as_searched(sources.profile.workload)
            for candidate in (loaded, searched):
                if candidate.sha256 == header.workload_sha256:
                    return {prompt.name: prompt for prompt in candidate.prompts}
            if workload is not None:
                raise UserError(
                    f"--workload {workload}: its prompts differ from the recorded ones; give the search's own"
                )
    return {}


class TokenTexts:
    """Tokens as text by the target's tokenizer, or as numbers without one."""

    def __init__(self, target: str) -> None:
        self._tokenizer = _tokenizer(target)
        self.has_tokenizer = self._tokenizer is not None

    def text(self, before: list[int], token: int) -> str:
        """The text that a token adds after ``before``; many tokenizers join words, and bytes of one character."""
        if self._tokenizer is None:
            return f"[{token}]"
        if token < 0 or self._tokenizer.id_to_token(token) is None:
            return "?"
        context = before[-8:]
        prefix = self._tokenizer.decode(context, skip_special_tokens=False)
        text = self._tokenizer.decode([*context, token], skip_special_tokens=False)
        return text[len(prefix) :] if text.startswith(prefix) else str(self._tokenizer.id_to_token(token))


def _tokenizer(target: str) -> Any | None:
    """``tokenizer.json`` from the target's folder or the Hugging Face cache, or a GGUF file's tokenizer; nothing is
    downloaded.
    """
    from tokenizers import Tokenizer

    try:
        path = Path(resolve(target, weights=False, local_only=True))
        return (
            load_processor(str(path)).backend_tokenizer
            if path.is_file()
            else Tokenizer.from_file(str(path / "tokenizer.json"))
        )
    except Exception:  # tokenizers raises bare exceptions; the report works without texts
        return None
