"""The document of ``autotune doctor``: findings on a machine, with a target or without one."""

from __future__ import annotations

from pydantic import Field

from autotune.documents.captured_steps import CapturedSteps
from autotune.documents.contention import Contention
from autotune.documents.execution import EAGER
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document


class DeviceFound(Document):
    """A device of this machine."""

    device: str
    """As ``--device`` takes it: ``cpu``, ``cuda:0``."""
    fingerprint: Fingerprint
    free_bytes: int = Field(ge=0)
    datasheet_gb_per_second: float | None = None
    """Memory bandwidth in the datasheet; None without one, as for CPUs."""


class AttentionUse(Document):
    """The kernel that torch picks for scaled dot-product attention in one kind of forward pass."""

    forward: str
    """``prefill``, ``plain step`` or ``verification``."""
    backend: str
    """As torch names it: ``flash_attention``, ``efficient_attention``, ``cudnn_attention``, ``math``; ``overrideable``
    is the kernel of another device.
    """
    query: tuple[int, ...]
    """Shape of the queries, [batch, heads, tokens, head size]; where several heads share a KV head, the KV heads may be
    the batch.
    """
    key: tuple[int, ...]
    """Shape of the keys."""
    has_mask: bool
    num_layers: int
    """Layers with this shape and kernel."""


class NearTies(Document):
    """Verification against single steps: the target's logits at the tokens of plain answers, computed both ways."""

    num_tokens: int = Field(ge=0)
    num_flips: int = Field(ge=0)
    """Tokens whose argmax differs."""
    num_unexplained: int = Field(ge=0)
    """Flips whose margin is larger than ``allowed_noise`` of both logits explains."""
    noise: float = Field(ge=0)
    """Largest difference between the logits of both ways."""
    allowed_noise: float = Field(ge=0)
    """``TreeCheck.allowed`` in units of these logits."""
    examples: tuple[str, ...] = ()
    """The first flips, in words."""


class TreeCheck(Document):
    """Two rounds of a tree against transformers' own forward passes (``modeling/self_check.py``), in standard
    deviations of the logits.
    """

    difference: float = Field(ge=0)
    """Largest difference between a tree's logits and uncached ones of transformers."""
    noise: float = Field(ge=0)
    """The same between cached and uncached ones of transformers."""
    allowed: float = Field(ge=0)


class StepTimes(Document):
    """Forward passes of the target in one mode, medians."""

    mode: str
    kv_length: int
    plain_ms: float = Field(gt=0)
    verify_ms: dict[int, float]
    """By the number of tokens, the root included."""
    prepare_s: float | None = None
    """Time in which all of these sizes were captured; None in mode ``eager``."""
    prepared_bytes: int = 0
    """Device memory that this took."""
    num_prepared: int = 0
    why_eager: str | None = None
    """The error because of which forward passes run eagerly after all."""


class DecodingTrial(Document):
    """The same prompts, decoded plainly or with a draft in one mode, next to all other trials."""

    draft: str | None
    """None for plain decoding."""
    tree: str | None
    mode: str
    tokens_per_round: float | None
    ms_per_token: float = Field(gt=0)
    """After the first token, the draft's prefill included."""
    speedup: float = Field(gt=0)
    """Over plain decoding in the same mode."""
    rounds_over_eager: float | None
    """Rounds over those of mode ``eager``, in the answers that have the same tokens in both; None without one. 1.0: the
    trees are the same.
    """
    num_answers: int = Field(ge=1)
    num_near_ties: int = Field(ge=0)
    """Answers that leave the one of eager plain decoding at a near tie; ``unexplained``, in words, are those that leave
    it elsewhere.
    """
    unexplained: tuple[str, ...]
    num_captures: int = Field(ge=0)
    """Forward passes that were captured for it, in addition to those of the trials after it in the list."""
    capture_s: float = Field(ge=0)
    capture_bytes: int = Field(ge=0)
    why_eager: str | None = None
    """The error because of which steps of the draft run eagerly after all; of the target in plain decoding."""


class TargetFound(Document):
    """A target on the examined device."""

    model: ModelReference
    model_type: str
    is_tested: bool
    """Whether the test suite covers its text model's type."""
    precision: str
    has_native_precision: bool
    """False where the device emulates it."""
    weight_bytes: int
    """Weights that every step reads."""
    kv_bytes_per_token: int
    attention: tuple[AttentionUse, ...]
    tree_check: TreeCheck
    near_ties: NearTies
    steps: tuple[StepTimes, ...]
    """By mode."""
    mode: str = EAGER
    """The one that ``auto`` chooses for a search with these drafts."""
    captured_steps: CapturedSteps | None = None
    """None where nothing can be captured."""
    why_masks: str | None = None
    """Reason for which attention of captured steps has masks; None where Triton kernels run it, or nothing can be
    captured.
    """
    trials: tuple[DecodingTrial, ...] = ()
    """Plain decoding in each mode, then each draft in each mode; empty without drafts."""

    def step_gb_per_second(self, times: StepTimes) -> float:
        """Rate at which a plain step reads weights, keys and values."""
        return (self.weight_bytes + times.kv_length * self.kv_bytes_per_token) / (times.plain_ms * 1e6)


class Diagnosis(Document, kind="diagnosis", made_by="autotune doctor"):
    """Findings on a machine, and on a target on one of its devices."""

    provenance: Provenance
    devices: tuple[DeviceFound, ...]
    device: str
    """The examined one."""
    copy_gb_per_second: float = Field(gt=0)
    """Measured rate of a copy in the device's memory, reads and writes together."""
    contention: Contention
    target: TargetFound | None = None
    defects: tuple[str, ...] = ()
    """GPUs that torch cannot use, and differences between a verification and single steps beyond rounding, in
    sentences.
    """
    notes: tuple[str, ...] = ()
    """Expectations of a search here, in sentences."""

    @property
    def examined(self) -> DeviceFound:
        return next(device for device in self.devices if device.device == self.device)
