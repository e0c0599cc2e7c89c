"""Kernels under Triton's interpreter, which runs them as NumPy on CPU tensors.

Triton decides at import whether a kernel is interpreted, so a second process does it: `Interpreter`
starts one with TRITON_INTERPRET=1 and calls functions of this module there. Ops take the GPU path
from checks to launch, with e4m3 coded in integers. Where the interpreter computes what no GPU does,
it is mended (`mend`), after which only the order of sums differs.
"""

import contextlib
import io
import math
import mmap
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from support import PER_TOKEN

from csrc_free_ops.numerics import (
    e2m1_code,
    e4m3_code,
    e4m3_value,
    pow2_exponent,
    pow2_reciprocal,
    row_scale,
    tile_scale,
)
from csrc_free_ops.rows import token_and_task
from dsv32_ops import launch
from dsv32_ops.ops import mtp, norm_rope, query

GPU_PATHS = {
    "fused_norm_rope": norm_rope._cuda,
    "fused_q": query._cuda,
    "fused_eh_norm": mtp._cuda_eh,
    "fused_embed_norm": mtp._cuda_embed,
    "fused_embed_eh_norm": mtp._cuda_embed_eh,
}


class Interpreter:
    """Calls functions of this module in the interpreting process. Use as a context manager."""

    def __init__(self):
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), mend)

    def __enter__(self):
        # The process starts, and reads its environment, at the first call.
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1", DSV32_OPS_SOFT_FP8="1"):
            self._pool.submit(os.getpid).result()
        return self

    def __exit__(self, *exception):
        self._pool.shutdown()

    def __call__(self, function, *arguments):
        """(result, arguments after the call): tensors that share memory share it there too."""
        answer = self._pool.submit(_answer, function.__name__, _packed(arguments)).result()
        return _unpacked(answer)


def _packed(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def _answer(function, data):
    arguments = _unpacked(data)
    return _packed((globals()[function](*arguments), arguments))


def mend():
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    builder = interpreter.InterpreterBuilder
    builder.create_fma = _fma
    builder.create_fp_trunc = _fp_trunc
    # np.maximum keeps a NaN; PTX max and v_max return the other operand.
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda arg: _fp32(arg) if type(arg) is float else convert(arg)


def _fp32(value):
    """A float argument is fp32; the interpreter leaves it a Python float."""
    from triton.runtime.interpreter import TensorHandle

    handle = TensorHandle(np.array([value], dtype=np.float32), tl.float32)
    return tl.tensor(handle, tl.float32)


def _fma(builder, x, y, z):
    """One rounding, as the product of two fp32 is exact in float64; the interpreter has two."""
    with np.errstate(all="ignore"):
        exact = x.data.astype(np.float64) * y.data + z.data
        return type(z)(exact.astype(np.float32), z.dtype.scalar)


def _fp_trunc(builder, x, dtype):
    """To nearest even; the interpreter truncates fp32 to bf16."""
    if dtype.scalar != tl.bfloat16:
        return builder.cast_impl(x, dtype)
    rounded = torch.from_numpy(np.ascontiguousarray(x.data)).to(torch.bfloat16)
    return type(x)(rounded.view(torch.uint16).numpy(), dtype.scalar)


def op(name, inputs, *buffers):
    """Run an op; `buffers` only travel along, so that memory around the inputs can be looked at."""
    schema = getattr(torch.ops.dsv32, name).default._schema
    arguments = (inputs.get(a.name, a.default_value) for a in schema.arguments)
    with np.errstate(all="ignore"):
        return GPU_PATHS[name](*arguments)


def whole_op(name, inputs):
    """`op` with one program for all tasks of a token, as in large batches."""
    with mock.patch.dict(launch.NORM_ROPE_PARTS, dict.fromkeys((True, False), ((1, 1),))):
        return op(name, inputs)


FAR_TOKENS = 65_537
FAR_ROW = 32_800  # elements: row 65,536 starts past 2^31
FAR_BLOCK = 2**30 + 64
FAR_ROWS = PER_TOKEN | {"kv_c_out", "k_pe_out", "index_k_out", "topk_indices_buffer"}
TABLES = {"rope_cos_sin", "index_rope_cos_sin", "q_pe_cos_sin", "index_q_cos_sin", "embed_table"}


def far_op(name, inputs, tokens):
    """Run the programs of some tokens out of 65,537, on tensors whose offsets pass 2^31.

    Row i of a per-token tensor becomes row tokens[i] of one with a huge stride, likewise the last
    rows of tables and the blocks of caches. Results and written tensors come back as they went.
    """
    far = {}
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            far[key] = value
        elif key in FAR_ROWS:
            far[key] = _far_rows(value, FAR_TOKENS)
            far[key][tokens] = value[: len(tokens)]
        elif key in TABLES:
            far[key] = _far_rows(value, FAR_TOKENS)
            far[key][-value.shape[0] :] = value
        elif key in ("mla_kv_cache", "indexer_k_cache"):
            strides = (FAR_BLOCK, *value.stride()[1:])
            far[key] = sparse(value.shape, strides, value.dtype).copy_(value)
        else:
            far[key] = value
    table = next((inputs[key] for key in inputs if key in TABLES), None)
    if table is not None:
        rows = "input_ids" if "input_ids" in far else "positions"
        far[rows][tokens] += FAR_TOKENS - table.shape[0]
    with only(tokens, launch.QUERY_FEW_TOKENS if name == "fused_q" else FAR_TOKENS):
        results = op(name, far)
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            if key in FAR_ROWS:
                value[: len(tokens)] = far[key][tokens]
            elif key.endswith("_k_cache") or key.endswith("_kv_cache"):
                value.copy_(far[key])
    return tuple(t[tokens] for t in (results if isinstance(results, tuple) else (results,)))


def _far_rows(value, rows):
    if value.dim() == 1:
        return sparse((rows,), (1,), value.dtype)
    if value.dim() == 2:
        return sparse((rows, value.shape[1]), (FAR_ROW, 1), value.dtype)
    if value.stride(0) < value.stride(1):
        # A transposed batched product: the stride of a head grows with the tokens.
        dim = value.shape[2]
        return sparse((rows, *value.shape[1:]), (dim, rows * dim, 1), value.dtype)
    strides = (max(FAR_ROW, value.stride(0)), *value.stride()[1:])
    return sparse((rows, *value.shape[1:]), strides, value.dtype)


def sparse(shape, strides, dtype):
    """A tensor of zeros that takes memory only where it is touched, and as much ahead of it.

    An offset that wraps around to negative reads zeros there, where it would end the process.
    """
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    nbytes = 2 * elements * dtype.itemsize
    # mmap.MAP_NORESERVE has its name from Python 3.13 on.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    memory = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
    return memory.view(dtype).as_strided(shape, strides, elements)


@contextlib.contextmanager
def only(tokens, few):
    """Run only the programs of these tokens.

    A program takes milliseconds, so the interpreter's loop over the grid is shortened; the grid
    that a kernel sees, its program ids and its tensors stay those of the whole launch. Up to `few`
    tokens take the order of the grid.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx

    class Shortened(interpreter.GridExecutor):
        def __init__(self, fn, arg_names, grid, *rest):
            num_tokens, tasks = grid[0], math.prod(grid[1:])
            programs = [
                program_of(token, task, num_tokens, tasks, few)
                for token in tokens
                for task in range(tasks)
            ]
            super().__init__(fn, arg_names, (len(programs),), *rest)
            builder.set_grid_dim = lambda *_: set_dim(num_tokens, tasks, 1)
            builder.set_grid_idx = lambda index, *_: set_idx(*programs[index], 0)

    with (
        mock.patch.object(interpreter, "GridExecutor", Shortened),
        mock.patch.object(builder, "set_grid_dim"),
        mock.patch.object(builder, "set_grid_idx"),
    ):
        yield


def program_of(token, task, num_tokens, tasks, few):
    """(x, y) of the program that does a task of a token."""
    if num_tokens <= few:
        return token, task
    number = token * tasks + task
    return number % num_tokens, number // num_tokens


@triton.jit
def order_kernel(out_ptr, TASKS: tl.constexpr, FEW: tl.constexpr):
    token, task = token_and_task(TASKS, FEW)
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr + token * TASKS + task, place)


def order_of_programs(num_tokens, tasks, few):
    """Place of each (token, task) in the order in which a GPU starts the programs of a grid."""
    out = torch.full((num_tokens, tasks), -1)
    order_kernel[(num_tokens, tasks)](out, tasks, few)
    return out


@triton.jit
def narrow_kernel(x_ptr, row_stride, out_ptr):
    token = tl.program_id(0)
    tl.store(out_ptr + token, tl.load(x_ptr + token * row_stride))


@triton.jit
def wide_kernel(x_ptr, row_stride, out_ptr):
    token = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + token, tl.load(x_ptr + token * row_stride))


def far_copy(kernel, values, tokens):
    """The values as a kernel reads them from rows `tokens` of a far tensor's first column."""
    x = _far_rows(values[:, None], FAR_TOKENS)
    x[tokens, 0] = values
    out = torch.empty(FAR_TOKENS, dtype=values.dtype)
    with only(tokens, FAR_TOKENS), np.errstate(all="ignore"):
        globals()[kernel][(FAR_TOKENS,)](x, x.stride(0), out)
    return out[tokens]


@triton.jit
def code_kernel(
    x_ptr, out_ptr, size,
    FUNCTION: tl.constexpr, LIMIT: tl.constexpr, FNUZ: tl.constexpr, SOFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    x = tl.load(x_ptr + index, mask=mask)
    if FUNCTION == "e4m3_code":
        y = e4m3_code(x, LIMIT, FNUZ, SOFT)
    elif FUNCTION == "e2m1_code":
        y = e2m1_code(x, SOFT).to(tl.uint8)
    elif FUNCTION == "e4m3_value":
        y = e4m3_value(x)
    elif FUNCTION == "row_scale":
        y = row_scale(x, LIMIT)
    elif FUNCTION == "tile_scale":
        y = tile_scale(x, LIMIT)
    elif FUNCTION == "pow2_reciprocal":
        y = pow2_reciprocal(x)
    else:
        tl.static_assert(FUNCTION == "pow2_exponent")
        y = pow2_exponent(x)
    tl.store(out_ptr + index, y, mask=mask)


CODES = ("e4m3_code", "e2m1_code", "pow2_exponent")


def codes(function, x, *, limit=448.0, fnuz=False, soft=True):
    """A function of csrc_free_ops.numerics for each element: interpreted, or compiled on a GPU."""
    out = torch.empty(x.shape, dtype=torch.uint8 if function in CODES else torch.float32,
                      device=x.device)  # fmt: skip
    block = 65_536 if x.device.type == "cpu" else 1024
    with np.errstate(all="ignore"):
        code_kernel[(triton.cdiv(x.numel(), block),)](
            x, out, x.numel(), function, limit, fnuz, soft, block
        )
    return out


def soft_codes(function, x, limit=448.0, fnuz=False):
    return codes(function, x, limit=limit, fnuz=fnuz)
