"""Serve models with reduced tokens, and reduce large collections of images."""
