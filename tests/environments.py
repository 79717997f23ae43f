"""The environment of the processes that tests start."""

import os

STEERING = ("CUDNN_TARGET", "CUDNN_NOTEBOOKS", "PYTHONPATH", "PYTEST_ADDOPTS")


def without_gpu(**changes):
    """This process's environment without a GPU and without the variables STEERING, plus `changes`, as texts."""
    kept = {key: value for key, value in os.environ.items() if key not in STEERING}
    return kept | {"CUDA_VISIBLE_DEVICES": ""} | {key: str(value) for key, value in changes.items()}
