"""The same bits again from the same layout, also on a GPU."""

import os

import torch


def make_deterministic() -> None:
    """Take kernels whose sums have one order, slower or not; an operation that has none raises RuntimeError.

    Before the first matmul on a device: cuBLAS reads its workspace's size when it starts
    (https://docs.nvidia.com/cuda/cublas, "Results reproducibility").
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
