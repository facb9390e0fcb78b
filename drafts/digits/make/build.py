"""New models of the pair: real Hugging Face classes with random weights, and a tokenizer trained on prompts and
answers.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from drafts.digits.make.digits import IMAGE_SIZE, TASKS, make_example

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ':' }}"
    "{% if message['content'] is string %}{{ ' ' + message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ ' <image>' }}{% else %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
CONTEXT = 2048  # tokens


def train_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, in which every digit is a separate token, on prompts and answers of the train
    split.
    """
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
        model_max_length=CONTEXT,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast, patch_size: int) -> LlavaProcessor:
    """The processor of the pair: images are scaled to 192 pixels and give 144 visual tokens each."""
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


def build_model(text: dict[str, Any], vision: dict[str, Any], tokenizer: Any) -> LlavaForConditionalGeneration:
    """A LLaVA with random weights; seed torch before the call.

    Args:
        text: fields of ``LlamaConfig``.
        vision: fields of ``CLIPVisionConfig``.
    """
    special_tokens = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "tie_word_embeddings": True}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision),
        text_config=LlamaConfig(**sizes, **special_tokens, **text),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(vision["image_size"] // vision["patch_size"]) ** 2,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.update(**special_tokens)
    return model
