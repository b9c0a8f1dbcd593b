"""A small trained vision-language model with its SAE, and ten small benchmarks, for torino."""
