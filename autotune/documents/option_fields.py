"""Settings models: fields with descriptions from which the command line makes options and studies their command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from autotune.errors import UserError
from autotune.files import describe

Settings = TypeVar("Settings", bound=BaseModel)


def setting(
    default: Any,
    description: str,
    *,
    option: str | None = "",
    unit: str | None = None,
    rare: bool = False,
    **limits: Any,
) -> Any:
    """A field with its help text.

    Args:
        default: the field's default value.
        description: one sentence; the option's help.
        option: the option's name if it is not the field's; None if the command line has no option for it.
        unit: ``"s"`` for a duration, ``"fraction"`` for a percentage.
        rare: whether the command line's help names the option without describing it.
        limits: constraints on the value, as ``pydantic.Field`` takes them.
    """
    return Field(
        default, description=description, json_schema_extra={"option": option, "unit": unit, "rare": rare}, **limits
    )


def extra_of(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def option_name(name: str, field: FieldInfo) -> str | None:
    """The option of a field without its dashes, or None if there is none."""
    option = extra_of(field).get("option", "")
    return None if option is None else str(option or name.replace("_", "-"))


def make_settings(model: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Settings from values by field name.

    Raises:
        UserError: a value out of its range; the message names the option.
    """
    try:
        return model(**values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        option = option_name(name, model.model_fields[name])
        raise UserError(f"--{describe(error, model).replace(name, str(option), 1)}") from None
