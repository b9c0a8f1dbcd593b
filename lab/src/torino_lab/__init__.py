"""The lab: a small, real vision-language model and its SAEs, so that everything can be tried and measured anywhere."""
