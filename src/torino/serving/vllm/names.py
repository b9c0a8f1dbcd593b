"""Names of models in vLLM. Imports nothing, because every process of vLLM reads it at start-up."""

from __future__ import annotations

SETTINGS, RESOLVED = "torino", "torino_resolved"
"""Attributes of a model's config that hold the settings and what follows from them."""

VARIABLE = "TORINO_VLLM"
"""Environment variable with the settings as JSON."""

ARCHITECTURES = {
    "llava": ("LlavaForConditionalGeneration", "TorinoLlavaForConditionalGeneration"),
    "llava_next": ("LlavaNextForConditionalGeneration", "TorinoLlavaNextForConditionalGeneration"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "TorinoQwen2VLForConditionalGeneration"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "TorinoQwen2_5_VLForConditionalGeneration"),
}
"""For each family, vLLM's name of the model and the name of the class that extends it."""

CLASSES = {
    "TorinoLlavaForConditionalGeneration": "torino.serving.vllm.models.llava:ReducedLlava",
    "TorinoLlavaNextForConditionalGeneration": "torino.serving.vllm.models.llava_next:ReducedLlavaNext",
    "TorinoQwen2VLForConditionalGeneration": "torino.serving.vllm.models.qwen:ReducedQwen2VL",
    "TorinoQwen2_5_VLForConditionalGeneration": "torino.serving.vllm.models.qwen:ReducedQwen25VL",
}
"""Module and class of each name, imported on first use."""
