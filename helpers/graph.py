"""Describing tensors, building a graph in cuDNN's five steps, and executing the plan with every tensor checked."""

import functools
import re
import time
from typing import NamedTuple

import cudnn
import torch

from . import reference
from .dtypes import short_name, to_cudnn, to_torch
from .strides import check_dims, check_strided, check_strides, dense_bytes, has_gaps, placed
from .target import DRIVER, target

ALIGNMENT = 16  # bytes; cuDNN assumes it of every tensor unless told otherwise
UNSUPPORTED = (  # what to do
    "compute in fp32 and give images channels-last (NHWC); else compare operations, layouts and dtypes with cuDNN's "
    "support tables, or split the graph"
)
AUTO = object()  # workspace=AUTO: Plan allocates what the plan needs


class GraphError(RuntimeError):
    """cuDNN or a check before it refused a graph. `step` names the step, `reason` is cuDNN's whole message."""

    def __init__(self, graph, step, reason, action):
        self.step, self.reason = step, reason
        operations = "\n".join(f"    {describe_node(node)}" for node in graph.nodes) or "    (none)"
        cause, _, detail = reason.partition("\n")
        # cuDNN gives several lines for each engine that it tried; the first one says what that engine lacks.
        engines = re.findall(r'"engineId":(\d+).*\n\w+: CUDNN_STATUS_(\w+); Reason: (.*)', detail)
        if not engines:
            cause, detail = reason, ""
        causes = "".join(f"\n    engine {number}: {status}: {text}" for number, status, text in engines)
        if "PREREQUISITE_MISSING" in detail and "libcuda" in detail:
            action = f"engines that compile at run time found no driver library: {DRIVER}; then restart the kernel"
            detail = ""
        super().__init__(
            f"graph '{graph_name(graph)}' failed at step '{step}' for {target.name} (SM{target.sm}), "
            f"cuDNN {cudnn.backend_version_string()}\n  cause: {cause}{causes}\n  operations:\n{operations}\n"
            f"  next: {action}" + (f"\n  cuDNN's message in full:\n{detail.strip()}" if detail else "")
        )


class Step(NamedTuple):
    """One of the five steps of `build`: its name, its time in ms, and what it produced."""

    name: str
    ms: float
    produced: str


# --- describing tensors -----------------------------------------------------------------------------------------------


def new_graph(name, io=None, intermediate=torch.float32, compute=torch.float32, **options):
    """An empty cudnn.pygraph for the target.

    name          shown in errors and pictures.
    io            torch dtype of real tensors that declare none (default: the target's working dtype).
    intermediate  torch dtype of virtual tensors that declare none.
    compute       torch dtype that operations compute in.
    options       further arguments of cudnn.pygraph, e.g. is_dynamic_shape_enabled or kernel_cache.
    """
    return cudnn.pygraph(
        name,
        io_data_type=to_cudnn(io or target.dtype),
        intermediate_data_type=to_cudnn(intermediate),
        compute_data_type=to_cudnn(compute),
        **target.graph_arguments(),
        **options,
    )


def describe(graph, tensor, name, axis=None):
    """Declares `tensor` as a real tensor of `graph`, with the dims, strides and dtype that it has.

    A tensor of rank 2 or more is described as it is. cuDNN aligns dims to the right when it broadcasts, and all
    tensors of an operation have one rank, so a vector or a scalar takes the rank of the graph's first tensor: a vector
    lies along `axis` (default: axis 1, the channels, at rank 4 and 5; else the last axis), a scalar has dims of 1.

    A vector with gaps, such as b[::2], is described as dense and `Plan` copies it into a dense buffer before each
    launch: cuDNN's engines accept its stride and ignore it (seen with cuDNN 9.19: eng41 for a convolution's bias, eng7
    for a matmul's).

    Returns the cudnn.Tensor. Raises TypeError for a dtype that cuDNN lacks, ValueError for strides under which
    elements share memory (an expanded tensor, for example).
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: a torch.Tensor is described, got {type(tensor).__name__}")
    check_strided(name, tensor)
    check_dims(name, tensor.shape)
    try:
        data_type = to_cudnn(tensor.dtype)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    check_strides(name, tensor.shape, tensor.stride())
    rank = next((len(t.dim) for t in all_tensors(graph) if len(t.dim) > 2), 1)
    dims, strides = placed(tensor, rank, axis)
    return graph.tensor(dim=dims, stride=strides, data_type=data_type, name=name)


def scalar(graph, value, name):
    """A constant of `graph` (an epsilon, a scale) that is passed by value at each launch, not through device memory.

    value: a Python float (used as fp32) or int (int32). Returns the cudnn.Tensor; `Plan.run` takes nothing for it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: a scalar is a Python int or float, got {type(value).__name__}")
    return graph.tensor_scalar(value, cudnn.scalar_type.RUNTIME_PARAM, name=name)


def all_tensors(graph):
    """Every tensor of a graph, in the order of declaration; graph.tensors lacks those that share a name."""
    return list(graph._tensor_by_uid.values())


def graph_name(graph):
    """The name that a cudnn.pygraph was made with (the frontend keeps it without a public accessor)."""
    return graph._cpp_graph_kwargs["name"]


def describe_tensor(tensor):
    """'X (32, 128, 56, 56) bf16' for a cudnn.Tensor."""
    dims = f" {tuple(tensor.dim)}" if tensor.dim else ""
    return f"{tensor.name}{dims} {short_name(tensor.data_type)}{' virtual' if tensor.is_virtual else ''}"


def describe_node(node):
    """'relu.0: IN_0 = bias.0::OUT_0 (2, 16) fp32 virtual -> OUT_0 = Y (2, 16) bf16' for a cudnn.Node."""
    kind = node.params.get("mode", node.node_type.name.lower())
    inputs = ", ".join(describe_tensor(t) for t in node.inputs.values() if t is not None)
    outputs = ", ".join(describe_tensor(t) for t in node.outputs.values() if t is not None)
    return f"{kind}: {inputs} -> {outputs}"


# --- building ---------------------------------------------------------------------------------------------------------


def build(graph, heuristics=(cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK), choice=None):
    """Takes `graph` through cuDNN's five steps and returns the Plan of the first candidate that builds.

    heuristics  modes that are asked for candidates, in this order.
    choice      (engine, {cudnn.knob_type: value}): the one candidate to build, without heuristics.

    Raises GraphError with the step, the operations with their dims and dtypes, the target and cuDNN's last reason;
    ValueError for tensors that cuDNN would misread, TypeError for what is no graph.
    """
    _check_is_graph(graph)
    if any(_changes_relu(node) for node in graph.nodes):
        # cuBLASLt's engine takes such a graph and applies a plain ReLU (seen with cuDNN 9.19).
        graph.deselect_behavior_notes([cudnn.behavior_note.CUBLASLT_DEPENDENCY])
    steps = propose(graph, heuristics, choice)
    steps.append(
        _step(
            graph,
            "check_support",
            graph.check_support,
            lambda: "at least one candidate can run on the target",
            UNSUPPORTED,
        )
    )
    steps.append(
        _step(
            graph,
            "build_plans",
            lambda: graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE),
            lambda: f"{_plan_name(graph)}, {_kernel_origin(graph)}",
            UNSUPPORTED,
        )
    )
    return Plan(graph, steps)


def propose(graph, heuristics, choice=None):
    """The first three of the five steps of `build`: afterwards the graph has candidates, and none of them is built.

    Returns the list of Step; raises what `build` raises.
    """
    _check_before_build(graph)
    steps = [
        _step(
            graph,
            "validate",
            graph.validate,
            lambda: f"{len(graph.nodes)} operations; dims and dtypes of all tensors agree",
            "correct the dims, strides or dtypes named above",
        ),
        _step(
            graph,
            "build_operation_graph",
            graph.build_operation_graph,
            lambda: "the backend's operation graph; layouts of virtual tensors and outputs inferred",
            "correct the layout or the dtypes named above",
        ),
    ]
    if choice is None:
        planned = _step(
            graph,
            "create_execution_plans",
            lambda: graph.create_execution_plans(list(heuristics)),
            lambda: f"{graph.get_execution_plan_count()} candidates, ranked by the heuristics",
            UNSUPPORTED,
        )
    else:
        planned = _step(
            graph,
            "create_execution_plan",
            lambda: graph.create_execution_plan(*choice),
            lambda: f"one candidate, by name: engine {choice[0]}",
            f"engine {choice[0]} with these knobs is not for this graph on {target.name}: choose again",
        )
    return [*steps, planned]


def _step(graph, name, call, produced, action):
    """Takes one step, timed; raises GraphError with `action` as what to do next."""
    started = time.perf_counter()
    try:
        call()
    except Exception as error:  # the frontend raises a dozen types, AssertionError of its analysers among them
        raise GraphError(graph, name, _reason(error), action) from error
    return Step(name, (time.perf_counter() - started) * 1e3, produced())


def _check_not_capturing(graph, step):
    """Raises GraphError while a CUDA graph is captured on PyTorch's current stream: `step` may load and allocate."""
    if target.live and torch.cuda.is_current_stream_capturing():
        reason = f"a CUDA graph is being captured, and the {step} loads or compiles kernels"
        raise GraphError(graph, step, reason, "build and warm up first: one launch of each plan before the capture")


def _check_is_graph(graph):
    if not isinstance(graph, cudnn.pygraph):
        raise TypeError(
            f"a described graph (cudnn.pygraph) is built, got {type(graph).__name__}; "
            "does the function that describes it return it?"
        )


def _check_before_build(graph):
    _check_is_graph(graph)
    _check_not_capturing(graph, "build")
    if getattr(graph, "_planning_done", False):
        raise GraphError(graph, "build", "this graph was built before", "make a new graph: planning happens once")
    for tensor in all_tensors(graph):
        check_dims(tensor.name, tensor.dim)
        if tensor.dim and tensor.stride and not tensor.is_virtual and not tensor.is_pass_by_value:
            check_strides(tensor.name, tensor.dim, tensor.stride)
            if has_gaps(tensor.dim, tensor.stride):
                raise ValueError(
                    f"{tensor.name}: dims {tuple(tensor.dim)} with strides {tuple(tensor.stride)} is a vector with "
                    "gaps, and cuDNN's engines read it as if it were dense; use describe(), or a dense copy"
                )
    used = {t.uid for node in graph.nodes for t in node.inputs.values() if t is not None}
    for node in graph.nodes:
        if node.node_type.name.startswith("SDPA"):
            _check_attention(graph, node)
        results = [t for t in node.outputs.values() if t is not None]
        if all(t.is_virtual and t.uid not in used for t in results):
            names = " and ".join(f"'{t.name}'" for t in results)
            raise GraphError(
                graph,
                "describe",
                f"{names}, the result of {node.name}, is neither used nor marked as an output",
                f"call .set_output(True) on {names}",
            )


def _check_attention(graph, node):
    """Raises GraphError for dynamic shapes, ValueError for sequence lengths that would be read as something else."""
    if graph._cpp_graph_kwargs.get("is_dynamic_shape_enabled"):
        # cuDNN 9.19 builds it, and launches each further shape as if it were the first, without an error (on an H200);
        # 9.24 refuses it.
        raise GraphError(
            graph,
            "describe",
            f"{node.name}: attention with dynamic shapes gives wrong results for every shape but the first",
            "leave out is_dynamic_shape_enabled: build one static plan for each bucket of lengths, and pass the "
            "sequences' own lengths with use_padding_mask, seq_len_q and seq_len_kv",
        )
    for lengths in filter(None, (node.inputs.get("seq_len_q"), node.inputs.get("seq_len_kv"))):
        dims = (node.inputs["q"].dim[0], 1, 1, 1)
        if lengths.data_type != cudnn.data_type.INT32 or tuple(lengths.dim) != dims:
            raise ValueError(
                f"{describe_tensor(lengths)}: {node.name} wants one int32 length for each sequence, with dims {dims}: "
                "lengths.to(torch.int32).view(-1, 1, 1, 1)"
            )


def _changes_relu(node):
    names = ("negative_slope", "lower_clip", "upper_clip")
    return node.params.get("mode") == "relu" and any(node.params.get(name) is not None for name in names)


def _reason(error):
    text = str(error).strip() or type(error).__name__
    last = cudnn.get_last_error_string().strip()
    return text if not last or last in text else f"{text} (cuDNN: {last})"


def _plan_name(graph):
    return graph.get_plan_name_at_index(graph._plan_index)


def _kernel_origin(graph):
    """Where the kernels of the built plan come from, by its notes."""
    notes = graph.get_behavior_notes_for_plan_at_index(graph._plan_index)
    return "compiled at run time" if cudnn.behavior_note.RUNTIME_COMPILATION in notes else "a ready-made kernel"


# --- executing --------------------------------------------------------------------------------------------------------


class Plan:
    """A built graph, ready to run: on the GPU, or by the reference on the CPU for a recorded target.

    graph          a cudnn.pygraph that went through the five steps.
    steps          how long each took and what it produced (list of Step).
    index          of a built candidate; None: the one that `graph` has selected.
    name           engine and knobs of the chosen candidate, as cuDNN names it; a deserialized graph can't tell them.
    notes          its behaviour notes.
    workspace_bytes  bytes of scratch memory that it needs on the device.
    inputs, outputs  the real tensors (cudnn.Tensor) that `run` takes, in the graph's order.
    """

    def __init__(self, graph, steps=(), index=None, name=None):
        self.graph, self.steps, self.index = graph, list(steps), index
        at = graph._plan_index if index is None else index
        self.name = name or graph.get_plan_name_at_index(at)
        self.notes = graph.get_behavior_notes_for_plan_at_index(at)
        self.workspace_bytes = (
            graph.get_workspace_size() if index is None else graph.get_workspace_size_plan_at_index(at)
        )
        produced = {t.uid for node in graph.nodes for t in node.outputs.values() if t is not None}
        real = [t for t in all_tensors(graph) if not t.is_virtual and t.pass_by_value is None]
        self.inputs = [t for t in real if t.uid not in produced]
        self.outputs = [t for t in real if t.uid in produced]
        self._device = target.device
        self._launched = False

    @property
    def build_ms(self):
        """Milliseconds that the five steps took together."""
        return sum(step.ms for step in self.steps)

    def __str__(self):
        title = f"{graph_name(self.graph)}: {self.name} · workspace {self.workspace_bytes:,} bytes"
        lines = [f"  {s.name:<23} {s.ms:9.1f} ms   {s.produced}" for s in self.steps]
        total = [f"  {'total':<23} {self.build_ms:9.1f} ms"] if lines else []
        return "\n".join([title, *lines, *total])

    def run(self, tensors, workspace=AUTO):
        """Executes the plan on PyTorch's current stream; results are written into the given output tensors.

        tensors    {cudnn.Tensor or its name: torch.Tensor} with every input and output of the graph.
        workspace  a contiguous tensor of at least workspace_bytes bytes on the device; allocated if not given.

        Raises ValueError or TypeError, before anything is launched, where a tensor differs from its description.
        """
        self.bind(tensors, workspace)()

    def bind(self, tensors, workspace=AUTO):
        """Checks `tensors` and `workspace` as `run` does, once, and returns a function that executes without checks.

        The tensors and the workspace live as long as the function. It launches on the stream that is PyTorch's current
        one when it is called; calls on several streams at once need one function each, since they share a workspace.
        """
        given = self._checked(tensors)
        workspace = self._checked_workspace(workspace)
        with_gaps = {uid: value for uid, value in given.items() if has_gaps(value.shape, value.stride())}
        dense = {uid: value.contiguous() for uid, value in with_gaps.items()}
        launch = self._launcher({**given, **dense}, workspace)
        if not dense:
            return launch

        def copy_and_launch():
            for uid, value in with_gaps.items():
                dense[uid].copy_(value)
            launch()

        return copy_and_launch

    def _launcher(self, given, workspace):
        if not target.live:
            by_tensor = {t: given[t.uid] for t in (*self.inputs, *self.outputs)}

            def evaluate():
                self._check_length_values(given)
                reference.evaluate(self.graph, by_tensor)

            return evaluate
        execute, handle, ordinal = self.graph.execute, target.handle, self._device.index
        if self.index is not None:
            execute = functools.partial(self.graph.execute_plan_at_index, index=self.index)
        uids, buffers = tuple(given), tuple(given.values())

        def launch():
            if not self._launched:
                _check_not_capturing(self.graph, "first launch")
                self._launched = True
            execute(buffers, workspace, handle=handle(ordinal), tensor_uids=uids)

        return launch

    def _check_length_values(self, given):
        """Raises ValueError for sequence lengths below 0 or past the end: an engine would read other memory there.

        Only for tensors on the CPU; for those on a GPU each launch would have to wait for it.
        """
        for node in self.graph.nodes:
            for port, of in (("seq_len_q", "q"), ("seq_len_kv", "k")):
                lengths, of = node.inputs.get(port), node.inputs.get(of)
                values = given.get(lengths.uid) if lengths is not None and of is not None else None
                if values is not None and ((values < 0) | (values > of.dim[2])).any():
                    raise ValueError(
                        f"{lengths.name}: {node.name} takes lengths from 0 to {of.dim[2]}, "
                        f"got {values.flatten().tolist()}"
                    )

    def _checked(self, tensors):
        """{uid: torch.Tensor} after every tensor was compared with its description."""
        wanted = {t.uid: t for t in (*self.inputs, *self.outputs)}
        names = [t.name for t in all_tensors(self.graph)]
        by_name = {t.name: t for t in wanted.values() if names.count(t.name) == 1}
        given = {}
        for key, value in tensors.items():
            tensor = by_name.get(key) if isinstance(key, str) else key
            if getattr(tensor, "uid", None) not in wanted or wanted[tensor.uid] is not tensor:
                raise ValueError(f"{self._stranger(key)}; it has {_names(wanted.values())}")
            if tensor.uid in given:
                raise ValueError(f"'{tensor.name}' was given twice, by name and as a tensor of the graph")
            given[tensor.uid] = value
        missing = [t for t in wanted.values() if t.uid not in given]
        if missing:
            raise ValueError(f"no tensor was given for {_names(missing)}; the graph has {_names(wanted.values())}")
        for uid, value in given.items():
            self._check_tensor(wanted[uid], value)
        for output in self.outputs:
            self._check_shared(output, given)
        return given

    def _check_shared(self, output, given):
        """Raises ValueError where an output lies in memory of another tensor: kernels read while others write.

        Only dense tensors are compared: slices of one buffer may interleave without sharing an element.
        """
        place = dense_bytes(given[output.uid])
        for tensor in (*self.inputs, *self.outputs):
            other = dense_bytes(given[tensor.uid])
            if tensor is not output and place and other and place[0] < other[1] and other[0] < place[1]:
                raise ValueError(
                    f"{output.name}: this output shares memory with '{tensor.name}'; give it memory of its own"
                )

    def _stranger(self, key):
        """Why a key of the given tensors names no input or output, in words."""
        ours = [t for t in all_tensors(self.graph) if t is key or t.name == key]
        if len(ours) > 1:
            return f"'{key}' is the name of {len(ours)} tensors of this graph: use the tensors themselves as keys"
        if ours and ours[0].is_virtual:
            return f"'{ours[0].name}' is virtual, it has no memory: call .set_output(True) on it before the build"
        label = key if isinstance(key, str) else f"{getattr(key, 'name', key)} (as declared by another graph)"
        return f"'{label}' is no input or output of this graph"

    def _check_tensor(self, tensor, value):
        name = tensor.name
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
        check_strided(name, value)
        expected_device = torch.device("cpu") if tensor.is_pass_by_value else self._device
        if value.device != expected_device:
            raise ValueError(f"{name}: expected a tensor on {expected_device}, got one on {value.device}")
        if value.dtype != to_torch(tensor.data_type):
            raise TypeError(f"{name}: expected {to_torch(tensor.data_type)}, got {value.dtype}")
        dims, strides = tuple(tensor.dim), tuple(tensor.stride)
        axis = next((i for i, d in enumerate(dims) if d > 1), -1) if value.dim() < 2 else None
        got_dims, got_strides = map(tuple, placed(value, len(dims), axis))
        if got_dims != dims:
            raise ValueError(f"{name}: expected dims {dims}, got {tuple(value.shape)}")
        check_strides(name, value.shape, value.stride())
        if any(d > 1 and s != g for d, s, g in zip(dims, strides, got_strides, strict=True)):
            raise ValueError(f"{name}: expected strides {strides} for dims {dims}, got {tuple(value.stride())}")
        if tensor in self.outputs and has_gaps(value.shape, value.stride()):
            raise ValueError(f"{name}: an output can't be a vector with gaps, got strides {tuple(value.stride())}")
        if value.data_ptr() % ALIGNMENT and not tensor.is_pass_by_value:
            raise ValueError(
                f"{name}: expected memory aligned to {ALIGNMENT} bytes, got an address {value.data_ptr() % ALIGNMENT} "
                "bytes past such a place (a slice?); use .clone()"
            )

    def _checked_workspace(self, workspace):
        """The workspace to launch with, a tensor or None. Raises ValueError or TypeError for one that won't do."""
        need, size = self.workspace_bytes, 0
        if workspace is AUTO:
            return torch.empty(need, dtype=torch.uint8, device=self._device) if need else None
        if isinstance(workspace, torch.Tensor):
            size = workspace.numel() * workspace.element_size()
        elif workspace not in (None, 0):
            raise TypeError(f"workspace: expected a torch.Tensor or None, got {type(workspace).__name__}")
        if size < need:
            raise ValueError(f"workspace: {need} bytes are required, got {size}; leave it out to have it allocated")
        if not size:
            return None
        if workspace.device != self._device or not workspace.is_contiguous():
            got = f"{'a contiguous' if workspace.is_contiguous() else 'a strided'} one on {workspace.device}"
            raise ValueError(f"workspace: expected a contiguous tensor on {self._device}, got {got}")
        if need and workspace.data_ptr() % ALIGNMENT:
            raise ValueError(f"workspace: expected memory aligned to {ALIGNMENT} bytes, got a slice that is not")
        return workspace


def _names(tensors):
    return ", ".join(f"'{t.name}'" for t in tensors)
