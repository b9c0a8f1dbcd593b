"""The version, on its own so that building the package need not import torch."""

__version__ = "0.1.0"
