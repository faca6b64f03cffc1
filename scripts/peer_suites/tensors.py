"""The few functions of torch that tests of a server use, with numpy. torch itself would be a download of gigabytes."""

import types

import numpy as np


class DType:
    def __init__(self, name: str, itemsize: int):
        self.name = name
        self.itemsize = itemsize


def _float8(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """The values of the 256 codes of an 8-bit float; e4m3 has no infinities, and nothing here meets one."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        value = mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias)
        values.append(sign * value)
    return np.array(values, dtype=np.float32)


DTYPES = {
    "float32": DType("float32", 4),
    "float16": DType("float16", 2),
    "bfloat16": DType("bfloat16", 2),
    "float8_e4m3fn": DType("float8_e4m3fn", 1),
    "float8_e5m2": DType("float8_e5m2", 1),
    "int32": DType("int32", 4),
    "int64": DType("int64", 8),
    "uint8": DType("uint8", 1),
    "bool": DType("bool", 1),
}
FLOAT8 = {"float8_e4m3fn": _float8(4, 3), "float8_e5m2": _float8(5, 2)}


class Tensor(np.ndarray):
    def to(self, dtype):
        return self

    def view(self, dtype=None):
        """The same bytes read as another type; the values are held as float32."""
        if not isinstance(dtype, DType):
            return super().view(dtype) if dtype != -1 else self.reshape(-1)
        if dtype.name == "bfloat16":
            return tensor((super().view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        if dtype.name in FLOAT8:
            return tensor(FLOAT8[dtype.name][np.asarray(self)])
        return tensor(np.asarray(self).astype(dtype.name))


def tensor(values, dtype=None):
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=np.float32)
    return array.view(Tensor)


def allclose(one, other, rtol=1e-5, atol=1e-8):
    return bool(np.allclose(one, other, rtol=rtol, atol=atol))


def softmax(values, dim=-1):
    powers = np.exp(values - values.max(axis=dim, keepdims=True))
    return powers / powers.sum(axis=dim, keepdims=True)


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def normalize(values, p=2, dim=1):
    return values / np.linalg.norm(values, ord=p, axis=dim, keepdims=True)


def cosine_similarity(one, other, dim=1):
    return float(np.sum(one * other) / (np.linalg.norm(one) * np.linalg.norm(other)))


def iinfo(dtype):
    return np.iinfo(dtype.name)


def add_to(torch: types.ModuleType, functional: types.ModuleType):
    """Gives the stubs of torch and torch.nn.functional these functions."""
    for name, dtype in DTYPES.items():
        setattr(torch, name, dtype)
    torch.long = DTYPES["int64"]
    torch.Tensor, torch.tensor, torch.from_numpy = Tensor, tensor, tensor
    torch.allclose, torch.iinfo = allclose, iinfo
    for function in (softmax, sigmoid, normalize, cosine_similarity):
        setattr(functional, function.__name__, function)
