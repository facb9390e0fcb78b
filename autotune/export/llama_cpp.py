"""llama.cpp: a draft model with a floor of confidence, n-grams, or both, as flags of ``llama-server``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from autotune.export.document import BatchPrediction
from autotune.export.engine import SAMPLING, Engine, EngineCandidate, Pair
from autotune.export.engine_replay import EngineReplay, EngineTree
from autotune.export.llama_replay import NUM_CANDIDATES, LlamaReplay, ModelDraft, NgramDraft, NgramMod, Priced
from autotune.files import Document
from autotune.trees.chain import ChainPolicy

SIMPLE, MOD = "ngram-simple", "ngram-mod"
PREFIXES = {
    "draft-simple": "spec_draft_",
    "draft-eagle3": "spec_draft_",
    SIMPLE: "spec_ngram_simple_",
    MOD: "spec_ngram_mod_",
}
"""Names of the flags that a type of speculation takes."""
MAX_VOCABULARY_DIFFERENCE, FIRST_COMPARED_TOKEN = 128, 5
"""Vocabularies may differ by this many tokens, and in the tokens before this one."""


class LlamaCppSettings(Document):
    """Flags of ``llama-server``, with underscores: ``spec_draft_n_max`` is ``--spec-draft-n-max``, our chain's ``depth``."""

    model: str = Field(min_length=1)
    """The target, a GGUF file."""
    spec_type: str
    """Types, separated by commas. N-grams come before the draft model, in whatever order they are written."""
    spec_draft_model: str | None = Field(default=None, min_length=1)
    spec_draft_n_max: int | None = Field(default=None, ge=1)
    spec_draft_n_min: int | None = Field(default=None, ge=0)
    spec_draft_p_min: float | None = Field(default=None, ge=0, le=1)
    spec_ngram_simple_size_n: int | None = Field(default=None, ge=1, le=1024)
    spec_ngram_simple_size_m: int | None = Field(default=None, ge=1, le=1024)
    spec_ngram_mod_n_match: int | None = Field(default=None, ge=1, le=1024)
    spec_ngram_mod_n_min: int | None = Field(default=None, ge=0, le=1024)
    spec_ngram_mod_n_max: int | None = Field(default=None, ge=1, le=1024)

    @model_validator(mode="after")
    def _rules(self) -> LlamaCppSettings:
        """Each type takes all of its own flags, and no others are given; bounds that drop every draft are refused."""
        types = self.spec_type.split(",")
        fields = self.model_dump(exclude={"model", "spec_type"})
        used = tuple(PREFIXES[name] for name in types)
        if any((value is not None) != name.startswith(used) for name, value in fields.items()):
            raise ValueError(f"spec_type {self.spec_type} takes all flags of {', '.join(used)} and no others")
        for smaller, larger in (
            ("draft_n_min", "draft_n_max"),
            ("ngram_simple_size_n", "ngram_simple_size_m"),
            ("ngram_mod_n_min", "ngram_mod_n_max"),
        ):
            low, high = fields[f"spec_{smaller}"], fields[f"spec_{larger}"]
            if low is not None and low > high:
                raise ValueError(f"spec_{smaller} {low} above spec_{larger} {high} drops every draft")
        return self


class LlamaCpp(Engine):
    """See ``Engine``. The rules are taken from the copy of llama.cpp in ``version``."""

    name = "llama.cpp"
    version = "llama-cpp-python-0.3.36"
    settings_type = LlamaCppSettings
    floor_note = None
    lossless = (
        "llama-server accepts a draft token if it equals the token that it samples from the target, which preserves the target's "
        f"distribution at any temperature; {SAMPLING}; a quantized target has answers of its own"
    )
    notes = (
        "a request with an image ends in an error where draft and target have other widths, and with equal widths the draft reads what "
        "the target's tower made: predictions are for prompts without images",
        "the draft model reads every verified token again, which the prediction prices; its steps are this project's, not llama.cpp's: "
        "time --spec-draft-n-max and --spec-draft-p-min in the server too, with and without quantization",
        "not replayed: ngram-map-k, ngram-map-k4v and ngram-cache, what ngram-mod keeps of other requests, drafts of the types mtp, dflash and dspark, "
        "several requests at a time, and drafts on another device (--spec-draft-ngl, --spec-draft-device)",
        "convert_hf_to_gguf.py is llama.cpp's own, and knows which models it converts; --min-hits has no effect on ngram-simple",
    )

    def refusal(self, pair: Pair) -> str | None:
        """Vocabularies nearly equal in size, with equal tokens (``common_speculative_are_compatible``)."""
        target, draft = pair.target_files, pair.draft_files
        if target is None or draft is None or not pair.is_complete_model:
            return None
        sizes = target.vocab_size, draft.vocab_size
        if sizes[0] is not None and sizes[1] is not None and abs(sizes[0] - sizes[1]) > MAX_VOCABULARY_DIFFERENCE:
            return (
                f"the draft's vocabulary has {sizes[1]} tokens and the target's has {sizes[0]}, more than "
                f"{MAX_VOCABULARY_DIFFERENCE} apart; choose a draft with the target's vocabulary"
            )
        ids = target.token_ids(), draft.token_ids()
        if ids[0] is None or ids[1] is None:
            return None
        tokens, drafted = ({number: token for token, number in names.items()} for names in ids if names is not None)
        common = (number for number in tokens.keys() & drafted.keys() if number >= FIRST_COMPARED_TOKEN)
        if (
            different := min((number for number in common if tokens[number] != drafted[number]), default=None)
        ) is not None:
            return (
                f"token {different} is {tokens[different]!r} in the target and {drafted[different]!r} in the draft; choose a draft "
                "with the target's tokenizer"
            )
        return None

    def caveats(self, pair: Pair) -> Sequence[str]:
        return (
            f"--spec-draft-p-min is a share of the {NUM_CANDIDATES} most probable draft tokens, and was replayed so",
        )

    def search(self, pair: Pair, replay: EngineReplay) -> list[EngineCandidate]:
        """A draft model, n-grams, or both; only what is faster than plain decoding, if anything is."""
        candidates = [self._candidate(pair, priced) for priced in LlamaReplay(replay).fastest()]
        return [candidate for candidate in candidates if candidate.predicted.speedup > 1.0] or candidates

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchPrediction] = ()) -> LlamaCppSettings:
        """The draft model alone; the trees are chains."""
        floor = (tree.n_min, tree.p_min) if isinstance(tree, ChainPolicy) else (0, 0.0)
        return self._settings(pair, ModelDraft(tree.max_depth, *floor), None)

    def preparation(self, pair: Pair, folder: Path) -> Sequence[str]:
        """Conversion to GGUF by llama.cpp's own script."""
        target, draft = (
            (name, ["--remote"]) if files is None else (str(files.folder), [])
            for name, files in ((pair.target, pair.target_files), (pair.draft, pair.draft_files))
        )
        of_target = [] if pair.is_complete_model else ["--target-model-dir", target[0]]
        script = ["python", "convert_hf_to_gguf.py"]
        return (
            shlex.join([*script, target[0], *target[1], "--outfile", str(folder / "target.gguf")]),
            shlex.join([*script, draft[0], *draft[1], *of_target, "--outfile", str(folder / "draft.gguf")]),
        )

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        words = ["llama-server"]
        for name, value in settings.model_dump(exclude_none=True).items():
            is_file = name in ("model", "spec_draft_model")
            words += [f"--{name.replace('_', '-')}", str(path.parent / value) if is_file else f"{value}"]
        return shlex.join(words)

    def _candidate(self, pair: Pair, priced: Priced) -> EngineCandidate:
        settings = self._settings(pair, priced.model, priced.ngram)
        labels = [draft.label for draft in (priced.ngram, priced.model) if draft is not None]
        tree = None
        if priced.model is not None and priced.ngram is None:
            tree = ChainPolicy(depth=priced.model.n_max, p_min=priced.model.p_min, n_min=priced.model.n_min)
        name = "+".join(settings.spec_type.split(","))
        return EngineCandidate(name, f"{settings.spec_type}({', '.join(labels)})", tree, priced.predicted, settings)

    def _settings(self, pair: Pair, model: ModelDraft | None, ngram: NgramDraft | NgramMod | None) -> LlamaCppSettings:
        types, fields = [], dict[str, object]()
        if isinstance(ngram, NgramDraft):
            types.append(SIMPLE)
            fields |= {"spec_ngram_simple_size_n": ngram.size_n, "spec_ngram_simple_size_m": ngram.size_m}
        if isinstance(ngram, NgramMod):
            types.append(MOD)
            fields |= {f"spec_ngram_mod_{name}": value for name, value in dataclasses.asdict(ngram).items()}
        if model is not None:
            types.append(self.method(pair))
            fields |= {f"spec_draft_{name}": value for name, value in dataclasses.asdict(model).items()}
            fields["spec_draft_model"] = "draft.gguf"
        return LlamaCppSettings.model_validate({"model": "target.gguf", "spec_type": ",".join(types), **fields})
