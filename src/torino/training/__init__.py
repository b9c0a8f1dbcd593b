"""Training SAEs: activations of a tower in, a plain SAE folder out. Nothing of it is needed at inference."""
