"""A target and a draft, loaded together, with what documents call them."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cost.device import fingerprint
from autotune.cost.roofline import ModelShape
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.feature_draft import FeatureDraft
from autotune.files import content_key
from autotune.models import load_model, load_processor, reference
from autotune.provenance import version_of
from autotune.runtime.decoder import Decoder
from autotune.runtime.target import Target
from autotune.runtime.text_runner import TextRunner
from autotune.runtime.vision import vision_parts
from autotune.subnet import Subnet


class Pair:
    """Target and draft, loaded, with what documents call them. Of ``subnet`` heads and injection layer are taken."""

    def __init__(
        self,
        target: str,
        draft: str,
        device: str,
        buckets: Sequence[int] = (),
        subnet: Subnet | None = None,
    ) -> None:
        self.target_reference = reference(target)
        self.draft_reference = reference(draft)
        self.processor = load_processor(target)
        self.target = Target(load_model(target, device=device))
        self.draft = load_draft(draft, self.target, subnet)
        self.decoder = Decoder(
            self.target, self.draft, buckets=buckets, processor=self.processor
        )  # checks that their vocabularies are of one size
        self.device = fingerprint(device)

    @property
    def key(self) -> str:
        """Names documents that speak of this pair on this device, through these versions."""
        models = [
            self.target_reference.sha256 or self.target_reference.id,
            self.draft_reference.sha256 or self.draft_reference.id,
        ]
        sizes = [list(self.decoder.buckets)] if self.decoder.buckets else []
        versions = [version_of("torch"), version_of("transformers")]
        subnet = self.draft.subnet.model_dump(exclude={"visual_keep"}, exclude_none=True)
        return content_key([*models, self.device.key, *versions, *sizes, *([subnet] if subnet else [])])


def shape_of(runner: TextRunner | FeatureDraft) -> ModelShape:
    """The shape of a loaded model, for the roofline. A draft that reads features shares its target's head."""
    if isinstance(runner, FeatureDraft):
        width, hidden = runner.dtype.itemsize, runner.network.config.hidden_size
        return ModelShape(
            num_layers=len(runner.cache.blocks),
            hidden_size=hidden,
            text_parameters=runner.num_parameters + hidden * runner.vocab_size,
            vision_parameters=0,
            kv_bytes_per_token=runner.cache_bytes_per_token,
            bytes_per_parameter=width,
        )
    config = runner.text.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = runner.dtype.itemsize
    layers = sum(parameter.numel() for layer in runner.text.layers for parameter in layer.parameters())
    vision = sum(p.numel() for part in vision_parts(runner.model) for p in part.parameters())
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        text_parameters=layers + config.hidden_size * config.vocab_size,
        vision_parameters=vision,
        kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_size * width,
        bytes_per_parameter=width,
    )
