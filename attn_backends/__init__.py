"""Attention backends that all answer the same question in the same form: ``(O, LSE)``."""
