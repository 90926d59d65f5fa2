"""Exact lean caches for architectures of transformers: the same weights and logits, fewer bytes or less work a token.

One small file an architecture, one line in `table.ADAPTERS`; what they share is in `core`, `slim` and `layers`.
"""
