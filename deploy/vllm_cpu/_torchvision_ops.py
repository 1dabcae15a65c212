"""Lets `import torchvision` work beside a CPU build of torch.

PyPI's torchvision is built for CUDA and cannot load its own library. Its Python files then decorate
operators that nobody has defined. They are defined here, without an implementation (no model needs
them), in every Python process of the environment and not before somebody imports torchvision.
`make` copies this file and its .pth into the environment.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            # undefined again when collected
            BeforeTorchvision.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator + SIGNATURE)
        return None


sys.meta_path.insert(0, BeforeTorchvision())
