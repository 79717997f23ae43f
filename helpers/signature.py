"""What decides whether a built plan may be loaded again: the graph's signature and the environment."""

import dataclasses
import hashlib
import json
import numbers
import platform
from collections.abc import Mapping

import cudnn
import torch

from .dtypes import to_cudnn
from .target import driver_version, target

NO_DRIVER = "none (built without a GPU)"
# Properties in which two cards of one kind may differ, and those that `environment` has under another name.
NOT_COMPARED = {"pciDeviceId", "cudaDeviceId", "isTccDriver", "totalGlobalMem", "smClockRateKHz", "memClockRateKHz"}
NOT_COMPARED |= {"driverVer", "deviceName", "deviceVer"}
# Names are labels (a buffer is bound by uid), and known dims count the same whether they were given or inferred.
LABELS = {"name", "owner", "uid_assigned", "dim_assigned", "stride_assigned"}
NO_OPTIONS = {"name", "handle", "kernel_cache", "device_property", "sm_version"}  # the last two are in `environment`


def environment():
    """{what: value} of everything outside the graph that decides whether a plan may be loaded again."""
    properties = {key: value for key, value in target.properties.items() if key not in NOT_COMPARED}
    return {
        "GPU": target.name,
        "SM": target.sm,
        "cuDNN": cudnn.backend_version_string(),
        "frontend": cudnn.__version__,
        "CUDA": torch.version.cuda,
        "driver": driver_version() if target.live else NO_DRIVER,
        "CPU": platform.machine(),
    } | properties


def difference(then, now, ahead_of_time):
    """'cuDNN 9.19.0 then, 9.24.0 now', or "" where nothing differs.

    ahead_of_time  take a plan that was built without a GPU: it knows no driver, and its recorded device may have
                   properties that this cuDNN does not report.
    """
    keys = [key for key in {**now, **then} if then.get(key) != now.get(key)]
    if ahead_of_time and then.get("driver") == NO_DRIVER:
        keys = [key for key in keys if key in then and key in now and key != "driver"]
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return "; ".join(f"{key} {then.get(key)} then, {now.get(key)} now" for key in keys[:3]) + more


def graph_signature(graph):
    """sha256, in hex, of what a described or built graph computes: operations and their attributes, tensors with dims,
    strides, dtypes and uids, graph options. Names are left out.

    The graph is validated and lowered, so that inferred dims and strides are known (0.1 to 0.5 ms; 5 ms with dynamic
    shapes). Raises what cuDNN raises for a wrong graph, TypeError for an attribute such as a function.
    """
    graph.build_operation_graph()
    content = {
        "nodes": [[n.node_type.name, n.compute_data_type, n.params, n.inputs, n.outputs] for n in graph.nodes],
        "tensors": {
            uid: {f.name: getattr(tensor, f.name) for f in dataclasses.fields(tensor) if f.name not in LABELS}
            for uid, tensor in graph._tensor_by_uid.items()  # graph.tensors lacks those that share a name
        },
        "context": vars(graph.context),
        "options": {key: value for key, value in graph._cpp_graph_kwargs.items() if key not in NO_OPTIONS},
        "replay_expected": graph.is_cuda_graph_replay_expected,
    }
    return hashlib.sha256(canonical(content)).hexdigest()


def canonical(value):
    """`value` as bytes of JSON, the same in every process. Raises TypeError for what has no such form."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":")).encode()


def _plain(value):
    """`value` in JSON's types, the same in every process: tensors by uid, enumerators by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, cudnn.Tensor):
        return {"uid": value.uid}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        value = to_cudnn(value)
    if hasattr(type(value), "__members__"):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, numbers.Real):  # of NumPy, where Python has the same number
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(f"an attribute of type {type(value).__name__} can't be compared later")
