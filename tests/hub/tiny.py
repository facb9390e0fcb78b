"""Tiny models under the ids of ``published.py``: the published config with smaller sizes, the published special tokens
at their ids, and random weights whose answers vary and end.
"""

from __future__ import annotations

import json
import re
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests import families
from tests.hub import published

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "intermediate_size_mlp": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    **{"global_head_dim": 16, "query_pre_attn_scalar": 16, "block_dim": 32, "block_ff_dim": 64, "conv_dim": 32},
    **{"block_auto_adjust_ff_dim": False, "embedding_size": 32, "shared_intermediate_size": 32},
    **{"index_head_dim": 8, "index_n_heads": 2, "hidden_size_per_layer_input": 8},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    **{"moe_shared_expert_intermediate_size": 16, "moe_latent_size": 16, "hybrid_override_pattern": "MEM*"},
}
"""Sizes of tiny text models, by the names that configs give them. A size that a config lacks, or sets to 0 or None, is
left as it is.
"""
NUM_LAYERS = 4
VISION_FAMILIES = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "gemma3": "gemma3",
    "mistral3": "mistral3",
    "llava": "llava",
    "llava_next": "llava_next_mistral",
    "llava_onevision": "llava_onevision",
    "idefics3": "idefics3",
    "smolvlm": "smolvlm",
}
"""The family of ``tests/families.py`` whose sizes, tower and processor a published vision-language model gets."""
FIRST_PROMPTS = ("Why is the sky blue?", "Count to ten.", "Read the table row by row.")
ENDS = range(8, 40)  # tokens after which answers end


def save(name: str, folder: Path) -> None:
    """Write the repository of a published id."""
    config = published.config_of(name)
    family = VISION_FAMILIES.get(config["model_type"])
    if family is not None:
        _save_vision(name, families.FAMILIES[family], folder)
    elif config["model_type"] in transformers.CONFIG_MAPPING:
        _save_text(name, config, folder)
    else:  # needs code of the repository
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def _save_vision(name: str, family: families.Family, folder: Path) -> None:
    """The family's target, as ``families.save`` writes it, with the published chat template."""
    torch.manual_seed(zlib.crc32(name.encode()))
    processor = family.processor()
    model = family.model(NUM_LAYERS).eval()
    image = families.random_inputs(family, processor, _rng(name), sight="image")
    families.sharpen(model, image)
    special = {token: families.token_id(token) for token in (families.PAD, families.BOS, families.EOS)}
    generation = {"bos_token_id": special[families.BOS], "pad_token_id": special[families.PAD]}
    processor.chat_template = published.template_of(name)
    config = published.config_of(name)
    stated = (config.get("text_config") or config).get("max_position_embeddings")
    model.config.get_text_config().max_position_embeddings = stated or 4096
    _end_answers(model, processor.tokenizer, {special[families.EOS]})
    _write(model, generation | {"eos_token_id": special[families.EOS]}, folder)
    processor.save_pretrained(folder)


def _rng(name: str) -> Any:
    import numpy as np

    return np.random.default_rng(zlib.crc32(name.encode()))


def _save_text(name: str, config: dict[str, Any], folder: Path) -> None:
    tokens = special_tokens(name, config)
    tokenizer = new_tokenizer(name, tokens)
    small = shrink(config)
    small["vocab_size"] = (
        max(config.get("vocab_size") or config["text_config"]["vocab_size"], *tokens.values(), 400) + 1
    )
    ends = {tokens[tokenizer.eos_token]}
    for role in ("bos", "eos", "pad"):
        token = getattr(tokenizer, f"{role}_token")
        small[f"{role}_token_id"] = None if token is None else tokens[token]
    generation = published.generation_config_of(name) or {
        f"{role}_token_id": small[f"{role}_token_id"] for role in ("bos", "eos")
    }
    torch.manual_seed(zlib.crc32(name.encode()))
    model_type = small.pop("model_type")
    settings = AutoConfig.for_model(model_type, **small)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    if hasattr(model.get_decoder(), "layers"):  # not of classes that autotune refuses
        families.sharpen(model, None)
    _silence(model, set(tokenizer.get_vocab().values()) - set(tokens.values()) | ends)
    _end_answers(model, tokenizer, ends)
    _write(model, generation, folder)
    tokenizer.save_pretrained(folder)


def _write(model: Any, generation: dict[str, Any], folder: Path) -> None:
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(folder)


# -------- config


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose sizes are small and whose form is the published one: kinds of layers, scaled positions, windows,
    ids of tokens and ties are kept.
    """
    config = dict(config)
    num_heads, num_kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    for part in ("text_config",):
        if isinstance(config.get(part), dict):
            config[part] = shrink(config[part])
    for key, size in SIZES.items():
        if config.get(key):
            config[key] = size
    if num_kv_heads:
        config["num_key_value_heads"] = 4 if num_kv_heads == num_heads else 2
    if config.get("num_hidden_layers"):
        config["num_hidden_layers"] = NUM_LAYERS
    for key, value in list(config.items()):
        if isinstance(value, list) and key in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers"):
            config[key] = _first_of_each(value)
    for key in ("quantization_config", "auto_map", "architectures", "torch_dtype", "dtype", "transformers_version"):
        config.pop(key, None)
    return config


def _first_of_each(layers: list[Any]) -> list[Any]:
    """Four layers that hold every kind of the published ones, in their order."""
    kinds = list(dict.fromkeys(layers))
    first = layers[:NUM_LAYERS]
    missing = [kind for kind in kinds if kind not in first]
    return [*first[: NUM_LAYERS - len(missing)], *missing]


# -------- tokens


def special_tokens(name: str, config: dict[str, Any]) -> dict[str, int]:
    """Ids of the special tokens: those of the tokenizer config, or else the ends of the config for the tokens that the
    chat template writes.
    """
    published_tokens = published.tokenizer_config_of(name).get("added_tokens_decoder", {})
    tokens = {entry["content"]: int(number) for number, entry in published_tokens.items()}
    text = config.get("text_config") or config
    roles = _roles(published.tokenizer_config_of(name), tokens)
    for role, token in roles.items():  # those that the tokenizer config names without an id
        if token is not None and token not in tokens:
            tokens[token] = text[f"{role}_id"]
    if tokens:
        return tokens
    template = published.template_of(name) or ""
    written = list(
        dict.fromkeys(re.findall(r"<[|\uff5c][^<>|\uff5c\s'\"]+[|\uff5c]>|</?[a-z_]+>|\[/?[A-Z_]+\]", template))
    )
    end = text.get("eos_token_id")
    ends = [end] if isinstance(end, int) else list(end or [2])
    tokens = {_end_of_answer(template, written): ends[0]}
    for role, number in (("bos", text.get("bos_token_id")), ("pad", text.get("pad_token_id"))):
        if isinstance(number, int) and number not in tokens.values():
            tokens[f"<{role}-of-the-stand-in>"] = number
    free = (number for number in range(300, 10_000) if number not in tokens.values())
    return tokens | {token: next(free) for token in written if token not in tokens}


def _end_of_answer(template: str, written: list[str]) -> str:
    """The special token that the template writes after an answer."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
        (rendered,), _ = render_jinja_template([chat], chat_template=template, bos_token="", eos_token="")
        after = rendered.partition("ANSWER")[2].lstrip()
        return next(token for token in written if after.startswith(token))
    except Exception:
        return "<end-of-the-stand-in>"


@cache
def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of the families' tokenizer without its special tokens."""
    content = json.loads(families.new_tokenizer().backend_tokenizer.to_str())["model"]
    special = {families.PAD, families.BOS, families.EOS, *families.VISUAL_TOKENS}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in content["merges"]]
    return {token: number for token, number in content["vocab"].items() if token not in special}, merges


def new_tokenizer(name: str, tokens: dict[str, int]) -> PreTrainedTokenizerFast:
    """A small byte-level vocabulary around the special tokens, which keep their ids."""
    config = published.tokenizer_config_of(name)
    vocabulary, merges = _pieces()
    free = (number for number in range(10_000) if number not in tokens.values())
    numbers = {token: next(free) for token in vocabulary}
    backend = Tokenizer(models.BPE(vocab=numbers | tokens, merges=merges))
    backend.pre_tokenizer = families.new_tokenizer().backend_tokenizer.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    roles = _roles(config, tokens)
    special = {entry["content"]: entry["special"] for entry in config.get("added_tokens_decoder", {}).values()}
    backend.add_tokens([AddedToken(token, special=special.get(token, True), normalized=False) for token in tokens])
    if roles["bos_token"] is not None and config.get("add_bos_token", "Llama-3" in name):
        bos = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens[bos])]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=1 << 20, **roles)
    tokenizer.chat_template = published.template_of(name)
    return tokenizer


def _roles(config: dict[str, Any], tokens: dict[str, int]) -> dict[str, str | None]:
    roles: dict[str, str | None] = {}
    for role in ("bos_token", "eos_token", "pad_token"):
        token = config.get(role)
        roles[role] = token["content"] if isinstance(token, dict) else token
    if not config and tokens:
        roles["eos_token"] = next(iter(tokens))
        roles["bos_token"] = next((token for token in tokens if token.startswith("<bos")), None)
        roles["pad_token"] = next((token for token in tokens if token.startswith("<pad")), None)
    return roles


# -------- weights


@torch.no_grad()
def _silence(model: Any, spoken: set[int]) -> None:
    """Make all other tokens improbable: those that the small tokenizer lacks, and special ones."""
    head = model.get_output_embeddings().weight
    is_silent = torch.ones(len(head), dtype=torch.bool)
    is_silent[sorted(spoken)] = False
    head[is_silent] *= 0.1


@torch.no_grad()
def _end_answers(model: Any, tokenizer: Any, ends: set[int]) -> None:
    """Exchange the end with a token that greedy answers hold after some tokens."""
    (end,) = ends
    texts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in FIRST_PROMPTS]
    spoken = set(tokenizer.get_vocab().values())
    for _ in range(6):
        answers = [_greedy(model, text) for text in texts]
        if sum(end in answer for answer in answers) >= 2:
            return
        later = [token for answer in answers for token in dict.fromkeys(answer[ENDS.start : ENDS.stop])]
        early = {token for answer in answers for token in answer[: ENDS.start]}
        choices = [token for token in later if token not in early and token in spoken and token != end]
        if not choices:
            return
        chosen = max(dict.fromkeys(choices), key=choices.count)
        for weight in {model.get_output_embeddings().weight, model.get_input_embeddings().weight}:
            weight[[end, chosen]] = weight[[chosen, end]]


def _greedy(model: Any, tokens: Tensor) -> list[int]:
    """Sixty tokens of an answer, its end ignored."""
    model.generation_config.eos_token_id = None  # ``_write`` sets it
    out = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=60, do_sample=False)
    return list(out[0, tokens.shape[1] :].tolist())
