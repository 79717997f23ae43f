"""The target: what is detected, what gates go by (CASES: capability), and the cuDNN handle."""

import json
import threading

import cudnn
import pytest
import torch

from helpers import SetupError, build, describe, new_graph, target


@pytest.fixture
def targets(module):
    return module("target")


def hand_made(targets, sm, live=False):
    return targets.Target(live, f"a GPU of SM{sm}", sm, {"deviceVer": 10 * sm})


# --- gates go by compute capability -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "sm", "dtype"),
    [
        ("t4", 75, torch.float16),
        ("a100", 80, torch.bfloat16),
        ("l4", 89, torch.bfloat16),
        ("h100", 90, torch.bfloat16),
        ("b200", 100, torch.bfloat16),
    ],
)
def test_capability_recorded_target(targets, monkeypatch, key, sm, dtype):
    """capability: 7.5, 8.0, 8.9, 9.0 and 10.0 have their SM and working dtype, whatever torch claims about bf16."""
    for claim in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, claim=claim, **__: claim)
        recorded = targets.Target.recorded(key)
        assert (recorded.live, recorded.sm, recorded.dtype) == (False, sm, dtype)
        assert recorded.device == torch.device("cpu")


@pytest.mark.parametrize("sm", [75, 80, 89, 90, 100])
@pytest.mark.parametrize("need", [75, 80, 89, 90, 100, 120])
def test_capability_gate(targets, sm, need):
    """capability: a gate is open exactly from its own compute capability on, and says needs and found."""
    text = hand_made(targets, sm).lacks(f"sm{need}")
    assert text == ("" if sm >= need else f"needs SM{need}, found SM{sm} (a GPU of SM{sm})")


def test_capability_gate_names_the_gpu(targets):
    """capability: the words of the table, for a T4."""
    t4 = targets.Target.recorded("t4")
    assert t4.lacks("sm80") == "needs SM80, found SM75 (Tesla T4)"
    assert t4.lacks("sm75") == ""
    assert t4.lacks() == ""


def test_capability_gate_for_a_gpu(targets):
    """capability: a recorded target lacks a GPU, a live one does not; two lacking things are both named."""
    recorded = targets.Target.recorded("l4")
    assert recorded.lacks("gpu") == "needs a GPU, found none (graphs are built for the recorded NVIDIA L4)"
    assert recorded.lacks("gpu", "sm90") == recorded.lacks("gpu") + "; needs SM90, found SM89 (NVIDIA L4)"
    assert hand_made(targets, 89, live=True).lacks("gpu", "sm89") == ""
    assert hand_made(targets, 75, live=True).lacks("gpu", "sm80") == "needs SM80, found SM75 (a GPU of SM75)"


@pytest.mark.parametrize("installed", [91900, 92099, 92100, 92101, 92800, 100000])
def test_release_gate(targets, monkeypatch, installed):
    """capability: a gate for a release of cuDNN is open from that release on, patch releases included."""
    monkeypatch.setattr(targets.cudnn, "backend_version", lambda: installed)
    monkeypatch.setattr(targets.cudnn, "backend_version_string", lambda: "9.x.y")
    h200 = targets.Target.recorded("h200")
    assert h200.lacks("cudnn9.21") == ("" if installed >= 92100 else "needs cuDNN 9.21, found 9.x.y")
    assert h200.lacks("sm80", "cudnn9.5") == ""
    assert h200.lacks("gpu", "cudnn11.0") == h200.lacks("gpu") + "; needs cuDNN 11.0, found 9.x.y"


@pytest.mark.parametrize("word", ["GPU", "sm", "sm8", "sm8.0", "sm80+", "SM80", "fp8", "", "sm80,"])
def test_capability_unknown_requirement(targets, word):
    """capability: a requirement that nobody checks would let a cell run anywhere, so it raises."""
    with pytest.raises(ValueError, match=r"unknown requirement .*'gpu' or 'sm' and a number") as caught:
        targets.Target.recorded("h200").lacks("gpu", word)
    assert repr(word) in str(caught.value)


@pytest.mark.parametrize("word", ["cudnn", "cudnn9", "cudnn9.21.0", "cudnn>9.21", "cuDNN9.21"])
def test_unknown_release(targets, word):
    with pytest.raises(ValueError, match=r"unknown requirement .* or 'cudnn9\.21'"):
        targets.Target.recorded("h200").lacks(word)


# --- detection --------------------------------------------------------------------------------------------------------


def without_gpu(monkeypatch, key):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if key is None:
        monkeypatch.delenv("CUDNN_TARGET", raising=False)
    else:
        monkeypatch.setenv("CUDNN_TARGET", key)


@pytest.mark.parametrize(("key", "name"), [(None, "NVIDIA H200"), ("", "NVIDIA H200"), (" T4 ", "Tesla T4")])
def test_capability_detect_without_gpu(targets, monkeypatch, key, name):
    """capability: CUDNN_TARGET picks the recorded device, in any case of letters; the H200 where it is not set."""
    without_gpu(monkeypatch, key)
    found = targets.Target.detect()
    assert (found.live, found.name) == (False, name)


def test_capability_unknown_target(targets, monkeypatch):
    """capability: an unknown CUDNN_TARGET is refused with the names that there are."""
    without_gpu(monkeypatch, "v100")
    with pytest.raises(SetupError) as caught:
        targets.Target.detect()
    assert "CUDNN_TARGET=v100" in str(caught.value)
    assert all(key in str(caught.value) for key in targets.recorded_devices())


def test_a_recorded_device_by_its_file(targets, monkeypatch, tmp_path):
    """A path is taken as it is written, capitals included; its device need not be among ours."""
    path = tmp_path / "My GPU.json"
    path.write_text(json.dumps({"properties": {"deviceName": "NVIDIA Another", "deviceVer": 1030}}))
    without_gpu(monkeypatch, f" {path} ")
    found = targets.Target.detect()
    assert (found.live, found.name, found.sm) == (False, "NVIDIA Another", 103)
    assert targets.Target.recorded(targets.DEVICES / "t4.json") == targets.Target.recorded("T4")


@pytest.mark.parametrize("content", [None, "", "[]", "null", "{}", '{"properties": {}}', '{"properties": null}'])
def test_a_file_that_records_no_device(targets, tmp_path, content):
    path = tmp_path / "gpu.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        SetupError, match=r'no such recorded device; |not a JSON object with the "properties"'
    ) as caught:
        targets.Target.recorded(path)
    assert f"CUDNN_TARGET={path}: " in str(caught.value) and "\n" not in str(caught.value)


def test_capability_target_beside_a_visible_gpu(targets, monkeypatch):
    """capability: with a visible GPU, cuDNN's answers for another device would be wrong, so CUDNN_TARGET is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDNN_TARGET", "a100")
    with pytest.raises(SetupError, match="CUDNN_TARGET=a100") as caught:
        targets.Target.detect()
    assert "CUDA_VISIBLE_DEVICES=''" in str(caught.value)
    assert "unset CUDNN_TARGET" in str(caught.value)


def test_no_gpu_report(targets, monkeypatch):
    """no-gpu: one line says what is shown, what is not, and which versions and files are in use."""
    report = targets.Target.recorded("h200").report()
    assert "\n" not in report
    for part in (
        "No GPU; recorded target: NVIDIA H200 (SM90)",
        "plans are compiled by cuDNN",
        "results come from the CPU reference",
        "nothing is timed",
        f"torch {torch.__version__}",
        f"cudnn-frontend {cudnn.__version__}",
        "cuDNN " + cudnn.backend_version_string(),
        "libcudnn.so",
    ):
        assert part in report
    assert "run-time compilation is off" not in report
    monkeypatch.setattr(targets, "DRIVER", "no C compiler was found: install gcc")
    assert "run-time compilation is off: no C compiler was found: install gcc" in targets.Target.recorded("t4").report()


def test_no_gpu_graph_arguments(targets):
    """no-gpu: a recorded target gives its properties and SM instead of a handle, and parses them once."""
    recorded = targets.Target.recorded("b200")
    first, second = recorded.graph_arguments(), recorded.graph_arguments()
    assert first["sm_version"] == 100
    assert first["device_property"] is second["device_property"]
    assert json.loads(first["device_property"].serialize())["deviceName"] == "NVIDIA B200"
    assert recorded.handle() is None


# --- with a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_live_target():
    """The detected target is the current GPU; its report has the driver's version."""
    assert target.device.type == "cuda"
    assert target.sm == 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    assert target.properties["deviceName"] == target.name == torch.cuda.get_device_name()
    assert f"GPU: {target.name} (SM{target.sm}) · driver " in target.report()


@pytest.mark.gpu
def test_handle_follows_the_stream():
    """The handle is the thread's own and is set to PyTorch's current stream each time it is asked for."""
    side = torch.cuda.Stream()
    handle = target.handle()
    assert cudnn.get_stream(handle) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(side):
        assert target.handle() is handle
        assert cudnn.get_stream(handle) == side.cuda_stream
    assert cudnn.get_stream(target.handle()) == torch.cuda.current_stream().cuda_stream

    others = []
    thread = threading.Thread(target=lambda: others.append(target.handle()))
    thread.start()
    thread.join()
    assert others[0] is not handle


@pytest.mark.gpu
def test_plan_runs_on_a_side_stream():
    """A plan launches on the stream that is current at the call: it waits for that stream's work and no other's."""
    graph = new_graph("side_stream")
    a, b = (torch.ones(1, n, m, device=target.device, dtype=target.dtype) for n, m in ((64, 96), (96, 128)))
    y = graph.matmul(describe(graph, a, "A"), describe(graph, b, "B")).set_output(True)
    out = torch.zeros(1, 64, 128, device=target.device, dtype=target.dtype)
    run = build(graph).bind({"A": a, "B": b, y: out})
    run()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(side):
        torch.cuda._sleep(int(50 * target.properties["smClockRateKHz"]))  # 50 ms
        a.fill_(2)
        run()
        finished = side.record_event()
    assert not finished.query()  # still waiting behind the sleeping kernel
    torch.cuda.current_stream().synchronize()  # the default stream has nothing to do with it
    assert not finished.query()
    finished.synchronize()
    assert torch.equal(out, torch.full_like(out, 2 * 96))
