"""Declares the two operators that torchvision wants to describe while it is imported.

Its compiled half, which declares them, needs CUDA's libraries and does not load on a CPU. SGLang and transformers
import its Python half only, which fails for want of the two names. To be imported first, in every process that imports
either.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")  # kept: what is declared goes with it
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
