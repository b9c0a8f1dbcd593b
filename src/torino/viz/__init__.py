"""Drawings of reductions, as images and in the terminal."""
