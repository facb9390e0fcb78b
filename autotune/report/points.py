"""The arms of a profile's evaluation, and the shares of heads in words."""

from __future__ import annotations

from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile, Gain
from autotune.documents.subnet import Subnet


def heads_label(subnet: Subnet) -> str:
    """Share of heads kept: ``75 %``, or ``100 % / 50 % / 50 %`` if the blocks differ."""
    shares = subnet.head_shares
    return " / ".join(f"{100 * share:g} %" for share in (shares[:1] if len(set(shares)) == 1 else shares))


class EvaluationArms:
    """The arms of a profile's evaluation on held-out prompts, by role."""

    def __init__(self, profile: DecodingProfile) -> None:
        arms = {arm.name: arm for arm in profile.evidence.compared}
        self.plain, self.tuned = arms.get(AR), arms.get(TUNED)
        self.defaults = [arm for name, arm in arms.items() if name not in (AR, HF, TUNED)]
        fastest = max(self.defaults, key=lambda arm: arm.speedup, default=None)
        self.best_default = arms.get(profile.evidence.best_default or "", fastest)
        is_plain = profile.point.tree is None and not getattr(profile.point.deployment, "speculation", None)
        self.profile = self.plain if is_plain else self.tuned
        """The arm that the profile decodes with: the tuned one, or plain decoding if nothing was faster."""
        self.gains: dict[str, dict[str, Gain]] = {}
        """Gains of tuning by task, then by the other arm."""
        for gain in profile.evidence.gains:
            self.gains.setdefault(gain.task, {})[gain.over] = gain
