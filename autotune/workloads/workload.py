"""Workloads: prompts, images and generation settings, from a file or bundled.

A line of our own JSONL is a ``Prompt``; its paths of images and videos are relative to the file. ``workloads.formats``
reads the files of public benchmarks.

Prompts of the ``tune`` split choose a configuration, prompts of ``evaluate`` judge it, and prompts of ``train`` are
only for training drafts; prompts without a split alternate between the first two. A prompt that occurs in two splits is
used for evaluation only. Every turn of a conversation is a prompt, all in one split. The bundled workloads are JSONL
files of prompts with reference answers, which ``load_workload`` leaves out. The shipped sets are prompts for targets
without a bundled workload; ``prompts/README.md`` names their sources.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.errors import UserError, nearest
from autotune.files import data_root
from autotune.workloads.chat import Variables, used_variables
from autotune.workloads.formats import OWN, Format, read_prompts
from autotune.workloads.hub import local_file
from autotune.workloads.prompt import AnsweredPrompt, Prompt, WorkloadPrompt, can_read, load_prompt, load_turns
from autotune.workloads.row_files import read_jsonl

if TYPE_CHECKING:
    from autotune.documents.decoding_profile import WorkloadReference

WorkloadSplit = Literal["tune", "evaluate"]
BUNDLED = ("digits", "smollm2")
"""Bundled workloads, each named after its target. A workload is the file ``workload.jsonl`` beside the target's drafts.
"""
TEXTS = ("chat", "code", "summarize")
SHIPPED = (*TEXTS, "images")
"""Sets of prompts in the folder ``prompts``, named one by one or in a list with commas."""
WARM_UP_TOKENS = 32  # tokens decoded to warm up an arm


@dataclass(frozen=True)
class Workload:
    """The prompts of one split. The turns of a conversation follow each other."""

    name: str
    split: WorkloadSplit
    prompts: tuple[WorkloadPrompt, ...]
    format: Format = OWN

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256("".join(prompt.sha256 for prompt in self.prompts).encode()).hexdigest()

    def cut(self, num_prompts: int, max_new_tokens: int | None = None) -> Workload:
        """The first prompts, with answers of at most ``max_new_tokens``; None: of their own limits."""
        prompts = self.prompts[:num_prompts]
        if max_new_tokens is not None:
            prompts = tuple(prompt.cut(max_new_tokens) for prompt in prompts)
        return replace(self, prompts=prompts)

    def first_turns(self) -> Workload:
        """The prompts without later turns, which follow a target's answers."""
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.earlier is None))

    def readable_by(self, processor: Any) -> Workload:
        """The prompts without images, if the processor reads text only, or without videos, if it reads none.

        Raises:
            UserError: no prompt is left.
        """
        prompts = tuple(prompt for prompt in self.prompts if can_read(processor, prompt.pixels))
        if self.prompts and not prompts:
            rule, seen = (
                ("text only", "an image") if not hasattr(processor, "image_processor") else ("no videos", "a video")
            )
            raise UserError(
                f"{self.name}: the target reads {rule}, and every prompt has {seen}; name another --workload"
            )
        return replace(self, prompts=prompts)

    def with_variables(self, variables: Variables | None) -> Workload:
        """The prompts with these variables of the chat template, see ``WorkloadPrompt.with_variables``."""
        return replace(self, prompts=tuple(prompt.with_variables(variables or {}) for prompt in self.prompts))

    def fitting(self, processor: Any, max_context: int, say: Callable[[str], None]) -> Workload:
        """The prompts that fit a target's context together with their answers. One line names the others, and one the
        variables that the chat template does not use.

        Raises:
            UserError: no prompt is left.
        """
        given: dict[str, Any] = {}
        for prompt in self.prompts:
            given |= prompt.settings.chat_template_kwargs or {}
        if unused := sorted(given.keys() - used_variables(processor, given).keys()):
            say(f"{self.name}: the target's chat template does not use {', '.join(unused)}, which changes no prompt")
        sizes = {prompt.name: prompt.most_tokens(processor) for prompt in self.prompts}
        long = [prompt for prompt in self.prompts if sizes[prompt.name] > max_context]
        if not long:
            return self
        rule = f"the target's context of {max_context} tokens holds a prompt and its answer"
        shown = ", ".join(f"{prompt.name} ({sizes[prompt.name]})" for prompt in long[:3])
        if len(long) == len(self.prompts):
            raise UserError(
                f"{self.name}: {rule}; all {len(long)} prompts are longer: {shown}; shorten them, or lower max_new_tokens"
            )
        say(f"{self.name}: {rule}; {len(long)} of {len(self.prompts)} prompts are longer and left out: {shown}")
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt not in long))

    def sampled(self, temperature: float) -> Workload:
        """The prompts at another temperature, each with its index as seed; the turns of a conversation share one."""
        begun = itertools.accumulate(prompt.earlier is None for prompt in self.prompts)
        prompts = []
        for number, prompt in zip(begun, self.prompts, strict=True):
            settings = prompt.settings.model_copy(update={"temperature": temperature, "seed": number - 1})
            prompts.append(replace(prompt, settings=settings))
        return replace(self, prompts=tuple(prompts))

    def as_searched(self, reference: WorkloadReference) -> Workload:
        """The prompts at the temperature, and with the limit of the answers, of the search that made a profile."""
        prompts = self if reference.temperature is None else self.sampled(reference.temperature)
        return prompts.cut(len(self.prompts), reference.max_new_tokens)

    @property
    def tasks(self) -> list[str]:
        """Task names in order of first appearance."""
        return list(dict.fromkeys(prompt.settings.task for prompt in self.prompts))


def load_workload(
    name: str,
    split: WorkloadSplit,
    *,
    num_prompts: int | None = None,
    format: Format | None = None,
    is_whole: bool = False,
) -> Workload:
    """Load one split of a workload, at most its first ``num_prompts`` prompts.

    Args:
        name: a bundled workload (``digits``, ``smollm2``), shipped sets (``chat,code``), whose prompts are taken in
            turn, or the path or address (``hf://datasets/...``) of a file.
        format: of the file; None finds it out.
        is_whole: also take the prompts of the other split.

    Raises:
        UserError: missing file, invalid line or image, or a split without prompts.
    """
    if is_whole and name in BUNDLED:
        raise UserError(f"--whole: both splits can be read from a file only; {name!r} is bundled; leave --whole out")
    if name in BUNDLED:
        path = bundled_file(name)
        lines = [line for line in read_jsonl(path, AnsweredPrompt) if line[1].split == split][:num_prompts]
        prompts = (
            replace(load_prompt(path, number, line.unanswered), name=f"{line.task}/{number}") for number, line in lines
        )
        return Workload(name, split, tuple(prompts))
    if files := shipped_files(name):
        sets = [load_workload(str(path), split, is_whole=is_whole).prompts for path in files]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*sets))
        return Workload(name, split, tuple(prompt for prompt in in_turn if prompt is not None)[:num_prompts])
    path = local_file(name)
    known, rows = read_prompts(path, format)
    parts = by_split(rows)
    wanted = [row for row in rows if row[1].split != "train"] if is_whole else parts[split]
    loaded = (load_turns(name, *row) for row in wanted)
    if known == OWN:  # every image is read: files of two names may hold one image, and a prompt is in one split only
        by_row = {number: load_turns(name, number, settings) for number, settings in rows}
        excluded: set[str] = set()
        if split == "tune" and not is_whole:
            excluded = {by_row[number][-1].sha256 for number, _ in parts["evaluate"]}
        loaded = (by_row[number] for number, _ in wanted if by_row[number][-1].sha256 not in excluded)
    chosen = tuple(itertools.islice(itertools.chain.from_iterable(loaded), num_prompts))
    if not chosen:
        raise without_prompts(name, split, known)
    return Workload(path.name, split, chosen, known)


def by_split(rows: list[tuple[int, Prompt]]) -> dict[str, list[tuple[int, Prompt]]]:
    """The numbered prompts of a file by their splits; those without a split alternate."""
    parts: dict[str, list[tuple[int, Prompt]]] = {"tune": [], "evaluate": [], "train": []}
    for i, (number, settings) in enumerate(rows):
        parts[settings.split or ("evaluate" if i % 2 else "tune")].append((number, settings))
    return parts


def without_prompts(name: str, split: WorkloadSplit, format: Format) -> UserError:
    """The refusal of a file without prompts in a split."""
    mark = f', or mark some with "split": "{split}"' if format == OWN else ""
    return UserError(f"{name}: a workload needs prompts in both splits; none is in {split!r}; add prompts{mark}")


def shipped_files(name: str) -> list[Path]:
    """The files of the shipped sets that a name lists; none for a bundled workload, a file, or an address.

    Raises:
        UserError: the name of no set, where no file has it.
    """
    sets = name.split(",")
    if name in BUNDLED or not re.fullmatch(r"[\w-]+(,[\w-]+)*", name) or Path(name).is_file():
        return []
    for word in sets:
        if word not in SHIPPED:
            known = nearest(word, SHIPPED if len(sets) > 1 else (*SHIPPED, *BUNDLED))
            raise UserError(f"--workload {name}: no such file, and {word!r} is no shipped set of prompts; {known}")
    return [Path(__file__).with_name("prompts") / f"{word}.jsonl" for word in sets]


def is_named(name: str) -> bool:
    """Whether a workload is bundled or made of shipped sets, so that its name alone finds it."""
    return name in BUNDLED or {*name.split(",")} <= {*SHIPPED}


def bundled_file(name: str) -> Path:
    """The JSONL file of a bundled workload: prompts of both splits, with reference answers.

    Raises:
        UserError: this installation lacks it.
    """
    path = data_root() / "drafts" / name / "workload.jsonl"
    if not path.is_file():
        raise UserError(f"{name}: the file of this bundled workload, {path}, is missing; name another --workload")
    return path
