"""Tiny assistants of Gemma 4, of the real classes, and what transformers computes with them step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast

from autotune.drafters.gemma4_assistant import Gemma4AssistantDraft
from autotune.drafters.gemma4_checkpoint import keys_of_another_model
from autotune.modeling.target import Target
from tests.families import Inputs

NUM_CENTROIDS, NUM_CHOSEN = 16, 4  # of ordered embeddings


@torch.no_grad()
def new_assistant(model: Any, *, is_ordered: bool = False, seed: int = 3, **changes: Any) -> Any:
    """An assistant with random weights for a Gemma 4 model. Both have sliding layers of one window."""
    text = model.config.get_text_config()
    is_unified = text.model_type == "gemma4_unified_text"
    sliding, full = text.per_layer_config[0], text.per_layer_config[1]
    sizes = {
        "vocab_size": text.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": sliding.num_key_value_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_key_value_heads,
        "sliding_window": text.sliding_window,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
    }
    if not is_unified:
        sizes |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        sizes |= {"attention_k_eq_v": text.attention_k_eq_v}
    kinds: tuple[Any, Any, Any] = (hf.Gemma4TextConfig, hf.Gemma4AssistantConfig, hf.Gemma4AssistantForCausalLM)
    if is_unified:
        kinds = (hf.Gemma4UnifiedTextConfig, hf.Gemma4UnifiedAssistantConfig, hf.Gemma4UnifiedAssistantForCausalLM)
    torch.manual_seed(seed)
    with keys_of_another_model():
        assistant = kinds[2](
            kinds[1](
                text_config=kinds[0](**{**sizes, **changes}),
                backbone_hidden_size=text.hidden_size,
                use_ordered_embeddings=is_ordered,
                num_centroids=NUM_CENTROIDS,
                centroid_intermediate_top_k=NUM_CHOSEN,
            )
        )
    for weight in assistant.parameters():
        if weight.dim() >= 2:
            weight.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5)
        else:
            weight.uniform_(0.5, 1.5)
    if is_ordered:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    return assistant.eval().requires_grad_(False)


class Stock:
    """A target and an assistant as transformers runs them, over the whole text."""

    def __init__(self, model: Any, assistant: Any) -> None:
        self.model, self.assistant = model, assistant

    def read(self, inputs: Inputs, committed: Sequence[int]) -> CausalLMOutputWithPast:
        """The target's outputs for prompt and committed tokens without the last one, the root: logits, its last hidden states
        and the keys and values that an assistant reads.
        """
        more = torch.tensor([list(committed[:-1])], dtype=torch.long)
        given = {name: value for name, value in inputs.items() if name != "attention_mask"}
        given["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
        for name in {"token_type_ids", "mm_token_type_ids"} & set(inputs):
            given[name] = torch.cat([inputs[name], torch.zeros_like(more)], 1)
        cache = DynamicCache()  # keeps every token
        out = self.model(**given, past_key_values=cache, use_cache=True, output_hidden_states=True)
        text = self.model.config.get_text_config()
        own = text.num_hidden_layers - (text.num_kv_shared_layers or 0)
        last = {layer_type: number for number, layer_type in enumerate(text.layer_types[:own])}
        shared = {name: (cache.layers[number].keys, cache.layers[number].values) for name, number in last.items()}
        result = CausalLMOutputWithPast(logits=out.logits)
        result["hidden_states"], result["shared_kv_states"] = (out.hidden_states[-1],), shared
        return result

    def logits_after(self, inputs: Inputs, committed: Sequence[int], path: Sequence[int]) -> Tensor:
        """The assistant's logits [vocabulary] after the root and a path of drafted tokens."""
        read = self.read(inputs, committed)
        hidden, length = read.hidden_states[0][:, -1:], inputs["input_ids"].shape[1] + len(committed)
        for token in (committed[-1], *path):
            embedding = self.model.get_input_embeddings()(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat([embedding, hidden], -1),
                position_ids=torch.tensor([[length - 1]]),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                shared_kv_states=read.shared_kv_states,
            )
            hidden = out.last_hidden_state
        return out.logits[0, -1]  # type: ignore[no-any-return]

    def drafted(self, inputs: Inputs, committed: Sequence[int], number: int) -> list[int]:
        """The chain that transformers' own candidate generator drafts after prompt and committed tokens."""
        self.assistant.generation_config.num_assistant_tokens = number
        config = hf.GenerationConfig(max_length=10_000)
        generator = SinglePositionMultiTokenCandidateGenerator(
            self.assistant, self.model.get_input_embeddings(), generation_config=config
        )
        ids = torch.cat([inputs["input_ids"], torch.tensor([list(committed)])], 1)
        arguments = {"attention_mask": torch.ones_like(ids)}
        outputs = self.read(inputs, committed)
        found, _ = generator.get_candidates(ids, arguments, outputs, is_first_iteration=False, n_last_matches=0)
        return found[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def agreeing_assistant(target: Target, prompts: Sequence[Inputs], num_tokens: int) -> Gemma4AssistantDraft:
    """A draft that often proposes what the target emits after these prompts: of random weights, except for the output head and the
    projection to the target's states, which are fitted to the answers by least squares.
    """
    model: Any = target.model
    assistant = new_assistant(model)
    stock, states, logits, hidden = Stock(model, assistant), [], [], []
    hook = assistant.post_projection.register_forward_pre_hook(lambda _, given: states.append(given[0][0, -1]))
    for inputs in prompts:
        length = inputs["input_ids"].shape[1]
        answer = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)[0, length:].tolist()
        whole = stock.read(inputs, [*answer, 0])
        for count in range(1, len(answer) + 1):
            stock.logits_after(inputs, answer[:count], [])
            logits.append(whole.logits[0, length - 1 + count])
            hidden.append(whole.hidden_states[0][0, length - 1 + count])
    hook.remove()
    seen = torch.stack(states)
    for part, wanted in ((assistant.lm_head, logits), (assistant.post_projection, hidden)):
        # A small ridge keeps the logits of other states moderate.
        part.weight.copy_(
            torch.linalg.solve(seen.T @ seen + 0.02 * torch.eye(seen.shape[1]), seen.T @ torch.stack(wanted)).T
        )
    draft = Gemma4AssistantDraft(assistant)
    draft.attach(target)
    return draft
