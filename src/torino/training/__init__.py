"""Train SAEs on the activations of a vision tower; nothing in this package is needed for inference."""
