"""Declare torchvision's operators where its compiled part cannot be loaded, so that ``import torchvision`` works.

PyPI has torchvision only as a CUDA build. Beside a CPU build of torch its library does not load, and the import fails
at the operators it should have registered. vLLM imports torchvision but never calls them. ``make vllm-test`` installs
this module and a ``.pth`` file that imports it at start-up; torch is imported only when torchvision is.
"""

import sys
from importlib.abc import MetaPathFinder

OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class _DeclareOperators(MetaPathFinder):
    """Find nothing; declare the operators when torchvision is first looked for."""

    def find_spec(self, fullname, path=None, target=None):
        """Return None, so that the next finder loads the module."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name, schema in OPERATORS.items():
                torch.library.define(name, schema)


sys.meta_path.insert(0, _DeclareOperators())
