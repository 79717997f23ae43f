"""The recorded devices: real kernels are compiled for each of them without a GPU (CASES: no-gpu, capability).

Run as a program, this file builds the graphs below for every recorded device and prints one JSON object.
"""

import importlib
import json
import shutil
import sys
from pathlib import Path

import cudnn
import pytest
import torch

from helpers import GraphError, build, describe, new_graph

targets = importlib.import_module("helpers.target")
graphs = importlib.import_module("helpers.graph")
KEYS = targets.recorded_devices()
RUNTIME = "RUNTIME_COMPILATION"


# --- the graphs -------------------------------------------------------------------------------------------------------


def conv_bias_relu(dtype):
    """Y = relu(conv(X, W) + bias), X (2,16,8,10), W (32,16,3,3)."""
    graph = new_graph("conv_bias_relu", io=dtype)
    x, w = (torch.empty(dims, dtype=dtype) for dims in ((2, 16, 8, 10), (32, 16, 3, 3)))
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    X, W, B = (describe(graph, t, name) for t, name in ((x, "X"), (w, "W"), (torch.empty(32, dtype=dtype), "bias")))
    graph.relu(graph.bias(graph.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), B)).set_output(True)
    return graph


def matmul_bias_relu(dtype, amax=False):
    """Y = relu(A @ B + bias), A (1,64,96), B (1,96,128); with its largest magnitude as a second output."""
    graph = new_graph("matmul_bias_relu", io=dtype)
    a, b, bias = (torch.empty(dims, dtype=dtype) for dims in ((1, 64, 96), (1, 96, 128), (1, 1, 128)))
    A, B, C = (describe(graph, t, name) for t, name in ((a, "A"), (b, "B"), (bias, "bias")))
    Y = graph.relu(graph.bias(graph.matmul(A, B), C)).set_output(True)
    if amax:
        M = graph.reduction(Y, mode=cudnn.reduction_mode.AMAX).set_output(True)
        M.set_data_type(cudnn.data_type.FLOAT).set_dim([1, 1, 1]).set_stride([1, 1, 1])
    return graph


def fp8_matmul():
    """Y = A @ B, both e4m3, B stored by columns."""
    graph = new_graph("fp8_matmul", io=torch.bfloat16)
    a, b = (torch.empty(1, rows, 96, dtype=torch.float8_e4m3fn) for rows in (64, 128))
    graph.matmul(describe(graph, a, "A"), describe(graph, b.transpose(1, 2), "B")).set_output(True)
    return graph


def outcome(make):
    """What building gives: {"plan": name, "notes": [...]} or {"refused": message}."""
    try:
        plan = build(make())
    except GraphError as error:
        return {"refused": str(error)}
    return {"plan": plan.name, "notes": [note.name for note in plan.notes]}


def build_for(target):
    """The outcome of each graph for a recorded target."""
    graphs.target = target
    return {
        "sm": target.sm,
        "dtype": str(target.dtype),
        "conv": outcome(lambda: conv_bias_relu(target.dtype)),
        "matmul": outcome(lambda: matmul_bias_relu(target.dtype)),
        "matmul_amax": outcome(lambda: matmul_bias_relu(target.dtype, amax=True)),
        "bf16": outcome(lambda: conv_bias_relu(torch.bfloat16)),
        "fp8": outcome(fp8_matmul),
    }


if __name__ == "__main__":
    print(json.dumps({key: build_for(targets.Target.recorded(key)) for key in sys.argv[1:]}))
    sys.exit()


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(python):
    """The outcomes by device: one process builds for all of them."""
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    result = python(code, __file__, *KEYS)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def recorded(key):
    return json.loads((targets.DEVICES / f"{key}.json").read_text())


def test_there_are_devices():
    assert {"t4", "a100", "l4", "h100", "h200", "b200", "rtx5090"} <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_device_file(key):
    """Each file says where its values come from and has the same properties as the others."""
    record = recorded(key)
    assert set(record) == {"source", "properties"}
    assert len(record["source"]) > 20
    assert record["properties"].keys() == recorded(targets.DEFAULT_DEVICE)["properties"].keys()
    assert record["properties"]["deviceName"]
    assert all(
        type(value) is type(recorded("h200")["properties"][name]) for name, value in record["properties"].items()
    )


@pytest.mark.parametrize("key", KEYS)
def test_no_gpu_kernels_are_compiled(built, key):
    """no-gpu: the working dtype's fused conv and matmuls are built, the matmuls by run-time compilation."""
    found = built[key]
    assert found["sm"] == recorded(key)["properties"]["deviceVer"] // 10
    assert found["dtype"] == ("torch.float16" if key == "t4" else "torch.bfloat16")
    assert "plan" in found["conv"], found["conv"]
    for name in ("matmul", "matmul_amax"):
        assert RUNTIME in found[name].get("notes", ()), found[name]


@pytest.mark.parametrize("key", KEYS)
def test_capability_fp8_and_bf16(built, key):
    """capability: bf16 is built from SM80 on, FP8 from SM89 on; elsewhere the error names the target."""
    name = recorded(key)["properties"]["deviceName"]
    for kind, first in (("bf16", 80), ("fp8", 89)):
        found = built[key][kind]
        if built[key]["sm"] >= first:
            assert "plan" in found, found
        else:
            assert f"for {name} (SM{built[key]['sm']})" in found["refused"]
            assert "  next: " in found["refused"]


def test_capability_target_by_environment(python):
    """capability: CUDNN_TARGET picks the device of a whole process."""
    code = """
import test_devices as t
from helpers import target
print(target.name, target.dtype, t.outcome(lambda: t.matmul_bias_relu(target.dtype))["notes"])
print(t.outcome(lambda: t.conv_bias_relu(t.torch.bfloat16))["refused"].splitlines()[0])
"""
    result = python(code, CUDNN_TARGET="T4", PYTHONPATH=Path(__file__).parent)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("Tesla T4 torch.float16")
    assert RUNTIME in first
    assert second.startswith("graph 'conv_bias_relu' failed at step 'create_execution_plans' for Tesla T4 (SM75)")


def test_adding_a_file_adds_a_device(tmp_path, monkeypatch):
    """A JSON file in the folder is all that a new device takes."""
    shutil.copytree(targets.DEVICES, tmp_path, dirs_exist_ok=True)
    record = recorded("l4")
    record["properties"]["deviceName"] = "NVIDIA L40S"
    (tmp_path / "l40s.json").write_text(json.dumps(record))
    monkeypatch.setattr(targets, "DEVICES", tmp_path)
    assert targets.recorded_devices() == sorted([*KEYS, "l40s"])
    assert targets.Target.recorded("l40s").name == "NVIDIA L40S"
    with pytest.raises(ImportError, match="l40s"):
        targets.Target.recorded("unknown")
