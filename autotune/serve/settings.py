"""Settings of ``autotune serve``. Each field with a description is an option of the command line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from autotune.documents.option_fields import setting


class ServeSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = setting("127.0.0.1", "Address to listen at. One that other machines can reach needs a key.")
    port: int = setting(8000, "Port; 0: a free one.", ge=0, le=65535)
    model_name: str | None = setting(None, "Name of the model in requests; default: the profile's target.")
    max_waiting: int = setting(32, "Requests that may wait; others are told to come back.", ge=0)
    max_model_len: int | None = setting(
        None, "Longest prompt and answer together, in tokens; default: the target's context.", ge=2
    )
    drain_s: float = setting(
        30.0, "After SIGTERM, SIGHUP or Ctrl-C: time to finish what was accepted.", option="drain", unit="s", ge=0
    )
    api_key: str | None = Field(default=None, min_length=1)
