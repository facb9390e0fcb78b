"""llama.cpp's rounds against a simulation of its server, the settings of its own space, and its flags."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from autotune.acceptance.trace import Trace
from autotune.export.engine import Pair
from autotune.export.engine_replay import EngineReplay
from autotune.export.exporter import ENGINES
from autotune.export.llama_cpp import LlamaCppSettings
from autotune.export.llama_replay import LlamaReplay, ModelDraft, NgramDraft, NgramMod, NgramPool
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from tests.export.studies import cheap_table, point_of, profile_of, trace_of, write_pair, write_study
from tests.export.test_engine_replay import flat_table
from tests.export.test_exporter import assert_refused, exported
from tests.export.test_model_files import model, write_tokenizer
from tests.sample_documents import cost_table

MODELS = [
    ModelDraft(1),
    ModelDraft(4),
    ModelDraft(4, p_min=0.4),
    ModelDraft(3, n_min=2, p_min=0.4),
    ModelDraft(4, n_min=1, p_min=0.9),
]
NGRAMS = [NgramDraft(1, 2), NgramDraft(2, 2), NgramDraft(2, 8), NgramDraft(3, 4), NgramDraft(4, 16)]
MODS = [NgramMod(1, 1, 8), NgramMod(2, 0, 4), NgramMod(2, 2, 16), NgramMod(3, 1, 4)]


def with_prompts(trace: Trace, seed: int = 0) -> Trace:
    """The trace with prompts that hold pieces of their answers, so that n-grams are found."""
    rng, prompts = np.random.default_rng(seed), []
    for p, length in enumerate(trace.prompt_length):
        answer = trace.forest.answer[trace.answer_start[p] : trace.answer_start[p + 1]]
        starts = rng.integers(0, len(answer) - 7, length)
        prompts.append(np.concatenate([answer[start : start + 3 + start % 5] for start in starts])[:length])
    return dataclasses.replace(trace, prompt_tokens=np.concatenate(prompts))


# -------------------------------------------------------------------------------------------------------------- rounds


def looked_up(history: list[int], sampled: int, size_n: int, size_m: int) -> list[int]:
    """``ngram-simple``: search backwards for the last n-gram, which ends with the sampled token, and copy what follows it."""
    if len(history) <= size_n + size_m + 1:
        return []
    pattern = [*history, sampled][-size_n:]
    for position in range(len(history) - size_n - 1, 0, -1):
        if history[position : position + size_n] == pattern:
            found = history[position + size_n :][:size_m]
            return found if len(found) >= size_n else []
    return []


class Pool:
    """``ngram-mod``: the pool as the list of its n-grams, of which the last one counts."""

    def __init__(self, settings: NgramMod, prompt: list[int]) -> None:
        self.settings, self.grams, self.low = settings, list[tuple[list[int], int]](), 0
        self.until = max(0, len(prompt) - settings.n_match)
        self.learn(prompt, 0)

    def learn(self, history: list[int], begin: int) -> None:
        n = self.settings.n_match
        self.grams += [(history[i : i + n], history[i + n]) for i in range(begin, len(history) - n)]

    def draft(self, history: list[int], sampled: int) -> list[int]:
        n = self.settings.n_match
        if self.until + 32 < len(history):
            self.learn(history, self.until)
            self.until = len(history) - n
        text = [*history, sampled]
        while len(text) - len(history) - 1 < self.settings.n_max:
            found = [token for gram, token in self.grams if gram == text[-n:]]
            if not found:
                break
            text.append(found[-1])
        tokens = text[len(history) + 1 :]
        return tokens if len(tokens) >= self.settings.n_min else []

    def accept(self, num_drafted: int, num_accepted: int) -> None:
        self.low = self.low + 1 if num_accepted / num_drafted < 0.25 else 0
        if self.low >= 5:
            self.grams, self.low, self.until = [], 0, 0


def drafted(trace: Trace, node: int, draft: ModelDraft) -> tuple[list[int], int]:
    """The chain of a draft model, and its forward passes."""
    forest, tokens, forwards = trace.forest, [], 0
    while len(tokens) < draft.n_max:
        forwards += 1
        probabilities = [math.exp(logprob) for logprob in forest.child_logprob[node]]
        if probabilities[0] / sum(probabilities) < draft.p_min:
            break
        tokens.append(int(forest.child_token[node, 0]))
        node = int(forest.child_node[node, 0])
    return (tokens if len(tokens) >= draft.n_min else []), forwards


def simulated(
    trace: Trace, p: int, draft: ModelDraft | None, ngram: NgramDraft | NgramMod | None
) -> list[tuple[int, int, int]]:
    """Length, accepted tokens and draft forward passes of every round of one prompt."""
    ends, answer = (
        np.cumsum(trace.prompt_length),
        trace.forest.answer[trace.answer_start[p] : trace.answer_start[p + 1]].tolist(),
    )
    prompt = trace.prompt_tokens[ends[p] - trace.prompt_length[p] : ends[p]].tolist()
    pool = Pool(ngram, prompt) if isinstance(ngram, NgramMod) else None
    position, rounds = 0, []
    while position < len(answer) - 1:
        tokens: list[int] = []
        forwards = 0
        if pool is not None:
            tokens = pool.draft(prompt + answer[:position], answer[position])
        if isinstance(ngram, NgramDraft):
            tokens = looked_up(prompt + answer[:position], answer[position], ngram.size_n, ngram.size_m)
        if not tokens and draft is not None:
            tokens, forwards = drafted(trace, int(trace.first_node[p]) + position, draft)
        accepted = 0
        while accepted < len(tokens) and answer[position + 1 + accepted : position + 2 + accepted] == [
            tokens[accepted]
        ]:
            accepted += 1
        if pool is not None and tokens and forwards == 0:
            pool.accept(len(tokens), accepted)
        rounds.append((len(tokens), accepted, forwards))
        position += accepted + 1
    return rounds


def test_rounds_and_their_time_are_those_of_the_server() -> None:
    """By a table whose steps cost the same at every KV length: a level per forward pass of the draft, a verification of the
    draft and its root or a plain step, and for a draft model one more pass over the same tokens.
    """
    trace, table = with_prompts(trace_of()), flat_table()
    replayed = LlamaReplay(EngineReplay(trace, table))
    drafters = [*itertools.product(MODELS, [None, *NGRAMS, *MODS]), *itertools.product([None], [*NGRAMS, *MODS])]
    num_looked_up = dict.fromkeys((NgramDraft, NgramMod), 0)
    for draft, ngram in drafters:
        rounds = [one for p in range(trace.num_prompts) for one in simulated(trace, p, draft, ngram)]
        ms = 0.0
        for length, _, forwards in rounds:
            ms += 1.0 if length == 0 else 1.0 + 0.02 * (length + 1)
            ms += 0.05 * (length > 0 or forwards > 0) + (0.05 + 0.01 + 0.01) * forwards
            ms += 0.1 * (draft is not None)
        if draft is not None:
            ms += 0.1 * trace.num_prompts + 0.001 * trace.draft_prompt_length.sum()
        else:
            num_looked_up[type(ngram)] += sum(accepted for _, accepted, _ in rounds)
        found = replayed.price(draft, ngram).predicted
        assert found.tokens_per_round == trace.num_tokens / len(rounds), (draft, ngram)
        assert found.ms_per_token == pytest.approx(ms / trace.num_tokens), (draft, ngram)
        assert found.speedup == pytest.approx(trace.num_tokens / ms), (draft, ngram)
    assert min(num_looked_up.values()) > 50, "n-grams are found"


def test_the_latest_earlier_ngram_is_looked_up() -> None:
    """By hand: the last two tokens, 1 2, occur twice before, and 9 follows the later occurrence; position 0 is never found,
    and neither is the occurrence a token before, in a run of equal tokens.
    """
    forest = dataclasses.replace(trace_of().select([0]).forest)
    trace = trace_of().select([0])
    answer = np.concatenate([[2, 9, 1, 2, 9, 1], np.full(len(forest.answer) - 6, 7)])
    prompt = np.array([1, 2, 3, 4, 1, 2, 9, 5, 6, 8, 3, 4, 3, 4, 3, 4, 3, 4, 3, 1])
    trace = dataclasses.replace(trace, forest=dataclasses.replace(forest, answer=answer), prompt_tokens=prompt)
    found = LlamaReplay(EngineReplay(trace, flat_table())).ngram_drafts(NgramDraft(2, 8))
    assert (found.length[0], found.accepted[0]) == (8, 1), "9 is right, and 5 is not"
    assert (found.length[3], found.accepted[3]) == (2, 2), "1 2 of the answer itself, and the 9 1 between"
    assert found.length[-1] == 0, "in a run of equal tokens, one token follows the pair before the last but one"


def test_a_pool_that_drafts_badly_is_emptied() -> None:
    """After five drafts in a row of which less than a quarter was accepted; then it learns all tokens again, in chunks."""
    settings, history = NgramMod(2, 1, 8), [1, 2, 3, 1, 2, 4]
    pool = NgramPool(settings, history)
    assert pool.draft([*history, 1], 2) == [4], "the token that followed last"
    for num_accepted in (0, 1, 2, 1, 1, 1, 1):
        pool.update(8, num_accepted)
        assert pool.draft([*history, 1], 2) == [4]
    pool.update(8, 1)
    assert pool.draft([*history, 1], 2) == [], "empty"
    longer = [*history, *range(10, 37)]
    assert pool.draft([*longer[:-2], 1], 2) == [], "32 tokens"
    assert pool.draft([*longer[:-1], 1], 2) == [4, *range(10, 17)], "33 tokens are learnt"


def test_prompts_are_selected() -> None:
    trace, table = with_prompts(trace_of()), flat_table()
    half = np.array([True, False, False, True])
    for draft, ngram in ((MODELS[2], None), (None, NGRAMS[2]), (MODELS[1], NGRAMS[1]), (None, MODS[0])):
        found = LlamaReplay(EngineReplay(trace, table, prompts=half)).price(draft, ngram)
        alone = LlamaReplay(EngineReplay(trace.select([0, 3]), table)).price(draft, ngram)
        assert found.predicted.ms_per_token == pytest.approx(alone.predicted.ms_per_token)
        assert found.predicted.speedup == pytest.approx(alone.predicted.speedup)


def test_fastest_settings_are_those_of_the_whole_space() -> None:
    """The fastest draft model and n-grams; both together only where that is faster."""
    replayed = LlamaReplay(EngineReplay(with_prompts(trace_of()), flat_table()))
    found = replayed.fastest()
    models, sizes = list(replayed._models()), list(replayed._sizes())
    assert {draft.n_max for draft in models} == {1, 2, 3, 4} and {draft.n_min for draft in models} == {0, 1, 2}
    assert len(models) == 1 + 18 + 3 * (1 + 27)
    assert all(
        size.size_n <= size.size_m if isinstance(size, NgramDraft) else size.n_min <= size.n_max for size in sizes
    )
    best = {
        "model": min(replayed.price(draft, None).predicted.ms_per_token for draft in models),
        "ngram": min(replayed.price(None, size).predicted.ms_per_token for size in sizes),
    }
    assert found[0].predicted.ms_per_token == best["model"] and found[1].predicted.ms_per_token == best["ngram"]
    assert len(found) == 3 and found[2].predicted.ms_per_token < min(best.values())
    without_prompts = LlamaReplay(EngineReplay(trace_of(), flat_table())).fastest()
    assert [(one.model is None, one.ngram) for one in without_prompts] == [(False, None)]


# --------------------------------------------------------------------------------------------------------------- export


def test_export_writes_flags_conversions_and_predictions(tmp_path: Path) -> None:
    trace, table = with_prompts(trace_of()), cheap_table()
    write_study(tmp_path / ".autotune" / "pair", table, trace)
    profile_of(point_of(trace, table), trace=trace).save(tmp_path / "profile.json")
    found = exported(tmp_path / "profile.json", "llama.cpp")
    folder = tmp_path / "out" / "llama.cpp"
    assert found.engine_version == "llama-cpp-python-0.3.36"
    convert = "python convert_hf_to_gguf.py tests/{0} --remote --outfile {1}/{0}.gguf"
    assert found.preparation == [convert.format(name, folder) for name in ("target", "draft")]
    assert [variant.predicted.ms_per_token for variant in found.variants] == sorted(
        variant.predicted.ms_per_token for variant in found.variants
    )
    assert {variant.name for variant in found.variants} >= {"draft-simple"}
    for variant in found.variants:
        settings = LlamaCppSettings.model_validate_json((folder / variant.file).read_text())
        assert json.loads(json.dumps(settings.model_dump(exclude_none=True))) == variant.settings
        words = shlex.split(variant.command)
        assert words[:3] == ["llama-server", "--model", f"{folder}/target.gguf"]
        flags = dict(zip(words[1::2], words[2::2], strict=True))
        assert flags["--spec-type"] == variant.name.replace("+", ",")
        if "draft-simple" in variant.name:
            assert flags["--spec-draft-model"] == f"{folder}/draft.gguf"
            assert flags["--spec-draft-n-max"] == str(settings.spec_draft_n_max)
            assert flags["--spec-draft-n-min"] == str(settings.spec_draft_n_min)
            assert flags["--spec-draft-p-min"] == str(settings.spec_draft_p_min)
        if "ngram-mod" in variant.name:
            assert flags["--spec-ngram-mod-n-match"] == str(settings.spec_ngram_mod_n_match)
        if "ngram-simple" in variant.name:
            assert flags["--spec-ngram-simple-size-n"] == str(settings.spec_ngram_simple_size_n)
            assert flags["--spec-ngram-simple-size-m"] == str(settings.spec_ngram_simple_size_m)
    assert any("not replayed: ngram-map-k" in note for note in found.notes)


def test_floors_are_exported(tmp_path: Path) -> None:
    trace, table = trace_of(), cheap_table()
    write_study(tmp_path / ".autotune" / "pair", table, trace)
    point = point_of(trace, table, tree={"policy": "chain", "depth": 3, "p_min": 0.3})
    profile_of(point, trace=trace).save(tmp_path / "profile.json")
    assert not any("floor" in note for note in exported(tmp_path / "profile.json", "llama.cpp").notes)
    settings = ENGINES["llama.cpp"].settings(Pair("t", "d", "independent"), ChainPolicy(depth=3, p_min=0.3, n_min=2))
    assert isinstance(settings, LlamaCppSettings)
    assert (settings.spec_draft_n_max, settings.spec_draft_n_min, settings.spec_draft_p_min) == (3, 2, 0.3)
    assert not ENGINES["llama.cpp"].supports_tree(Pair("t", "d", "eagle3"), Eagle2Policy(depth=2, k=2, budget=3))


def test_eagle3_heads_are_converted_with_their_target(tmp_path: Path) -> None:
    found = exported(write_pair(tmp_path, kind="eagle3", aux_layers=(1, 2, 3), table=cheap_table()), "llama.cpp")
    assert found.variants[0].settings["spec_type"] == "draft-eagle3"
    assert "--target-model-dir tests/target" in found.preparation[1]


def test_models_of_this_machine_are_converted_from_their_folders(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", {"a": 0})
    pair = Pair("some/target", "some/draft", "independent", target, None)
    commands = ENGINES["llama.cpp"].preparation(pair, Path("out"))
    assert commands == (
        f"python convert_hf_to_gguf.py {tmp_path / 'target'} --outfile out/target.gguf",
        "python convert_hf_to_gguf.py some/draft --remote --outfile out/draft.gguf",
    )


def test_only_prompts_without_images_are_replayed(tmp_path: Path) -> None:
    profile = write_pair(tmp_path, images=True, table=cheap_table())
    found = exported(profile, "llama.cpp")
    assert any(note.startswith("2 of 4 tuning prompts have an image") for note in found.notes)
    (variant,) = (variant for variant in found.variants if variant.name == "draft-simple")
    assert isinstance(variant.tree, ChainPolicy)
    replayed = LlamaReplay(EngineReplay(trace_of().select([0, 2]), cheap_table()))
    draft = ModelDraft(variant.tree.depth, variant.tree.n_min, variant.tree.p_min)
    assert variant.predicted.ms_per_token == pytest.approx(replayed.price(draft, None).predicted.ms_per_token)
    trace = dataclasses.replace(trace_of(), num_visual_tokens=np.full(4, 9))
    write_study(tmp_path / "all" / ".autotune" / "pair", cost_table(), trace)
    profile_of(point_of(trace, cost_table()), trace=trace).save(tmp_path / "all" / "profile.json")
    assert_refused(tmp_path / "all" / "profile.json", "llama.cpp", messages=("every tuning prompt has one",))


# ---------------------------------------------------------------------------------------------------------------- rules


DRAFT = {"spec_draft_model": "d.gguf", "spec_draft_n_max": 4, "spec_draft_n_min": 0, "spec_draft_p_min": 0.5}
POOL = {"spec_ngram_mod_n_match": 24, "spec_ngram_mod_n_min": 48, "spec_ngram_mod_n_max": 64}
NGRAM = {"spec_ngram_simple_size_n": 4, "spec_ngram_simple_size_m": 16}


def settings(spec_type: str, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"model": "t.gguf", "spec_type": spec_type}
    for part in (*parts, fields):
        content |= part
    return content


def test_settings_that_llama_server_would_refuse_are_refused() -> None:
    """Or that would never draft."""
    for content in (
        settings("draft-eagle3", DRAFT),
        settings("ngram-simple,draft-simple", DRAFT, NGRAM),
        settings("ngram-mod,draft-eagle3", POOL, DRAFT),
    ):
        assert LlamaCppSettings.model_validate(content).model_dump(exclude_none=True) == content
    for content, message in (
        (settings("draft-simple", DRAFT, NGRAM), "spec_type draft-simple takes all flags of spec_draft_ and no others"),
        (settings("ngram-mod", NGRAM, POOL), "takes all flags of spec_ngram_mod_ and no others"),
        (settings("ngram-simple"), "takes all flags of spec_ngram_simple_ and no others"),
        (
            settings("draft-simple", DRAFT, spec_draft_n_min=5),
            "spec_draft_n_min 5 above spec_draft_n_max 4 drops every draft",
        ),
        (settings("ngram-simple", NGRAM, spec_ngram_simple_size_m=1025), "less than or equal to 1024"),
        (settings("draft-simple", DRAFT, spec_draft_p_min=1.5), "less than or equal to 1"),
    ):
        with pytest.raises(ValidationError) as caught:
            LlamaCppSettings.model_validate(content)
        assert message in str(caught.value), content


def test_vocabularies_may_differ_a_little(tmp_path: Path) -> None:
    """By 128 tokens in size, and in the first five tokens."""
    words = {f"w{number}": number for number in range(8)}
    target = write_tokenizer(tmp_path / "target", words, vocab_size=8)
    for name, vocabulary, size, message in (
        ("equal", words, 8, None),
        ("padded", words, 136, None),
        ("early", {**words, "w0": 4, "w4": 0}, 8, None),
        ("large", words, 137, "has 137 tokens and the target's has 8, more than 128 apart"),
        ("late", {**words, "w5": 6, "w6": 5}, 8, "token 5 is 'w5' in the target and 'w6' in the draft"),
    ):
        draft = write_tokenizer(tmp_path / name, vocabulary, vocab_size=size)
        refusal = ENGINES["llama.cpp"].refusal(Pair("t", "d", "independent", target, draft))
        assert (refusal is None) == (message is None) and (message or "") in (refusal or ""), name
    assert ENGINES["llama.cpp"].refusal(Pair("t", "d", "independent", model(vocab_size=8), model(vocab_size=9))) is None
