"""Plugs into engines: each translates an engine's metadata to ``Batch``, and nothing more."""
