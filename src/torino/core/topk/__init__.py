"""Top-k search over latents: exact search and int8 prefilter."""
