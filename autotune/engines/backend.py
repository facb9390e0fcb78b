"""The interface of an engine as a backend: what a search asks of it, in six methods. The runtime of this program has a
search of its own (``search.pipeline``). Loads no torch.

A backend is one file and one row of ``search.backends.BACKENDS``; ``engines.contract`` tests it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.deployment import Deployment, PricedStep
from autotune.documents.loads import LoadRun
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import Speculation
from autotune.errors import ArmFailed, UserError
from autotune.trees.limits import Floats
from autotune.workloads.prompt import WorkloadPrompt


@dataclass
class Prices(ABC):
    """The result of ``Backend.price``: times of forward passes."""

    priced: Sequence[PricedStep] = ()
    """The measurements, for the profile."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Types of configurations that are not to be replayed, with the reason."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Figures derived from them, for the profile."""

    @abstractmethod
    def ms(self, steps: Any) -> Floats:
        """Predicted milliseconds of the recorded answers by prompt, comparable between configurations."""


@dataclass
class EngineArm:
    """Decodes prompts in a server, one at a time: an ``evaluation.arms.Arm``."""

    name: str
    """Unique within a comparison; who compares arms of several backends may change it."""
    key: str
    """Hash of the backend, the model, the arguments and the configuration."""
    keeps_state: bool
    """Whether drafts follow from earlier requests."""
    server: Any
    """A server's client: ``ask(prompt)`` decodes greedily and gives a ``Decoded``, whose time is without that of
    reading the prompt, and ``text(tokens)`` gives the text of tokens.
    """
    pause_s: float = 0.0
    """Time after an answer for which the server keeps a core busy without work."""

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        """Nothing: the server is warm, as requests read their prompts beforehand."""

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        """
        Raises:
            ArmFailed: the server has ended, or refuses the prompt.
        """
        try:
            served = self.server.ask(prompt)
        except UserError as error:
            raise ArmFailed(str(error)) from None
        time.sleep(self.pause_s)
        return Decoded(**{name: getattr(served, name) for name in Decoded.model_fields} | {"arm": self.key})

    def text(self, answer: Decoded) -> str:
        """The text of an answer's tokens."""
        return str(self.server.text(answer.tokens))


class Backend(ABC):
    """A way to serve one model. ``None`` in place of a configuration is decoding without speculation.

    ``until`` is the time of ``time.monotonic()`` after which no further prompt or repetition begins, apart from the
    first ones. A method that is given the configurations, records or steps gets those that this backend made.
    """

    name: ClassVar[str]
    model: ModelReference
    """The model that the engine loads."""
    precision: str
    """Precision of the weights, such as ``bfloat16`` or ``Q4_1``."""
    is_fixed: bool = False
    """Whether this is a running server, whose settings stay: it has no arms, and the result is a prediction."""
    most_requests: int = 0
    """The greatest number of requests at once, of an engine that takes a depth for each (``Speculation.schedule``)."""

    @abstractmethod
    def __init__(self, target: str, *, console: Console | None = None, seed: int = 0) -> None:
        """
        Args:
            target: the model to load. The other arguments of a backend are options of ``--set NAME:OPTION=VALUE``.

        Raises:
            UserError: the engine is not installed, or does not load the model.
        """

    @classmethod
    def restored(cls, deployment: Deployment, **options: Any) -> Self:
        """The backend of a profile, with further arguments.

        Raises:
            UserError: as the constructor, or the model is another one.
        """
        return cls(deployment.model.id, **options)

    def kept_open(self) -> AbstractContextManager[None]:
        """Inside the context, a server that several methods need may stay open between them."""
        return nullcontext()

    @abstractmethod
    def configurations(self) -> Sequence[Speculation]:
        """Every configuration that is replayed, the default of every type among them."""

    @abstractmethod
    def record(self, prompts: Sequence[WorkloadPrompt], until: float = math.inf) -> Any:
        """An object whose ``answers`` are plain decoding's ``Decoded``, in the order of the prompts. They are kept, so
        that a search that is given again asks for the rest.
        """

    @abstractmethod
    def price(self, recorded: Any, until: float = math.inf) -> Prices:
        """Measure forward passes, and find out which types are replayed as they are served."""

    @abstractmethod
    def replay(self, configuration: Speculation | None, recorded: Any) -> Any:
        """The forward passes for the recorded prompts, in their order in one new server: an object whose ``counts`` are
        the verifications, draft tokens and accepted ones of each prompt.
        """

    @abstractmethod
    def arm(self, configuration: Speculation | None) -> AbstractContextManager[Any]:
        """An ``evaluation.arms.Arm`` of the configuration, such as ``EngineArm``: a new server, which is stopped at the
        end, or of plain decoding the one that is ``kept_open``.

        Raises:
            UserError: it does not start, or it ends while it is used.
        """

    @abstractmethod
    def deploy(self, configuration: Speculation | None) -> Deployment:
        """The deployment that serves requests with the configuration."""

    def at_loads(self, configuration: Speculation | None, recorded: Any, loads: Sequence[int]) -> Iterator[LoadRun]:
        """Serve the recorded prompts in a closed loop of each number of clients, in new servers. A run that fails has
        the reason.

        Raises:
            UserError: this backend serves one request at a time.
        """
        raise UserError(f"--load: {self.name} serves one request at a time; leave it out")
