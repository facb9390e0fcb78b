"""Contention: the share of a machine that others take while something is timed on it."""

from __future__ import annotations

from pydantic import Field

from autotune.files import Document

IDLE_CORES = 0.1  # that others may use on an idle machine...
IDLE_SHARE = 0.05  # ...or this share of the cores, if that is more
IDLE_PRESSURE = 0.1
IDLE_THROTTLED = 0.01


class Contention(Document):
    """Contention from other processes, and throttling, during ``seconds``. None: the machine does not report it.

    The figures are means over the time; the GPU's figures are read at its beginning and end.
    """

    seconds: float = Field(ge=0)
    num_cores: int = Field(ge=1)
    own_cores: float = Field(ge=0)
    """Cores used by this process and its children: CPU time over wall-clock time."""
    other_cores: float | None = Field(default=None, ge=0)
    """Cores used by other processes."""
    stolen_cores: float | None = Field(default=None, ge=0)
    """Cores that the hypervisor gave to other virtual machines while this one had work for them."""
    cpu_pressure: float | None = Field(default=None, ge=0)
    """Share of the time in which some process waited for a core (PSI, ``some``)."""
    load_average: float | None = Field(default=None, ge=0)
    """Runnable processes, mean of the last minute before the end."""
    throttled: float | None = Field(default=None, ge=0)
    """Share of the time in which the CPU limit of the control group stopped this process."""
    thermal_throttles: int | None = Field(default=None, ge=0)
    """Number of times that cores were slowed down because they were hot."""
    gpu_processes: int | None = Field(default=None, ge=0)
    """Other processes with a context on the GPU."""
    gpu_throttle_reasons: tuple[str, ...] = ()
    """Why the GPU ran below its clock: ``power``, ``heat``, ``hardware``."""

    @property
    def is_busy(self) -> bool:
        """Whether other processes or throttling slow this machine down noticeably.

        Pressure counts only where the cores used by others are unknown, because threads of this process cause it too.
        """
        taken = None if self.other_cores is None else self.other_cores + (self.stolen_cores or 0.0)
        if taken is None:
            lacks_cores = (self.cpu_pressure or 0.0) > IDLE_PRESSURE
        else:
            lacks_cores = taken > max(IDLE_CORES, IDLE_SHARE * self.num_cores)
        is_throttled = (self.throttled or 0.0) > IDLE_THROTTLED or self.thermal_throttles or self.gpu_throttle_reasons
        return bool(lacks_cores or is_throttled or self.gpu_processes)

    def describe(self, during: str) -> str:
        """One line: ``other processes used 0.6 of 2 cores while steps were timed; CPU pressure 31 %``.

        Args:
            during: what was done meanwhile, for example "while steps were timed".
        """
        cores = "an unknown number" if self.other_cores is None else f"{self.other_cores:.1f}"
        further = {
            f"other virtual machines took {self.stolen_cores or 0.0:.1f} cores": (self.stolen_cores or 0.0) >= 0.05,
            f"CPU pressure {100 * (self.cpu_pressure or 0.0):.0f} %": self.cpu_pressure is not None,
            f"stopped by the CPU limit for {100 * (self.throttled or 0.0):.0f} % of the time": self.throttled,
            f"times that cores were slowed down by heat: {self.thermal_throttles}": self.thermal_throttles,
            f"other processes on the GPU: {self.gpu_processes}": self.gpu_processes,
            f"GPU slowed down by {' and '.join(self.gpu_throttle_reasons)}": self.gpu_throttle_reasons,
        }
        parts = [text for text, applies in further.items() if applies]
        return "; ".join([f"other processes used {cores} of {self.num_cores} cores {during}", *parts])
