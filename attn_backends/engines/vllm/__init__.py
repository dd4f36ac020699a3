"""The plug into vLLM: an attention backend that any of the library's backends can stand behind.

Installing the library is enough: vLLM finds ``register`` through its entry-point group
``vllm.general_plugins``, and ``--attention-backend`` selects what it registered. Nothing of vLLM
is imported before ``register`` is called, and no kernel before a model asks for the backend.
"""

from __future__ import annotations

from .registration import backend_name, register

__all__ = ["backend_name", "register"]
