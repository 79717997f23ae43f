"""FP8 by hand: a cast that saturates and counts, and the rule that turns the largest magnitude seen into a scale.

Convention: x is stored as round(x * scale) and read back as stored * descale, descale = 1 / scale.
e4m3 is torch.float8_e4m3fn (largest value 448, no Inf), e5m2 is torch.float8_e5m2 (largest finite value 57344), as
defined by Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv 2209.05433).
"""

from typing import NamedTuple

import torch

# With a scale up to 2^126 the descale, 1 / scale, is a normal fp32 number as well (the smallest one is 2^-126).
LARGEST_SCALE = 2.0**126


class Cast(NamedTuple):
    """What `cast` returns: the FP8 tensor, and how many finite elements were clipped (0-dim int64 tensor)."""

    values: torch.Tensor
    clipped: torch.Tensor


class Scale(NamedTuple):
    """What `next_scale` returns: the scale (fp32 tensor, finite and positive), and whether amax was unusable (bool)."""

    value: torch.Tensor
    flagged: torch.Tensor


def cast(x, dtype=torch.float8_e4m3fn, scale=1.0):
    """x * scale rounded to `dtype`: to nearest even, and to +-largest where it lies beyond it; NaN stays NaN.

    x      a floating-point tensor of any shape, memory layout and device.
    dtype  torch.float8_e4m3fn or torch.float8_e5m2.
    scale  a number or a 0-dim tensor; the product is computed in fp32.

    +-Inf becomes +-largest too, in both formats (e5m2 could hold it): saturation as in CUDA's __NV_SATFINITE.
    Clipped are the finite elements of x whose product lies beyond +-largest. Returns a Cast.
    """
    limit = _largest(dtype)
    scaled = x.float() * scale
    clipped = (x.isfinite() & (scaled.abs() > limit)).sum()
    return Cast(scaled.clamp(-limit, limit).to(dtype), clipped)


def next_scale(amax, last=1.0, dtype=torch.float8_e4m3fn):
    """The scale that maps `amax`, the largest magnitude seen, to the largest value of `dtype`.

    amax   fp32 tensor or number, 0 or larger. A tensor stays on its device and nothing waits for its value.
    last   the last good scale (number or tensor), kept where amax says nothing: 1 if there was none yet.

        amax normal     largest / amax, rounded down in fp32, so that amax * scale never exceeds the largest value
        amax tiny       LARGEST_SCALE, where largest / amax would be larger (1e-36 would give Inf in fp32)
        amax 0          last
        NaN, Inf, < 0   last, and flagged: a step whose amax is none of the values of a sound tensor

    A `last` that is itself no scale (0, negative, NaN, Inf) counts as 1, so the result is finite and positive always.

    Returns a Scale.
    """
    limit = _largest(dtype)
    amax = torch.as_tensor(amax, dtype=torch.float32)
    last = torch.as_tensor(last, dtype=torch.float32, device=amax.device)
    last = torch.where(last.isfinite() & (last > 0), last, torch.ones_like(last))
    wide = amax.double()
    scale = (limit / wide).clamp(max=LARGEST_SCALE).float()
    scale = torch.where(scale.double() * wide > limit, torch.nextafter(scale, torch.zeros_like(scale)), scale)
    flagged = ~(amax.isfinite() & (amax >= 0))
    return Scale(torch.where(flagged | (amax == 0), last, scale), flagged)


def _largest(dtype):
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(f"expected torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")
    return torch.finfo(dtype).max
