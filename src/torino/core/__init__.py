"""Core data structures and algorithms: tokens, concepts, grouping, reductions and top-k search."""
