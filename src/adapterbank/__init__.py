"""adapterbank: one frozen Transformer encoder that learns any number of language tasks."""

__version__ = "0.1.0"
