from typing import Any
def chat_text(processor: Any, prompt: str, *, num_images: int) -> str:
    """The prompt as the processor's chat template words it, images first, ready for the answer."""
    content = [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": prompt}]
    return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False))
