"""The configuration with the environment filled in, as a pydantic-settings model."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .config import AttentionConfig, environment_config


class _Environment(PydanticBaseSettingsSource):
    """The same reading of ``ATTN_BACKENDS_*`` that selection uses."""

    def __init__(self, settings_cls: type[BaseSettings], given: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._given = given

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("all fields are read together")

    def __call__(self) -> dict[str, Any]:
        values = environment_config().model_dump(exclude_none=True, exclude_defaults=True)
        if "backend" in self._given:  # an argument goes before both phases' variables
            values = {k: v for k, v in values.items() if k not in ("prefill", "decode")}
        return values


class AttentionSettings(BaseSettings, AttentionConfig):
    """``AttentionConfig`` whose fields default to ``ATTN_BACKENDS_*`` of the moment it is made.

    Arguments go before single variables, those before the file that ``ATTN_BACKENDS_CONFIG``
    names. ``select`` reads the environment by itself; this model is for programs that want
    to look at it, store it, or pass it on.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", strict=True, env_prefix="ATTN_BACKENDS_"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment as the rest of the library reads it."""
        return init_settings, _Environment(settings_cls, getattr(init_settings, "init_kwargs", {}))


__all__ = ["AttentionSettings"]
