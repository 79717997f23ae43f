"""A CUDA graph that owns its buffers: work is captured once and replayed on new values of the same shapes."""

import contextlib
import functools
import types
import warnings

import torch

from .dtypes import to_torch
from .graph import GraphError, Plan
from .strides import check_strided, check_strides
from .target import target

_EMPTY = "The CUDA Graph is empty"  # how PyTorch's warning starts
_NEXT = {  # what to do about a failure in each step
    "warm-up": "correct the work or its inputs: it fails without a capture, too",
    "capture": "take out of the work what waits for the GPU or reads a result (.item(), .cpu(), print, synchronize), "
    "and build every plan before; a call without capture still works",
    "replay": "let the outputs depend on the shapes of the inputs alone: a CUDA graph repeats the launches of one call",
    "end of capture": "launch everything on PyTorch's current stream; a cuDNN handle of your own needs "
    "cudnn.set_stream with that stream, inside the work",
}


class CaptureError(RuntimeError):
    """Work could not be captured, or can't be repeated. `step`: warm-up, capture, end of capture or replay.

    reason  the first error.
    """

    def __init__(self, step, error):
        reason = str(error).partition(" (Triggered internally")[0]  # PyTorch's warnings end in a place in its source
        self.step, self.reason = step, f"{type(error).__name__}: {reason}"
        action = _NEXT[step]
        if "does not require grad" in reason:
            action = "the work runs under torch.no_grad(): take its gradients inside, under torch.enable_grad()"
        if isinstance(error, GraphError):  # its last lines say what to do next
            rest = self.reason.replace("\n", "\n  ")
        else:  # CUDA's errors go on with general advice
            first, *_ = self.reason.split("\n")
            rest = f"{first}\n  next: {action}"
        super().__init__(f"capturing a CUDA graph failed at step '{step}'\n  cause: {rest}")


def capture(work, inputs, warmup=3):
    """Captures `work` on buffers of its own and returns the CapturedGraph.

    work    a Plan, or a function of named tensors that enqueues work on PyTorch's current stream and returns its
            output: a tensor, a tuple or a dict of tensors. A Plan with one output counts as a function that returns the
            tensor, one with more as a function that returns a dict by name.
            It runs under torch.no_grad(), now and in each replay: a module's parameters are read, and no autograd graph
            grows from call to call. Work that needs gradients takes them inside, under torch.enable_grad().
    inputs  {name: example tensor on the target's device}. Each gets a buffer with its dims, strides, dtype and values.
            Of a Plan its inputs alone, by name or as tensors of its graph; its outputs are allocated here.
    warmup  so many times the work runs before it is captured: what is compiled, loaded or allocated once is so by then.
            After the capture it runs once more, so that `outputs` are those of the examples.

    Warm-up and capture run on a side stream, which a Plan's cuDNN handle follows. One capture at a time per process:
    meanwhile other threads may not allocate device memory.

    Without a GPU nothing is captured: each call runs `work` on the same buffers by the reference, and copies what it
    returns into `outputs`. So a call computes the same, while tensors that `work` reads from elsewhere are read anew.

    Raises CaptureError with step, cause and next action; afterwards the stream is the one from before, and calls
    without capture work. Raises ValueError for inputs that are on another device, have no strides, or share memory with
    themselves, and for a Plan's outputs; TypeError for what is no dict, or no tensor.
    """
    if not isinstance(inputs, dict):
        raise TypeError(f"inputs is a dict {{name: example tensor}}, got {type(inputs).__name__}")
    if isinstance(work, Plan):
        inputs = _named(work, inputs)
    for name, tensor in inputs.items():
        _check_example(name, tensor)
    buffers = {name: _empty(t.shape, t.stride(), t.dtype) for name, t in inputs.items()}

    def restore():  # at first, and where work that writes into its inputs has changed them
        for name, tensor in inputs.items():
            buffers[name].copy_(tensor)

    with torch.no_grad():
        restore()
        run = _plan_call(work, buffers) if isinstance(work, Plan) else functools.partial(work, **buffers)
        outputs, graph = _record(run, warmup, restore) if target.live else (_warm_up(run, 1), None)
    return CapturedGraph(run, buffers, outputs, graph)


class CapturedGraph:
    """Captured work with its buffers; `capture` makes it.

    inputs   {name: tensor}: the buffers that the work reads. Written by calls, or by you in place (copy_).
    outputs  what the work returned, in its structure: memory of the graph, overwritten by the next call. Clone what
             has to survive it.

    Each lives at one address, which the graph holds; keep the object as long as those tensors are used.
    """

    def __init__(self, run, inputs, outputs, graph):
        self.inputs, self.outputs = types.MappingProxyType(inputs), outputs  # another tensor in it would not be read
        self._run, self._graph = run, graph  # `run` keeps a Plan's workspace alive; no graph without a GPU
        self._looks = {name: _look(buffer) for name, buffer in inputs.items()}
        self._places = {_place(buffer) for buffer in inputs.values()}
        self._inference = torch.is_inference_mode_enabled()

    def __call__(self, /, **new):
        """Copies the given tensors into the inputs of that name, replays, and returns `outputs`.

        Inputs that are not given keep their values. Raises ValueError, before anything is copied, for an unknown name
        and for a tensor with another dtype, device, dims or strides than the captured one.
        """
        for name, tensor in new.items():
            self._check(name, tensor)
        if any(_place(tensor) in self._places for tensor in new.values()):
            # One copy would overwrite what the next one reads.
            new = {name: tensor.clone() for name, tensor in new.items()}
        for name, tensor in new.items():  # without torch.no_grad(), which takes longer than a copy
            self.inputs[name].copy_(tensor.detach() if tensor.requires_grad else tensor)
        self.replay()
        return self.outputs

    def replay(self):
        """Runs the work on the values that `inputs` have now, on PyTorch's current stream."""
        if self._graph is not None:
            self._graph.replay()
            return
        with torch.inference_mode(self._inference), torch.no_grad():  # as when it was captured
            returned = self._run()
        if _shape_of(returned) != _shape_of(self.outputs):
            error = ValueError("the work returned other outputs (names, number, dims or dtypes) than before")
            raise CaptureError("replay", error)
        with torch.inference_mode():  # which may write into tensors that were made in it
            for own, new in zip(_tensors(self.outputs), _tensors(returned), strict=True):
                own.copy_(new.clone())

    def _check(self, name, tensor):
        if name not in self._looks:
            raise ValueError(f"'{name}' is no input of this graph; it has {', '.join(map(repr, self.inputs))}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        check_strided(name, tensor)
        captured, given = self._looks[name], _look(tensor)
        if captured != given and _stepped(captured) != _stepped(given):
            raise ValueError(f"{name}: captured with {_words(captured)}, given {_words(given)}; capture again for that")


def _place(tensor):
    """The address of the memory that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def _look(tensor):
    """What has to stay: dims, strides, dtype, device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _stepped(look):
    """The same with None for the stride of an axis of extent 1, which is never stepped."""
    dims, strides, *others = look
    return dims, tuple(s if d > 1 else None for d, s in zip(dims, strides, strict=True)), *others


def _words(look):
    dims, strides, dtype, device = _stepped(look)
    return f"dims {tuple(dims)}, strides {strides}, {dtype} on {device}".replace("None", "any")


def _check_example(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: an example input is a torch.Tensor, got {type(tensor).__name__}")
    check_strided(name, tensor)
    if tensor.device != target.device:
        raise ValueError(f"{name}: expected a tensor on {target.device}, got one on {tensor.device}")
    check_strides(name, tensor.shape, tensor.stride())


def _empty(dims, strides, dtype):
    with torch.inference_mode(False):  # a tensor that is made in it can't be written outside of it
        return torch.empty_strided(tuple(dims), tuple(strides), dtype=dtype, device=target.device)


def _named(plan, inputs):
    """`inputs` of a Plan by name, as calls will give them. Raises ValueError for an output."""
    named = {getattr(key, "name", key): example for key, example in inputs.items()}
    for output in plan.outputs:
        if output.name in named:
            raise ValueError(f"'{output.name}' is an output of the plan; capture allocates those, so give inputs alone")
    return named


def _plan_call(plan, inputs):
    """A function that executes `plan` on `inputs` and outputs of its own, and returns the outputs."""
    for tensor in plan.inputs:
        if tensor.is_pass_by_value:
            raise ValueError(f"{tensor.name}: passed by value, so a CUDA graph would keep the value that it had")
    outputs = {t: _empty(t.dim, t.stride, to_torch(t.data_type)) for t in plan.outputs}
    launch = plan.bind({**inputs, **outputs})
    result = {t.name: value for t, value in outputs.items()} if len(outputs) > 1 else next(iter(outputs.values()))

    def run():
        launch()
        return result

    return run


def _tensors(outputs):
    """The tensors of a tensor, tuple, list or dict, as a list."""
    found = list(outputs.values()) if isinstance(outputs, dict) else outputs
    found = list(found) if isinstance(found, tuple | list) else [found]
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"work returns a tensor, a tuple or a dict of tensors, got {type(tensor).__name__}")
    return found


def _shape_of(outputs):
    """Names, dims and dtypes of what work returned: a CUDA graph has the same ones in each replay."""
    names = list(outputs) if isinstance(outputs, dict) else None
    return names, [(tuple(t.shape), t.dtype) for t in _tensors(outputs)]


def _warm_up(run, times):
    """Calls `run` and returns what the last call did."""
    try:
        outputs = None
        for _ in range(times):
            outputs = run()
            _tensors(outputs)
        return outputs
    except Exception as error:
        raise CaptureError("warm-up", error) from error


def _record(run, warmup, restore):
    """(outputs, torch.cuda.CUDAGraph) of one call of `run`, replayed once after `restore()`."""
    side, graph, pool = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    side.wait_stream(torch.cuda.current_stream())
    step, outputs, failure = "capture", None, None
    with torch.cuda.stream(side), warnings.catch_warnings():  # a torch.cuda.graph that fails leaves its stream current
        _warm_up(run, warmup)
        warnings.filterwarnings("error", _EMPTY)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=side):
                try:
                    outputs = run()
                    _tensors(outputs)
                except Exception as error:
                    failure = error
        except Exception as error:  # CUDA refuses to end a capture in which something failed
            step, failure = (step, failure) if failure else ("end of capture", error)
            _clean_up(side, pool)
    if failure is not None:
        raise CaptureError(step, failure) from failure
    torch.cuda.current_stream().wait_stream(side)
    restore()
    graph.replay()
    return outputs, graph


def _clean_up(side, pool):
    """Ends what a capture that CUDA refused to end leaves behind in PyTorch (seen with 2.11).

    Its allocator would go on looking for the capture, and its random number generator would refuse to work outside of
    one ("Offset increment outside graph capture") until the next one ends well.
    """
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the first raises where the capture has ended after all
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        torch.zeros(1, device=target.device)
