"""New models of the bundled pair: real Hugging Face classes with random weights, and a tokenizer trained on the workload."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from autotune.training.recipe import Recipe
from autotune.workloads.code.corpus import corpus
from autotune.workloads.code.examples import CODE_TASKS
from autotune.workloads.code.examples import make_example as make_code_example
from autotune.workloads.digits import IMAGE_SIZE, TASKS, make_example

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ':' }}"
    "{% if message['content'] is string %}{{ ' ' + message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ ' <image>' }}{% else %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
TEXT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|begin|><|user|>' if message['role'] == 'user' else '<|assistant|>' }}"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXT_CONTEXT = 2048
SAMPLE_EVERY = 4  # of the corpus' files, for the tokenizer


def train_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, in which every digit is a separate token, on prompts and answers of the train split."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # A digit may include the space before it but never merges with its neighbours: models read numbers digit by digit.
    pattern = Regex(r" ?\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<pad>", "<s>", "</s>", IMAGE_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    examples = (make_example("train", task, index) for index in range(1500) for task in TASKS)
    texts = (f"USER: {example.prompt} ASSISTANT: {example.answer}" for example in examples)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": IMAGE_TOKEN},
        model_max_length=2048,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast, patch_size: int) -> LlavaProcessor:
    """The processor of the bundled pair: images are scaled to 192 pixels and give 144 visual tokens each."""
    images = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        image_mean=[0.3, 0.3, 0.3],
        image_std=[0.35, 0.35, 0.35],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token of the CLIP tower, which the strategy "default" drops
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    return {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}


def _llama_config(recipe: Recipe, tokenizer: Any, *, context: int) -> LlamaConfig:
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": context, "tie_word_embeddings": True}
    return LlamaConfig(**sizes, **_special_tokens(tokenizer), **recipe.text)


def build_model(recipe: Recipe, tokenizer: Any) -> LlavaForConditionalGeneration:
    """A LLaVA with the recipe's sizes and random weights; seed torch before the call."""
    special_tokens = _special_tokens(tokenizer)
    text = _llama_config(recipe, tokenizer, context=2048)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**recipe.vision),
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(recipe.vision["image_size"] // recipe.vision["patch_size"]) ** 2,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.update(**special_tokens)
    return model


def train_code_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on files and tasks of the training split. Names split at underscores and digits, and an
    indentation is one token with its line break, so that a name has the same tokens wherever it occurs.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r" ?\d| ?[A-Za-z]+| ?_+| ?[^\sA-Za-z\d_]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [file.text for file in corpus("train")[::SAMPLE_EVERY]]
    for task in CODE_TASKS:
        examples = (make_code_example("train", task, index) for index in range(1000))
        texts += [f"{example.prompt}\n{example.answer}" for example in examples]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=TEXT_CHAT_TEMPLATE,
        model_max_length=TEXT_CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_text_model(recipe: Recipe, tokenizer: Any) -> LlamaForCausalLM:
    """A Llama with the recipe's sizes and random weights; seed torch before the call."""
    model = LlamaForCausalLM(_llama_config(recipe, tokenizer, context=TEXT_CONTEXT))
    model.generation_config.update(**_special_tokens(tokenizer))
    return model
