"""Reproduce a table of the paper: recipes, estimates, downloads, and the comparison with the printed figures."""
