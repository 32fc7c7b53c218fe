"""Makes torchvision importable with torch for the CPU: the index has it for CUDA only, and its compiled operators do not load."""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
