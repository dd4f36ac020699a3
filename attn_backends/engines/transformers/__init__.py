"""The plug into Hugging Face transformers.

``enable()`` registers an attention function and the mask function that goes with it; a model then
takes the library by name. Nothing here imports transformers before ``enable`` is called.
"""

from __future__ import annotations

from .lse import capture_lse
from .registration import Handle, enable

__all__ = ["Handle", "capture_lse", "enable"]
