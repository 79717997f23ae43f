"""The dtypes that torch and cuDNN share, and their short names."""

import cudnn
import torch

# torch dtype -> (cuDNN data type, short name)
_PAIRS = {
    torch.float64: (cudnn.data_type.DOUBLE, "fp64"),
    torch.float32: (cudnn.data_type.FLOAT, "fp32"),
    torch.float16: (cudnn.data_type.HALF, "fp16"),
    torch.bfloat16: (cudnn.data_type.BFLOAT16, "bf16"),
    torch.float8_e4m3fn: (cudnn.data_type.FP8_E4M3, "fp8 e4m3"),
    torch.float8_e5m2: (cudnn.data_type.FP8_E5M2, "fp8 e5m2"),
    torch.int8: (cudnn.data_type.INT8, "int8"),
    torch.uint8: (cudnn.data_type.UINT8, "uint8"),
    torch.int32: (cudnn.data_type.INT32, "int32"),
    torch.int64: (cudnn.data_type.INT64, "int64"),
    torch.bool: (cudnn.data_type.BOOLEAN, "bool"),
}
_TO_TORCH = {pair[0]: dtype for dtype, pair in _PAIRS.items()}


def to_cudnn(dtype):
    """cudnn.data_type of a torch dtype (a cudnn.data_type is returned as it is). Raises TypeError for any other."""
    if isinstance(dtype, cudnn.data_type):
        return dtype
    if dtype not in _PAIRS:
        raise TypeError(f"{dtype} has no cuDNN data type; use one of {', '.join(str(d) for d in _PAIRS)}")
    return _PAIRS[dtype][0]


def to_torch(data_type):
    """torch dtype of a cudnn.data_type (a torch dtype is returned as it is). Raises TypeError for any other."""
    if isinstance(data_type, torch.dtype):
        return data_type
    if data_type not in _TO_TORCH:
        raise TypeError(f"{data_type} has no torch dtype; the series uses {', '.join(str(d) for d in _TO_TORCH)}")
    return _TO_TORCH[data_type]


def short_name(dtype):
    """'bf16' for torch.bfloat16 or cudnn.data_type.BFLOAT16; '?' for None; other types keep their own name."""
    if dtype is None:
        return "?"
    dtype = _TO_TORCH.get(dtype, dtype)
    return _PAIRS[dtype][1] if dtype in _PAIRS else str(dtype).split(".")[-1].lower()
