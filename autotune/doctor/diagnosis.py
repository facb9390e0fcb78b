"""The document of ``autotune doctor``: findings on a machine and on a target, and sentences about them."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from autotune.cost.roofline import datasheets, find_limits
from autotune.cost.table import shipped_tables
from autotune.documents.captured_steps import CapturedSteps
from autotune.documents.contention import Contention
from autotune.documents.execution import EAGER
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document
from autotune.machine.device import gib
from autotune.table import Table, number

SLOW_SHARE = 0.5  # of the bandwidth, below which something else than memory bounds a plain step
CONSEQUENCES = {
    "cudnn_attention": "it builds a plan for every new shape, and plain decoding has a new one for every token",
    "math": "it stores all scores, which is slow with long contexts",
}
"""By torch's kernels of attention, those that are slow."""


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
    """Flips whose margin is larger than the noise that the precision explains in both logits."""
    noise: float = Field(ge=0)
    """Largest difference between the logits of both ways."""
    example: str = ""
    """The flip that is explained least, in words."""


class TreeCheck(Document):
    """Two rounds of a tree against transformers' own forward passes (``modeling/self_check.py``), in standard
    deviations of the logits.
    """

    difference: float = Field(ge=0)
    """Largest difference between a tree's logits and uncached ones of transformers."""
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
    why_eager: str | None = None
    """The error because of which forward passes run eagerly after all."""


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
    """The one that ``auto`` chooses."""
    captured_steps: CapturedSteps | None = None
    """None where nothing can be captured."""
    why_masks: str | None = None
    """Reason for which attention of captured steps has masks; None where Triton kernels run it, or nothing can be
    captured.
    """

    def step_gb_per_second(self, times: StepTimes) -> float:
        """Rate at which a plain step reads weights, keys and values."""
        return (self.weight_bytes + times.kv_length * self.kv_bytes_per_token) / (times.plain_ms * 1e6)

    def tables(self) -> list[Table]:
        """Kernels of attention, and times of forward passes."""
        shapes = [
            [
                use.forward,
                use.backend,
                " x ".join(map(str, use.query)),
                " x ".join(map(str, use.key)),
                "yes" if use.has_mask else "no",
                str(use.num_layers),
            ]
            for use in self.attention
        ]
        sizes = sorted({tokens for times in self.steps for tokens in times.verify_ms})
        passes = [
            [
                times.mode,
                number(times.plain_ms),
                number(self.step_gb_per_second(times), 1),
                *(number(times.verify_ms[tokens] / times.plain_ms) for tokens in sizes),
                "-" if times.prepare_s is None else f"{times.prepare_s:.1f} s, {gib(times.prepared_bytes)}",
            ]
            for times in self.steps
        ]
        return [
            Table("Attention", ["forward pass", "kernel", "queries", "keys", "mask", "layers"], shapes),
            Table(
                f"Forward passes of {self.model.id}, {self.precision}; verifications in plain steps",
                ["mode", "plain step, ms", "GB/s", *(f"{tokens} tokens" for tokens in sizes), "capturing"],
                passes,
            ),
        ]


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

    def tables(self) -> list[Table]:
        """The devices of this machine, those that a search can be told by ``--gpu``, and figures of the target."""
        here = [
            [
                device.device,
                device.fingerprint.name,
                device.fingerprint.model,
                device.fingerprint.driver or "-",
                f"{gib(device.free_bytes)} of {gib(device.fingerprint.memory_bytes)}",
                number(device.datasheet_gb_per_second, 0),
                number(self.copy_gb_per_second, 1) if device == self.examined else "-",
            ]
            for device in self.devices
        ]
        shipped = {
            name: ", ".join(path.name.removesuffix(".cost.json") for path in paths)
            for name, paths in shipped_tables().items()
        }
        limits = {name: find_limits(name) for name in sorted({*datasheets(), *shipped})}
        others = [
            [
                name,
                known.model if known else "-",
                number(known.memory_gb_per_second if known else None, 0),
                shipped.get(name, "datasheet"),
            ]
            for name, known in limits.items()
        ]
        return [
            Table(
                "Devices", ["device", "name", "model", "driver", "free memory", "datasheet, GB/s", "copy, GB/s"], here
            ),
            Table("Other devices (--gpu NAME)", ["name", "model", "GB/s", "prices from"], others),
            *(self.target.tables() if self.target else []),
        ]


class Finding(NamedTuple):
    """A sentence about a diagnosis."""

    applies: bool
    text: str
    is_defect: bool = False


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """All findings that apply, in the order in which they are printed."""
    device, target = diagnosis.examined, diagnosis.target
    name = device.fingerprint.name
    sentences = [
        Finding(
            device.datasheet_gb_per_second is None and device.fingerprint.kind != "cpu",
            f"no datasheet of {name}: searches measure here as elsewhere, but reports show no limits; "
            f"add profiles/devices/{name}.yaml",
        ),
        Finding(
            diagnosis.contention.is_busy,
            f"the machine is busy ({diagnosis.contention.describe('meanwhile')}): times scatter; searches and "
            "measurements wait for an idle machine with --wait-until-idle",
        ),
    ]
    if target is not None:
        sentences += [*_of_attention(target), *_of_precision(target), *_of_times(diagnosis, target)]
    return [sentence for sentence in sentences if sentence.applies]


def _of_attention(target: TargetFound) -> list[Finding]:
    captured = target.captured_steps or CapturedSteps()
    kernels = f"with masks: {target.why_masks}" if target.why_masks else "in Triton kernels"
    differences = (
        f"at {captured.num_tokens} tokens, captured steps differ from eager ones by at most {captured.difference:.2g} "
        f"standard deviations of the logits (allowed: {captured.allowed:.2g}), and {captured.num_near_ties} argmaxes "
        "flip in near ties"
    )
    return [
        Finding(
            not target.attention, "the model does not call torch's scaled dot-product attention: its own code attends"
        ),
        *(
            Finding(
                any(use.backend == backend for use in target.attention), f"attention runs as {backend}: {consequence}"
            )
            for backend, consequence in CONSEQUENCES.items()
        ),
        Finding(target.captured_steps is not None, f"captured steps run attention {kernels}"),
        Finding(captured.difference > captured.allowed, str(captured.why_eager), is_defect=True),
        Finding(target.captured_steps is not None, f"mode auto is {target.mode}: {captured.why_eager or differences}"),
    ]


def _of_precision(target: TargetFound) -> list[Finding]:
    tree, ties = target.tree_check, target.near_ties
    return [
        Finding(
            tree.difference > tree.allowed,
            f"a tree's logits differ from token-by-token ones by {tree.difference:.2g} standard deviations, more than "
            f"the {tree.allowed:.2g} that this precision explains: outputs of speculative decoding will be wrong here",
            is_defect=True,
        ),
        Finding(
            ties.num_unexplained > 0,
            f"{ties.num_unexplained} of {ties.num_tokens} argmaxes differ between verification and single steps by "
            f"more than rounding explains, for example {ties.example}",
            is_defect=True,
        ),
        Finding(
            not target.has_native_precision, f"the device emulates {target.precision}: another --dtype may be faster"
        ),
        Finding(
            True,
            f"{ties.num_flips - ties.num_unexplained} of {ties.num_tokens} argmaxes flip in near ties (noise "
            f"{ties.noise:.2g}): where one flips, outputs may differ from plain decoding, and autotune check accepts it",
        ),
        Finding(
            not target.is_tested,
            f"text models of type {target.model_type!r} are not in the test suite; this one passed the self-check",
        ),
    ]


def _of_times(diagnosis: Diagnosis, target: TargetFound) -> list[Finding]:
    limit = diagnosis.examined.datasheet_gb_per_second or diagnosis.copy_gb_per_second
    free_bytes = diagnosis.examined.free_bytes
    num_tokens = int(free_bytes / max(1, target.kv_bytes_per_token))
    sentences = [Finding(True, f"{gib(free_bytes)} are free: keys and values of {num_tokens:,} tokens")]
    for times in target.steps:
        rate = target.step_gb_per_second(times)
        sentences += [
            Finding(
                rate < SLOW_SHARE * limit,
                f"mode {times.mode}: a plain step reads {rate:.1f} GB/s, {100 * rate / limit:.0f} % of {limit:.3g} "
                "GB/s: launches of kernels or arithmetic take the rest",
            ),
            Finding(times.why_eager is not None, f"mode {times.mode} fails here and runs eagerly: {times.why_eager}"),
        ]
    return sentences
