"""Adapters: how each model family encodes images and receives reduced tokens."""
