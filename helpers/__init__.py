"""What the notebooks share: the target, building and running graphs, the reference, timing, pictures, %%needs.

from helpers import bench, build, describe, draw_graph, new_graph, target
"""

from . import target as _target  # first: it stops with a clear sentence where torch or cuDNN can't be used
from . import bench, fp8, libcudnn, needs, plots, reference
from .draw import draw_graph
from .graph import AUTO, GraphError, Plan, build, describe, new_graph, scalar
from .autotune import autotune, replay
from .cuda_graph import CapturedGraph, CaptureError, capture
from .libcudnn import SetupError
from .plan_pool import PlanPool, kernels
from .plan_store import PlanStore
from .process import in_new_process

target = _target.target
needs.register()

__all__ = [
    "AUTO",
    "CaptureError",
    "CapturedGraph",
    "GraphError",
    "Plan",
    "PlanPool",
    "PlanStore",
    "SetupError",
    "autotune",
    "bench",
    "build",
    "capture",
    "describe",
    "draw_graph",
    "fp8",
    "in_new_process",
    "kernels",
    "libcudnn",
    "new_graph",
    "plots",
    "reference",
    "replay",
    "scalar",
    "target",
]
