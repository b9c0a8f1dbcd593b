"""A plug-in for vLLM: serve vision-language models with reduced visual tokens.

vLLM finds it through the entry point group ``vllm.general_plugins``. Without settings it changes nothing. With settings
(``--hf-overrides '{"torino": {...}}'`` or the environment variable ``TORINO_VLLM``), models of the supported families
run with the tokens that a reducer keeps. Only the modules in :mod:`torino.serving.vllm.models` import vLLM.
"""
