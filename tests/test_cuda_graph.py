"""Capturing CUDA graphs (CASES: cold-capture, stale-inputs)."""

import contextlib
import dataclasses
import gc
import warnings

import cudnn
import pytest
import torch

from helpers import CaptureError, GraphError, Plan, bench, build, capture, describe, new_graph, target


def random(*dims, dtype=None, seed=0):
    values = torch.randn(*dims, generator=torch.Generator().manual_seed(seed))
    return values.to(target.device, dtype or target.dtype)


def matmul(a, b):
    """A graph of A @ B, not built."""
    graph = new_graph("matmul")
    graph.matmul(describe(graph, a, "A"), describe(graph, b, "B")).set_output(True).set_name("Y")
    return graph


class Product:
    """A plan of A (2,24,40) @ B (2,40,56) with tensors."""

    def __init__(self):
        self.a, self.b = random(2, 24, 40), random(2, 40, 56, seed=1)
        self.plan = build(matmul(self.a, self.b))
        self.tensors = {"A": self.a, "B": self.b, "Y": torch.empty(2, 24, 56, device=target.device, dtype=target.dtype)}

    def check(self, y, a=None, b=None):
        a, b = (default if given is None else given for given, default in ((a, self.a), (b, self.b)))
        expected = (a.float() @ b.float()).to(y.dtype)
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)  # bf16 keeps 8 bits; sums of 40 products

    def plain_call_works(self):
        self.tensors["Y"].fill_(float("nan"))
        self.plan.run(self.tensors)
        self.check(self.tensors["Y"])
        assert torch.isfinite(torch.randn(5, device=target.device)).all()  # the generator works as well


@pytest.fixture(scope="module")
def product():
    return Product()


@pytest.fixture(scope="module")
def captured(product):
    return capture(product.plan, {"A": product.a, "B": product.b})


# --- capture and replay -----------------------------------------------------------------------------------------------


def test_a_plan_is_captured_with_the_values_of_the_examples(product):
    captured = capture(product.plan, {"A": product.a, "B": product.b})
    product.check(captured.outputs)


def test_a_call_takes_new_values_and_keeps_the_others(product, captured):
    a, b = random(2, 24, 40, seed=2), random(2, 40, 56, seed=3)
    y = captured(A=a, B=product.b)
    product.check(y, a)
    assert y is captured.outputs
    product.check(captured(B=b), a, b)
    product.check(captured(), a, b)


def test_stale_inputs_rebinding_has_no_effect_and_copying_has(product):
    """stale-inputs: captured with x = 1; another tensor under that name is not seen, copy_ into the buffer is."""
    x = torch.ones_like(product.a)
    captured = capture(product.plan, {"A": x, "B": product.b})
    x = torch.full_like(x, 3)
    captured.replay()
    product.check(captured.outputs, torch.ones_like(x))
    captured.inputs["A"].copy_(torch.full_like(x, 2))
    captured.replay()
    product.check(captured.outputs, torch.full_like(x, 2))
    product.check(captured(A=x), x)


def test_the_examples_are_copied(product):
    """stale-inputs: writing into the example's own memory changes nothing either."""
    x = torch.ones_like(product.a)
    captured = capture(product.plan, {"A": x, "B": product.b})
    x.fill_(7)
    captured.replay()
    product.check(captured.outputs, torch.ones_like(x))


OTHER = {
    "dims": (lambda a: torch.cat([a, a]), r"captured with dims \(2, 24, 40\).*given dims \(4, 24, 40\)"),
    "strides": (
        lambda a: a.mT.contiguous().mT,
        r"strides \(960, 40, 1\).*given dims \(2, 24, 40\), strides \(960, 1, 24\)",
    ),
    "dtype": (lambda a: a.float(), f"{target.dtype} on .*given .*torch.float32 on"),
    "layout": (lambda a: a.to_sparse(), "a torch.sparse_coo tensor is not read by strides"),
    "device": (lambda a: a.to("meta"), f"on {target.device}, given .*on meta"),
}


@pytest.mark.parametrize("what", OTHER)
def test_stale_inputs_another_shape_is_refused(product, captured, what):
    """stale-inputs: with another shape, layout, dtype or device nothing is copied, of no input."""
    make, words = OTHER[what]
    captured(A=product.a, B=product.b)
    with pytest.raises(ValueError, match=f"^A: .*{words}.*; (capture again for that|give a dense one)"):
        captured(B=torch.zeros_like(product.b), A=make(product.a))
    product.check(captured())


def test_the_stride_of_an_axis_of_extent_1_is_free():
    """It is never stepped, so that another value of it describes the same memory."""
    x = random(1, 3, 5, dtype=torch.float32)
    captured = capture(lambda x: x * 2, {"x": x})
    new = random(1, 3, 5, dtype=torch.float32, seed=1)
    torch.testing.assert_close(captured(x=new.as_strided((1, 3, 5), (99, 5, 1))), new * 2)


def test_unknown_names_and_what_is_no_tensor_are_refused(product, captured):
    captured(A=product.a, B=product.b)
    with pytest.raises(ValueError, match="'C' is no input of this graph; it has 'A', 'B'"):
        captured(A=torch.zeros_like(product.a), C=product.a)
    with pytest.raises(TypeError, match=r"A: expected a torch\.Tensor, got list"):
        captured(A=[1])
    product.check(captured())


def test_functions_return_what_they_return():
    """Tensors, tuples and dicts stay what they are, and each tensor stays the same one."""
    inputs = {"x": random(3, 5, dtype=torch.float32), "y": random(3, 5, dtype=torch.float32, seed=1)}
    works = {
        "tensor": lambda x, y: x + y,
        "tuple": lambda x, y: (x + y, x * y),
        "dict": lambda x, y: {"sum": x + y, "product": x * y},
    }
    found = {name: capture(work, inputs) for name, work in works.items()}
    first = {name: captured.outputs for name, captured in found.items()}
    x = random(3, 5, dtype=torch.float32, seed=2)
    outputs = {name: captured(x=x) for name, captured in found.items()}
    assert all(outputs[name] is first[name] for name in works)
    added, multiplied = x + inputs["y"], x * inputs["y"]
    torch.testing.assert_close(outputs["tensor"], added)
    torch.testing.assert_close(outputs["tuple"], (added, multiplied))
    torch.testing.assert_close(outputs["dict"], {"sum": added, "product": multiplied})


def test_buffers_have_the_layouts_of_the_examples():
    """Channels-last, an interleaved slice and a vector with gaps keep their strides."""
    one = random(2, 6, 3, 4, 8)[:, :, 1].transpose(1, 2)
    inputs = {"x": random(2, 5, 3, 7).to(memory_format=torch.channels_last), "q": one, "b": random(10)[::2]}
    captured = capture(lambda x, q, b: x * 2, inputs)
    for name, tensor in inputs.items():
        assert captured.inputs[name].stride() == tensor.stride()
        assert captured.inputs[name].data_ptr() != tensor.data_ptr()
        assert torch.equal(captured.inputs[name], tensor)


def test_a_gradient_is_not_recorded():
    """Buffers don't become part of the autograd graph of what is copied into them."""
    x = random(3, 5, dtype=torch.float32).requires_grad_()
    captured = capture(lambda x: x * 2, {"x": x})
    assert not captured(x=x).requires_grad and not captured.inputs["x"].requires_grad


def test_parameters_of_a_module_are_read_and_no_autograd_graph_grows():
    """Neither through the outputs nor through what the work keeps or writes in place, and grad mode is as before."""
    linear = torch.nn.Linear(5, 5, device=target.device)
    x, state = random(3, 5, dtype=torch.float32), torch.zeros(3, 5, device=target.device)

    def work(x):
        state.mul_(0.5).add_(linear(x))
        return x.mul_(linear.weight[0]), linear(x), state

    captured = capture(work, {"x": x})
    for _ in range(3):
        outputs = captured(x=x)
    assert not any(t.requires_grad for t in (*outputs, captured.inputs["x"], state))
    torch.testing.assert_close(outputs[0], (x * linear.weight[0]).detach())
    assert torch.is_grad_enabled() and linear(x).requires_grad


def test_work_takes_gradients_inside():
    weight = random(5, dtype=torch.float32).requires_grad_()

    def backward(x):
        return torch.autograd.grad((x * weight).square().sum(), weight)

    def inside(x):
        with torch.enable_grad():
            return backward(x)

    x = random(5, dtype=torch.float32, seed=1)
    with pytest.raises(CaptureError, match=r"(?s)does not require grad.*next: .*inside, under torch.enable_grad\(\)"):
        capture(backward, {"x": x})
    captured = capture(inside, {"x": torch.zeros_like(x)})
    torch.testing.assert_close(captured(x=x), (2 * x * x * weight.detach(),))


@pytest.mark.parametrize("before", [True, False])
def test_inference_mode_may_begin_or_end_between_capture_and_calls(before):
    x = random(3, 5, dtype=torch.float32)
    with torch.inference_mode(before):
        kept = torch.zeros(3, 5, device=target.device)
        captured = capture(lambda x: (kept.copy_(x), x * 2), {"x": torch.zeros_like(x)})
    with torch.inference_mode(not before):
        torch.testing.assert_close(captured(x=x), (x, x * 2))
    captured.inputs["x"].copy_(x + 1)  # by hand, outside of it
    captured.replay()
    torch.testing.assert_close(captured.outputs[1], 2 * x + 2)


def test_several_outputs_of_a_plan_come_by_name():
    graph = new_graph("norm")
    x, s = random(6, 96, 1, 1), random(1, 96, 1, 1, seed=1)
    b = random(1, 96, 1, 1, seed=2)
    Y, mean, _ = graph.layernorm(
        norm_forward_phase=cudnn.norm_forward_phase.TRAINING,
        input=describe(graph, x, "X"),
        scale=describe(graph, s, "scale"),
        bias=describe(graph, b, "bias"),
        epsilon=graph.tensor_scalar(1e-5, cudnn.scalar_type.RUNTIME_PARAM, name="epsilon"),
    )
    Y.set_output(True).set_name("Y")
    for tensor, name in ((mean, "mean"), (_, "inv_var")):
        tensor.set_output(True).set_name(name).set_data_type(cudnn.data_type.FLOAT)
    captured = capture(build(graph), {"X": x, "scale": s, "bias": b})
    assert list(captured.outputs) == ["Y", "mean", "inv_var"]
    torch.testing.assert_close(captured.outputs["mean"].flatten(), x.float().mean((1, 2, 3)), rtol=1e-4, atol=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_examples_that_cannot_be_buffers_are_refused(product):
    for example, error, words in (
        ([1, 2], TypeError, "A: an example input is a torch.Tensor, got list"),
        (product.a[:1].expand(2, 24, 40), ValueError, "A: .*stride 0"),
        (product.a.to("meta"), ValueError, f"A: expected a tensor on {target.device}, got one on meta"),
    ):
        with pytest.raises(error, match=words):
            capture(product.plan, {"A": example, "B": product.b})
    with pytest.raises(ValueError, match="no tensor was given for 'B'"):
        capture(product.plan, {"A": product.a})


def test_examples_come_by_name():
    with pytest.raises(TypeError, match=r"inputs is a dict \{name: example tensor\}, got list"):
        capture(lambda x: 2 * x, [torch.zeros(3)])


def test_outputs_of_a_plan_are_not_given(product):
    """capture allocates them; `bind` would call this 'given twice'."""
    y = product.plan.outputs[0]
    for key in ("Y", y):
        with pytest.raises(ValueError, match="'Y' is an output of the plan; capture allocates those"):
            capture(product.plan, {"A": product.a, "B": product.b, key: product.tensors["Y"]})


def test_inputs_that_are_given_as_tensors_of_the_graph_are_called_by_name(product):
    captured = capture(product.plan, dict(zip(product.plan.inputs, (product.a, product.b), strict=True)))
    a = random(2, 24, 40, seed=4)
    product.check(captured(A=a), a)


def test_an_example_that_has_no_strides():
    with pytest.raises(ValueError, match=r"x: a torch.sparse_coo tensor .*\.to_dense\(\)"):
        capture(torch.neg, {"x": torch.eye(3).to_sparse()})


def test_buffers_are_written_not_replaced(product, captured):
    """stale-inputs: another tensor in the place of a buffer would be given, and never read."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        captured.inputs["A"] = product.a


def test_an_input_may_be_called_self():
    captured = capture(lambda self: self * 2, {"self": torch.ones(3, device=target.device)})
    assert captured(self=torch.full((3,), 4.0, device=target.device)).tolist() == [8] * 3


def test_buffers_may_be_swapped():
    captured = capture(lambda a, b: a - b, {"a": random(5), "b": random(5, seed=1)})
    a, b = (captured.inputs[name].clone() for name in "ab")
    torch.testing.assert_close(captured(a=captured.inputs["b"], b=captured.inputs["a"]), b - a, rtol=0, atol=0)


def test_work_may_write_into_its_inputs():
    """Neither the warm-up nor the capture shows in the outputs of the examples."""
    captured = capture(lambda a: a.add_(1), {"a": torch.zeros(5, device=target.device)})
    assert captured.outputs.tolist() == [1] * 5
    assert captured(a=torch.full((5,), 3.0, device=target.device)).tolist() == [4] * 5


@pytest.mark.skipif(target.live, reason="a CUDA graph repeats the launches of the captured call")
@pytest.mark.parametrize(
    "work",
    [lambda a: a[a > 2], lambda a: a.int() if a[0] > 2 else a, lambda a: {"p" if a[0] > 2 else "q": a}],
    ids=["dims", "dtype", "names"],
)
def test_outputs_that_change_with_the_values_are_refused(work):
    captured = capture(work, {"a": torch.tensor([1.0, 3, 4])})
    with pytest.raises(CaptureError, match=r"(?s)step 'replay'.*depend on the shapes of the inputs alone"):
        captured(a=torch.tensor([5.0, 5, 5]))


def test_values_are_not_frozen():
    """A tensor that is passed by value would keep its value in the CUDA graph."""
    graph = new_graph("scaled")
    x = random(2, 24, 40)
    alpha = graph.tensor(dim=[1, 1, 1], stride=[1, 1, 1], data_type=cudnn.data_type.FLOAT, is_pass_by_value=True)
    alpha.set_name("alpha")
    graph.mul(describe(graph, x, "X"), alpha).set_output(True).set_name("Y")
    with pytest.raises(ValueError, match="alpha: passed by value, so a CUDA graph would keep the value"):
        capture(build(graph), {"X": x})


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda x: 1.0, "TypeError: work returns a tensor, a tuple or a dict of tensors, got float"),
        (lambda x: {"a": x, "b": None}, "TypeError: work returns .*, got NoneType"),
    ],
    ids=["raises", "number", "nothing"],
)
def test_work_that_fails_without_a_capture(work, words):
    with pytest.raises(
        CaptureError, match=f"failed at step 'warm-up'\n  cause: {words}\n  next: correct the work"
    ) as caught:
        capture(work, {"x": random(3, 5)})
    assert caught.value.step == "warm-up" and caught.value.__cause__ is not None


def test_an_error_says_once_what_to_do_next(product):
    """Of a GraphError it is the graph's own advice; of other errors the step's, below the first line of the cause."""
    graph = matmul(product.a, product.b)
    error = CaptureError("capture", GraphError(graph, "build", "a CUDA graph is being captured", "build it before"))
    assert str(error).count("next:") == 1 and str(error).endswith("next: build it before")
    assert "operations:" in str(error)
    error = CaptureError("capture", RuntimeError("CUDA error: not permitted\nCompile with FLAG=1 to see more"))
    assert str(error).count("next:") == 1 and "FLAG" not in str(error)
    assert "cause: RuntimeError: CUDA error: not permitted\n  next: take out of the work" in str(error)
    error = CaptureError("end of capture", UserWarning("It is empty. (Triggered internally at /a/b.cpp:7.)"))
    assert error.reason == "UserWarning: It is empty." and "cause: UserWarning: It is empty.\n" in str(error)


@pytest.fixture
def capturing(monkeypatch, module):
    """A context in which graph.py believes that there is a GPU, on which a CUDA graph is being captured."""

    @contextlib.contextmanager
    def believed():
        with monkeypatch.context() as patch:
            patch.setattr(module("graph"), "target", dataclasses.replace(target, live=True))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield

    return believed


def test_cold_capture_no_build_while_capturing(product, capturing):
    """cold-capture: said before anything is planned; the same graph can be built afterwards."""
    graph = matmul(product.a, product.b)
    with capturing(), pytest.raises(GraphError, match=r"step 'build'(.|\n)*next: build and warm up first"):
        build(graph)
    build(graph).run(product.tensors)
    product.check(product.tensors["Y"])


def test_cold_capture_no_first_launch_while_capturing(product, capturing):
    """cold-capture: a plan that was never launched is refused."""
    plan = Plan(product.plan.graph)
    with capturing():
        launch = plan.bind(product.tensors)
        with pytest.raises(GraphError, match=r"step 'first launch'(.|\n)*next: build and warm up first"):
            launch()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cold_capture_on_the_first_call(product):
    """cold-capture: build, or the first launch, inside a capture is refused; a plain call and a capture then work."""
    side, warm = torch.cuda.Stream(), Product().plan
    for step, cold in (
        ("build", lambda: build(matmul(product.a, product.b))),
        ("first launch", lambda: warm.run(product.tensors)),
    ):
        with (
            warnings.catch_warnings(action="ignore"),  # PyTorch's, that nothing was captured
            pytest.raises(GraphError, match=rf"step '{step}'(.|\n)*build and warm up first"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side),
        ):
            cold()
        product.plain_call_works()
    warm.run(product.tensors)
    product.check(capture(warm, {"A": product.a, "B": product.b}).outputs)


@pytest.mark.gpu
def test_cold_capture_without_warm_up(product):
    """cold-capture: the helper says the same if its warm-up is switched off."""
    with pytest.raises(CaptureError, match=r"step 'capture'(.|\n)*build and warm up first") as caught:
        capture(Product().plan, {"A": product.a, "B": product.b}, warmup=0)
    assert str(caught.value).count("next:") == 1
    product.plain_call_works()


BREAKING = {
    "item": lambda a: a * a.sum().item(),
    "synchronize": lambda a: (torch.cuda.synchronize(), a * 2)[1],
    "cpu": lambda a: a * a.cpu().sum(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("what", BREAKING)
def test_cold_capture_what_waits_for_the_gpu_breaks_it(product, what):
    """cold-capture: .item() and the like; afterwards stream, generator, allocator and captures are as before."""
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match=r"step 'capture'(.|\n)*next: take out of the work what waits for the GPU"):
        capture(BREAKING[what], {"a": product.a})
    assert torch.cuda.current_stream() == stream
    product.plain_call_works()
    product.check(capture(product.plan, {"A": product.a, "B": product.b}).outputs)
    held = torch.cuda.memory_allocated()
    large = torch.zeros(1 << 20, device=target.device)
    large.record_stream(torch.cuda.Stream())  # its memory comes back only if no capture is believed to be underway
    del large
    torch.cuda.synchronize()
    torch.zeros(1, device=target.device)
    gc.collect()
    assert torch.cuda.memory_allocated() <= held


@pytest.mark.gpu
def test_cold_capture_with_a_handle_left_on_the_default_stream(product):
    """cold-capture: such work is not captured but executed at once; that is an error, not a warning."""
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.default_stream().cuda_stream)
    graph = product.plan.graph
    workspace = torch.empty(max(product.plan.workspace_bytes, 1), dtype=torch.uint8, device=target.device)
    uids = [t.uid for t in (*product.plan.inputs, *product.plan.outputs)]
    y = torch.empty_like(product.tensors["Y"])

    def work(a):
        graph.execute((a, product.b, y), workspace, handle=handle, tensor_uids=uids)
        return y

    with warnings.catch_warnings(action="error"), pytest.raises(CaptureError, match="'end of capture'") as caught:
        capture(work, {"a": product.a})
    assert "The CUDA Graph is empty" in caught.value.reason and "cudnn.set_stream" in str(caught.value)
    product.plain_call_works()
    torch.cuda.synchronize()
    cudnn.destroy_handle(handle)


@pytest.mark.gpu
def test_stale_inputs_of_a_graph_captured_by_hand(product):
    """stale-inputs: captured with x = 1 then rebound: no effect; x.copy_(2) gives the new result."""
    x = torch.ones_like(product.a)
    run = product.plan.bind({**product.tensors, "A": x})
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    run()
    with torch.cuda.graph(graph, stream=side):
        run()
    original, x = x, torch.full_like(x, 3)
    graph.replay()
    product.check(product.tensors["Y"], torch.ones_like(x))
    original.copy_(torch.full_like(x, 2))
    graph.replay()
    product.check(product.tensors["Y"], torch.full_like(x, 2))


@pytest.mark.gpu
def test_the_captured_graph_keeps_its_memory(product):
    """Buffers, outputs and workspace stay the graph's, when plan and examples are gone and memory is used again."""
    captured = capture(Product().plan, {"A": product.a.clone(), "B": product.b.clone()})
    gc.collect()
    others = [torch.full_like(product.a, 9) for _ in range(50)]
    captured.replay()
    product.check(captured.outputs)
    assert all((other == 9).all() for other in others)


@pytest.mark.gpu
def test_replay_runs_on_the_current_stream(product, captured):
    """A copy that is enqueued on another stream, behind 20 ms of work, comes before the replay on that stream."""
    side, a = torch.cuda.Stream(), random(2, 24, 40, seed=5)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(20 * target.properties["smClockRateKHz"]))
        y = captured(A=a, B=product.b).clone()
    side.synchronize()
    product.check(y, a)


@pytest.mark.gpu
def test_a_graph_of_small_matmuls_is_five_times_as_fast():
    """Twenty launches of a 64^3 matmul, on the host's clock with one synchronisation at the end."""
    a, b = random(1, 64, 64), random(1, 64, 64, seed=1)
    plan = build(matmul(a, b))
    run = plan.bind({"A": a, "B": b, "Y": torch.empty_like(a)})

    def twenty(A, B):
        launch = plan.bind({"A": A, "B": B, "Y": (y := torch.empty_like(A))})
        for _ in range(20):
            launch()
        return y

    captured = capture(twenty, {"A": a, "B": b})
    # Where other processes use the GPU, most calls wait for their turn; the fastest ones don't.
    eager = min(bench.wall(lambda: [run() for _ in range(20)], calls=5).low for _ in range(20))
    replayed = min(bench.wall(captured.replay, calls=5).low for _ in range(20))
    assert replayed < eager / 5, (eager, replayed)
