"""Models by a short name, for commands that measure: their attention shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInputError
from .roofline import MODELS, ModelShape


@dataclass(frozen=True)
class Preset:
    """What a model's attention is measured as.

    Attributes:
        model: Shapes over a KV cache, in decode and extend.
        prefill: Shapes of a prefill without a cache, where they are others (MLA, expanded).
        page_size: Tokens per page.
    """

    model: ModelShape
    prefill: ModelShape
    page_size: int = 16

    @property
    def is_mla(self) -> bool:
        """Whether values are lanes of the keys."""
        return self.model.v_in_k


#: Short names; every model of the roofline table is a preset under its own name too.
SHORT = {
    "llama3-8b": "llama3-8b",
    "llama3-70b": "llama3-70b",
    "qwen": "qwen2.5-7b",
    "gemma": "gemma3-12b",
    "deepseek": "deepseek-v3-mla",
}
DEFAULT = "llama3-8b"


def preset(name: str) -> Preset:
    """A preset by its short name or the model's.

    Raises:
        InvalidInputError: There is none of that name.
    """
    model = MODELS.get(SHORT.get(name, name))
    if model is None:
        others = [m for m in MODELS if m not in SHORT]
        raise InvalidInputError.of("preset", repr(name), ", ".join([*SHORT, *others]))
    if model.v_in_k:
        return Preset(model, MODELS["deepseek-v3-mha"], page_size=64)
    return Preset(model, model)


__all__ = ["DEFAULT", "SHORT", "Preset", "preset"]
