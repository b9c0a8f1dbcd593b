"""A small trained vision-language model with its SAE, and nine small benchmarks, for torino."""
