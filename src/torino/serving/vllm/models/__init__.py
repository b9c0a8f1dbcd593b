"""Models of vLLM with reduced visual tokens. The only modules that import vLLM."""
