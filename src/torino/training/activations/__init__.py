"""Activations to train on: rows in memory, cached on disk, or streamed from a tower."""
