"""``python -m attn_backends``: the command line, where its script is not installed."""

from __future__ import annotations

from .cli.app import main

if __name__ == "__main__":
    main()
