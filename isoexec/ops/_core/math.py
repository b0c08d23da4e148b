"""Elementary functions of the CPU backend.

torch's exp, sigmoid, silu, softplus and sum take a vector path or a scalar tail depending on length, stride and alignment,
and the two differ in the last bit. These are built from operations that IEEE 754 rounds correctly (add, subtract, multiply, divide,
conversion, and the root inside rsqrt), each its own kernel, so an element's bits depend on its value alone. exp and log are evaluated in fp64
and rounded once, to within 0.5000001 ulp of fp32; subnormal results are kept.
"""

from __future__ import annotations

import math

import torch

_PIECE = 1 << 14  # elements per pass of exp, so that its fp64 temporaries stay in cache
_LOG2E = 1.4426950408889634
# ln 2 in two parts; the high one has 32 trailing zero bits, so that n * _LN2_HI is exact for |n| < 2**20.
_LN2_HI = 6.93147180369123816490e-01
_LN2_LO = 1.90821492927058770002e-10
_SHIFTER = 1.5 * 2.0**52 + 1023.0
_EXP_TERMS = [1.0 / math.factorial(n) for n in range(11, -1, -1)]  # |r| <= ln(2) / 2: the rest is below 7e-15
# pi / 2 in three parts; the first two have 20 trailing zero bits, so that n * part is exact for n < 2**20.
_PIO2 = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_SIN_TERMS = [(-1.0) ** n / math.factorial(2 * n + 1) for n in range(9, -1, -1)]
_COS_TERMS = [(-1.0) ** n / math.factorial(2 * n) for n in range(10, -1, -1)]
_ATANH_TERMS = [2.0 / (2 * n + 1) for n in range(11, -1, -1)]


def _horner(coefficients: list[float], x: torch.Tensor) -> torch.Tensor:
    value = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        value.mul_(x).add_(coefficient)  # two kernels: no contraction to an fma
    return value


def _exp64(x: torch.Tensor) -> torch.Tensor:
    """exp of fp64 ``x`` that holds fp32 values; beyond the range of fp32 the result only has to round to 0 or inf."""
    x = x.clamp(-200.0, 200.0)  # keeps NaN
    shifted = (x * _LOG2E).add_(_SHIFTER)  # rounds to an integer n; the low bits then hold n + 1023
    n = shifted - _SHIFTER
    r = (x - n * _LN2_HI).sub_(n.mul_(_LN2_LO))
    power = shifted.view(torch.int64).bitwise_left_shift_(52).view(torch.float64)
    return _horner(_EXP_TERMS, r).mul_(power)


def _log64(x: torch.Tensor) -> torch.Tensor:
    """log of fp64 ``x``; 0 gives -inf, negative and NaN give NaN, inf gives inf."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    e = torch.where(small, exponent - 1, exponent).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    value = (_horner(_ATANH_TERMS, s * s).mul_(s).add_(e * _LN2_LO)).add_(e * _LN2_HI)
    value = torch.where(x == 0.0, -math.inf, value)
    value = torch.where(x == math.inf, math.inf, value)
    return torch.where(x < 0.0, math.nan, value)


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for source, target in zip(x.reshape(-1).split(_PIECE), y.view(-1).split(_PIECE)):
            target.copy_(_exp64(source.double()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


class _Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _log64(x.double()).to(torch.float32)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x


class _Log1p(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x.double()
        u = y + 1.0
        # log(u) * y / (u - 1) recovers what the rounding of 1 + y lost.
        value = torch.where(u == 1.0, y, _log64(u) * y / (u - 1.0))
        return torch.where(y == math.inf, math.inf, value).to(torch.float32)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1.0 + x)


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of fp32 ``x``, elementwise, fp32."""
    return _Exp.apply(_fp32("exp", x))


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of fp32 ``x``, elementwise, fp32."""
    return _Log.apply(_fp32("log", x))


def log1p(x: torch.Tensor) -> torch.Tensor:
    """log(1 + x) of fp32 ``x`` > -1, elementwise, fp32."""
    return _Log1p.apply(_fp32("log1p", x))


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x) of fp32 ``x``: a correctly rounded root, then a true division.

    torch.rsqrt is these two processor instructions in every lane and tail. torch.sqrt is not: it calls a vector library (MKL VML)
    that misses the correct rounding of one root in five, differently for a contiguous and a strided input.
    """
    return torch.rsqrt(_fp32("rsqrt", x))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of fp32 ``x``, each step rounded to fp32."""
    return 1.0 / (1.0 + exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) of fp32 ``x``. Not x / (1 + exp(-x)), whose bits differ."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """x where x > 20, else log1p(exp(x)), of fp32 ``x``."""
    # The clamp keeps inf * 0 out of the gradient of the branch that is not taken.
    return torch.where(x > 20.0, x, log1p(exp(x.clamp(max=20.0))))


def cos_sin(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos(x), sin(x)) of fp32 ``x``, elementwise, fp32; |x| < 1.6e6. Not differentiable.

    The quadrant is taken off in fp64, then both series are evaluated on [-pi/4, pi/4] and rounded once.
    """
    y = _fp32("cos_sin", x).double()
    n = (y * (2.0 / math.pi)).round_()
    r = y - n * _PIO2[0]
    r = (r - n * _PIO2[1]).sub_(n * _PIO2[2])
    square = r * r
    sine = _horner(_SIN_TERMS, square).mul_(r)
    cosine = _horner(_COS_TERMS, square)
    quadrant = n.to(torch.int64)
    swap = (quadrant & 1) == 1
    cos = torch.where(swap, sine, cosine)
    sin = torch.where(swap, cosine, sine)
    cos = torch.where(((quadrant + 1) & 2) == 2, -cos, cos)
    sin = torch.where((quadrant & 2) == 2, -sin, sin)
    return cos.to(torch.float32), sin.to(torch.float32)


def _fp32(function: str, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"{function}: expected torch.float32, found {x.dtype}")
    return x
