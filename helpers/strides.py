"""What dims and strides say about a tensor's memory: which places it takes, and whether cuDNN can read it so.

Dims and strides count elements, from the outermost axis to the innermost, as in PyTorch and cuDNN. The stride of an
axis of extent 1 is never stepped, so any value of it describes the same memory.
"""

import math

import torch


def check_strided(name, tensor):
    """Raises ValueError for a tensor whose elements don't lie in memory by dims and strides, such as a sparse one."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: a {tensor.layout} tensor is not read by strides; give a dense one: .to_dense()")


def check_dims(name, dims):
    """Raises ValueError for a tensor without elements: cuDNN 9.24 divides by its dims, and the process ends."""
    if any(d < 1 for d in dims):
        raise ValueError(
            f"{name}: dims {tuple(dims)} hold no element, and cuDNN has no plan for that: leave the call out"
        )


def check_strides(name, dims, strides):
    """Raises ValueError where two elements share a place in memory, or where dims and strides differ in number."""
    if len(dims) != len(strides):
        raise ValueError(f"{name}: {len(dims)} dims {tuple(dims)} need as many strides, got {tuple(strides)}")
    axes = sorted((s, d) for d, s in zip(dims, strides, strict=True) if d > 1)
    if axes and axes[0][0] == 0:
        raise ValueError(
            f"{name}: dims {tuple(dims)} with strides {tuple(strides)} has stride 0 (an expanded tensor?); "
            "describe the tensor before .expand, or call .contiguous()"
        )
    span, interleaved = 0, False  # span: the largest offset that the axes so far reach
    for index, (stride, dim) in enumerate(axes):
        interleaved |= stride <= span
        span += (dim - 1) * stride
        if interleaved and (index + 1 == len(axes) or axes[index + 1][0] > span):
            elements, places = _count_places(axes[: index + 1])
            if places < elements:
                raise ValueError(
                    f"{name}: dims {tuple(dims)} with strides {tuple(strides)}: {elements} elements share {places} "
                    "places; take dims and strides from a tensor with describe(), or correct the strides"
                )
            interleaved = False


def _count_places(axes):
    """How many elements `axes`, pairs of stride and extent, address, and in how many different places."""
    offsets, elements = torch.zeros(1, dtype=torch.int64), 1
    for stride, dim in axes:
        offsets = torch.unique((offsets[:, None] + stride * torch.arange(dim)).flatten())
        elements *= dim
    return elements, len(offsets)


def has_gaps(dims, strides):
    """Whether this is a vector (one axis longer than 1) whose neighbours are not neighbours in memory."""
    long = _long_axes(dims)
    return len(long) == 1 and strides[long[0]] > 1


def _long_axes(dims):
    return [i for i, d in enumerate(dims) if d > 1]


def placed(tensor, rank, axis=None):
    """dims and strides that describe a tensor: a vector or scalar takes `rank`, and a vector with gaps is dense."""
    dims = list(tensor.shape)
    if len(dims) < 2 and (len(dims) != rank or axis is not None):
        length = dims[0] if dims else 1
        dims = [1] * rank
        dims[(1 if rank in (4, 5) else -1) if axis is None else axis] = length
    elif not has_gaps(tensor.shape, tensor.stride()):
        return dims, list(tensor.stride())
    long = _long_axes(dims)
    return dims, [1 if i in long else math.prod(dims) for i in range(len(dims))]


def dense_bytes(tensor):
    """(first address, address after the last byte) of a tensor without gaps; None for one with gaps."""
    span = 1 + sum((d - 1) * s for d, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0 or span != tensor.numel():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
