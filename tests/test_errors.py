"""Every bad argument of every op is refused before anything is written, with the argument's name.

The table is one: each fault is put to the CPU op, to the fake kernel with CPU and with CUDA tensors
and, where there is a GPU, to the real CUDA op; each time to the op, its out form and its traced
form. All have to say the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support import FN, FNUZ, PER_TOKEN, model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv32_ops import layouts, testing

N = 5
SMALL = model(
    kv_lora_rank=16, rope_dim=4, index_dim=16, hidden_size=24, vocab_size=31, max_positions=37
)
FIXED = model(max_positions=37)  # kv 512 and rope 64, which the ds_mla modes demand
OUTS = {
    "fused_norm_rope": ("q_c_out",),
    "fused_q": (),
    "fused_eh_norm": ("out",),
    "fused_embed_norm": ("residual_out", "normed_out"),
    "fused_embed_eh_norm": ("out",),
}

Inputs = dict[str, Any]
Change = Callable[[Inputs], Any]


class Fault(NamedTuple):
    op: str
    argument: str
    what: str
    change: Change
    error: type[Exception] = ValueError
    says: str = ""
    """What the text begins with; the argument's name unless another one shows the fault."""
    mode: str = "auto"
    """The mla_kv_cache_dtype of the sound call."""

    @property
    def id(self) -> str:
        mode = "" if self.mode == "auto" else f"-{self.mode}"
        return f"{self.op}-{self.argument}-{self.what}{mode}"


# Sound calls


def norm_rope_inputs(mode: str = "auto") -> Inputs:
    config = FIXED if mode in ("fp8_ds_mla", "nvfp4_ds_mla") else SMALL
    inputs = testing.norm_rope_inputs(config, N, mode=mode, block_size=4, outs=True)
    inputs["indexer_slot_mapping"] = inputs["slot_mapping"].clone()
    inputs["q_c_out"] = testing.poison(torch.empty(N, config.q_lora_rank, dtype=torch.bfloat16))
    return inputs


def mtp_inputs(op: str) -> Inputs:
    makers: dict[str, Callable[..., Inputs]] = {
        "fused_eh_norm": testing.eh_norm_inputs,
        "fused_embed_norm": testing.embed_norm_inputs,
        "fused_embed_eh_norm": testing.embed_eh_norm_inputs,
    }
    inputs = makers[op](SMALL, N)
    width = SMALL.hidden_size * (1 if op == "fused_embed_norm" else 2)
    for out in OUTS[op]:
        inputs[out] = testing.poison(torch.empty(N, width, dtype=torch.bfloat16))
    return inputs


def sound(op: str, mode: str = "auto") -> Inputs:
    if op == "fused_norm_rope":
        return norm_rope_inputs(mode)
    return testing.q_inputs(SMALL, N, 2) if op == "fused_q" else mtp_inputs(op)


# Changes


def put(**values: Any) -> Change:
    return lambda inputs: inputs.update(values)


def to(name: str, transform: Callable[[Tensor], Tensor]) -> Change:
    return lambda inputs: inputs.update({name: transform(inputs[name])})


def last_stride_2(t: Tensor) -> Tensor:
    return testing.poison(t.new_empty(*t.shape[:-1], 2 * t.shape[-1]))[..., ::2].copy_(t)


def one_more(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.cat((t, t.narrow(dim, 0, 1)), dim)


def one_less(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.narrow(dim, 0, t.shape[dim] - 1)


def shape(*sizes: int) -> Callable[[Tensor], Tensor]:
    return lambda t: testing.poison(t.new_empty(sizes))


def retyped(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: testing.poison(torch.empty_strided(t.shape, t.stride(), dtype=dtype))


def repitched(*strides: int, offset: int = 0) -> Callable[[Tensor], Tensor]:
    """The same shape and type over poisoned memory, with these strides."""

    def transform(t: Tensor) -> Tensor:
        size = offset + 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
        memory = testing.poison(torch.empty(size, dtype=t.dtype))
        return memory.as_strided(t.shape, strides, offset)

    return transform


def needs_grad(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


RANKS = {"rank too high": lambda t: t.unsqueeze(0), "rank too low": lambda t: t.select(0, 0)}
EXPANDED = {
    "rows share memory": lambda t: t[:1].expand(t.shape),
    "columns share memory": lambda t: t[:, :1].expand(t.shape),
    "rows overlap": lambda t: repitched(t.shape[1] - 1, 1)(t),
}
FEWER = {"too few rows": one_less(0)}
ROWS = {**FEWER, "too many rows": one_more(0)}
COLUMNS = {"too few columns": one_less(-1), "too many columns": one_more(-1)}
STRIDE = {"last stride 2": last_stride_2}
ELSEWHERE = {"on another device": lambda t: t.to("meta")}
EMPTY_ROWS = {"no columns": lambda t: t[..., :0]}
NO_ROWS = {"no rows": lambda t: t[:0]}
SCALE = {"two elements": lambda t: t.repeat(2), "no element": lambda t: t[:0], **ELSEWHERE}
FLOAT_TYPES = {"float64": lambda t: t.double(), "int32": lambda t: t.int()}
INDEX_TYPES = {"int16": lambda t: t.short(), "float32": lambda t: t.float()}
TOKEN_ROWS = {**RANKS, **ROWS, **EMPTY_ROWS, **STRIDE, **ELSEWHERE}
WEIGHT = {**RANKS, **ROWS, **STRIDE, **ELSEWHERE}
TABLE = {**RANKS, **NO_ROWS, **COLUMNS, **STRIDE, **ELSEWHERE}
OUT = {**RANKS, **ROWS, **COLUMNS, **STRIDE, **EXPANDED, **ELSEWHERE}
MAP = {**RANKS, **STRIDE, **ELSEWHERE}
GRAD = {"needs a gradient": needs_grad}


def faults(
    op: str,
    arguments: str,
    changes: dict[str, Any],
    error: type[Exception] = ValueError,
    mode: str = "auto",
) -> Iterator[Fault]:
    for argument in arguments.split():
        for what, transform in changes.items():
            yield Fault(op, argument, what, to(argument, transform), error, mode=mode)


def missing(op: str, arguments: str) -> Iterator[Fault]:
    for argument in arguments.split():
        yield Fault(op, argument, "missing", put(**{argument: None}))


def like_positions(op: str, first: str) -> Iterator[Fault]:
    """N and the device are those of positions, so that another argument disagrees with it."""
    for what, transform in {**ROWS, **ELSEWHERE}.items():
        yield Fault(op, "positions", what, to("positions", transform), says=first)


def norm_rope_faults() -> Iterator[Fault]:
    op = "fused_norm_rope"
    rows = "q_c kv_c k_pe index_k"
    weights = "q_norm_weight kv_norm_weight index_k_norm_weight index_k_norm_bias"
    tables, outs = "rope_cos_sin index_rope_cos_sin", "q_c_out kv_c_out k_pe_out index_k_out"
    maps = "slot_mapping indexer_slot_mapping"
    yield from faults(op, "positions", RANKS | STRIDE)
    yield from like_positions(op, "q_c")
    yield from faults(op, f"positions {maps}", INDEX_TYPES, TypeError)
    yield from faults(op, maps, MAP)
    yield from faults(op, rows, TOKEN_ROWS)
    yield from faults(op, weights, WEIGHT)
    yield from faults(op, "rope_cos_sin", TABLE)
    yield from faults(op, "index_rope_cos_sin", {**RANKS, **NO_ROWS, **STRIDE, **ELSEWHERE,
        "odd columns": one_less(-1), "no columns": lambda t: t[:, :0],
        "more columns than index_k": shape(7, 18)})  # fmt: skip
    yield from faults(op, outs, OUT)
    yield from faults(op, f"{rows} {weights} {tables} {outs}", FLOAT_TYPES, TypeError)
    yield from faults(op, f"{rows} {weights} {tables} {outs} mla_kv_cache", GRAD, RuntimeError)
    yield from faults(op, "topk_indices_buffer", RANKS | EXPANDED | STRIDE | ELSEWHERE)
    yield from faults(op, "topk_indices_buffer", {"too few rows": lambda t: t[: N - 1]})
    wrong = {"int64": retyped(torch.int64), "float32": retyped(torch.float32)}
    yield from faults(op, "topk_indices_buffer", wrong, TypeError)
    yield from missing(
        op, "index_k index_k_norm_weight index_k_norm_bias index_rope_cos_sin slot_mapping"
    )
    yield Fault(op, "slot_mapping", "no map for the indexer cache",
                put(slot_mapping=None, indexer_slot_mapping=None, mla_kv_cache=None))  # fmt: skip
    yield Fault(op, "k_pe", "odd", lambda inputs: inputs.update(
        k_pe=inputs["k_pe"][:, :3], rope_cos_sin=inputs["rope_cos_sin"][:, :3],
        k_pe_out=inputs["k_pe_out"][:, :3]))  # fmt: skip
    yield Fault(op, "index_k_out", "without an indexer", put(has_indexer=False))
    yield Fault(op, "index_k_out", "is index_k", lambda i: i.update(index_k_out=i["index_k"]))
    yield Fault(op, "index_k_out", "overlaps index_k", overlapping(columns=1))
    yield Fault(op, "index_k_out", "one row behind index_k", overlapping(rows=1))
    yield Fault(op, "index_k_out", "within index_k's rows", overlapping(pitch=8))
    for mode in ("fp8", "fp8_e4m3"):
        yield from faults(op, "mla_k_scale", SCALE, mode=mode)
        yield from faults(op, "mla_k_scale", FLOAT_TYPES, TypeError, mode=mode)
        yield from faults(op, "mla_k_scale", GRAD, RuntimeError, mode=mode)
    yield from choice_faults(op)
    yield from mla_cache_faults(op)
    yield from index_cache_faults(op)


def overlapping(rows: int = 0, columns: int = 0, pitch: int = 40) -> Change:
    """index_k in the middle of a buffer, and an output that starts so much behind it."""

    def change(inputs: Inputs) -> None:
        key = inputs["index_k"]
        buffer = testing.poison(torch.empty(40 * (N + 2), dtype=key.dtype))
        start = 40 + rows * 40 + columns
        inputs["index_k"] = buffer.as_strided(key.shape, (40, 1), 40).copy_(key)
        inputs["index_k_out"] = buffer.as_strided(key.shape, (max(pitch, key.shape[1]), 1), start)

    return change


def choice_faults(op: str) -> Iterator[Fault]:
    for mode in ("fp8_ds", "FP8", "", "float32"):
        yield Fault(op, "mla_kv_cache_dtype", f"is {mode!r}", put(mla_kv_cache_dtype=mode))
    no_cache: Inputs = {"mla_kv_cache": None, "mla_kv_cache_dtype": "turbo"}
    yield Fault(op, "mla_kv_cache_dtype", "without a cache", put(**no_cache))
    for name in ("ue8m0", "FP32"):
        yield Fault(op, "index_scale_format", f"is {name!r}", put(index_scale_format=name))
    yield Fault(op, "fp8_dtype", "float16", put(fp8_dtype=torch.float16), TypeError)
    yield Fault(op, "fp8_dtype", "e5m2", put(fp8_dtype=torch.float8_e5m2), TypeError)
    typed = to("mla_kv_cache", lambda t: t.view(FN))
    yield Fault(op, "mla_kv_cache", "another fp8 type than fp8_dtype",
                lambda i: (i.update(fp8_dtype=FNUZ), typed(i)), TypeError, mode="fp8")  # fmt: skip
    yield Fault(op, "indexer_k_cache", "another fp8 type than mla_kv_cache",
                lambda i: (typed(i), to("indexer_k_cache", lambda t: t.view(FNUZ))(i)),
                TypeError, mode="fp8")  # fmt: skip


def mla_cache_faults(op: str) -> Iterator[Fault]:
    name = "mla_kv_cache"
    yield from faults(op, name, RANKS | STRIDE | ELSEWHERE)
    for mode, wrong in (
        ("auto", "uint8 float8_e4m3fn float64"), ("bfloat16", "float16"), ("float16", "bfloat16"),
        ("fp8", "bfloat16 float8_e5m2"), ("fp8_e4m3", "int8"), ("fp8_ds_mla", "bfloat16"),
        ("nvfp4_ds_mla", "float8_e4m3fn"),
    ):  # fmt: skip
        types = {dtype: retyped(getattr(torch, dtype)) for dtype in wrong.split()}
        yield from faults(op, name, types, TypeError, mode=mode)
    for mode in layouts.MLA_MODES:
        narrow = {"too narrow": lambda t: t[..., :-4], "no offsets": lambda t: t[:, :0]}
        yield from faults(op, name, narrow, mode=mode)
        yield from faults(op, name, {
            "blocks overlap": lambda t: repitched(4 * t.shape[2] - 4, t.shape[2], 1)(t),
            "blocks share memory": lambda t: t[:1].expand(t.shape),
            "entries overlap": lambda t: repitched(8 * t.shape[2], t.shape[2] - 4, 1)(t),
            "entries share memory": lambda t: t[:, :1].expand(t.shape),
            "entry-major, but blocks overlap":
                lambda t: repitched(t.shape[2] - 4, 8 * t.shape[2], 1)(t),
        }, mode=mode)  # fmt: skip
    yield from faults(op, name, {
        "address no multiple of 4": repitched(656 * 4, 656, 1, offset=2),
        "entry stride no multiple of 4": repitched(658 * 4, 658, 1),
        "block stride no multiple of 4": repitched(656 * 4 + 2, 656, 1),
    }, mode="fp8_ds_mla")  # fmt: skip
    for mode in ("fp8_ds_mla", "nvfp4_ds_mla"):
        yield Fault(op, "kv_c", "not 512 columns", cut("kv_c", "kv_norm_weight"), mode=mode)
        yield Fault(op, "k_pe", "not 64 columns", cut("k_pe", "rope_cos_sin"), mode=mode)


def cut(*names: str) -> Change:
    return lambda inputs: inputs.update({name: inputs[name][..., :-2] for name in names})


def index_cache_faults(op: str) -> Iterator[Fault]:
    name = "indexer_k_cache"
    yield from faults(op, name, RANKS | COLUMNS | STRIDE | ELSEWHERE)
    yield from faults(
        op, name, {"int8": retyped(torch.int8), "bfloat16": retyped(torch.bfloat16)}, TypeError
    )
    yield from faults(op, name, {
        "no offsets": lambda t: t[:, :0],
        "gaps between tokens": repitched(24 * 4, 24, 1),
        "tokens share memory": lambda t: t[:, :1].expand(t.shape),
        "blocks overlap": repitched(20 * 4 - 4, 20, 1),
        "blocks share memory": lambda t: t[:1].expand(t.shape),
        "address no multiple of 4": repitched(80, 20, 1, offset=2),
        "block stride no multiple of 4": repitched(82, 20, 1),
    })  # fmt: skip
    for what, shuffled, sizes, width in (
        ("block_size 8 shuffled", True, (3, 8, 20), 16),
        ("12 columns shuffled", True, (3, 16, 16), 12),
        ("scales no multiple of 4 apart", False, (3, 3, 18), 14),
    ):
        yield Fault(op, name, what, resized(shuffled, sizes, width))


def resized(shuffled: bool, sizes: tuple[int, ...], width: int) -> Change:
    """Another indexer cache, and keys that fit it."""

    def change(inputs: Inputs) -> None:
        for name in ("index_k", "index_k_norm_weight", "index_k_norm_bias", "index_k_out"):
            inputs[name] = inputs[name][..., :width]
        cache = testing.poison(torch.empty(sizes, dtype=torch.uint8))
        inputs.update(indexer_cache_shuffled=shuffled, indexer_k_cache=cache)

    return change


def query_faults() -> Iterator[Fault]:
    op = "fused_q"
    tables = "q_pe_cos_sin index_q_cos_sin"
    yield from faults(op, "positions", RANKS | STRIDE)
    yield from like_positions(op, "q_pe")
    yield from faults(op, "positions", INDEX_TYPES, TypeError)
    yield from faults(op, "q_pe ql_nope index_q index_weights", TOKEN_ROWS)
    yield from faults(op, "q_pe ql_nope index_q", {"no heads": lambda t: t[:, :0]})
    yield from faults(op, "ql_nope", {"too few heads": one_less(1), "too many heads": one_more(1)})
    yield from faults(op, "index_weights", COLUMNS)
    yield from faults(op, "q_pe_cos_sin", TABLE)
    yield from faults(op, "index_q_cos_sin", {**RANKS, **NO_ROWS, **STRIDE, **ELSEWHERE,
        "odd columns": one_less(-1), "more columns than index_q": shape(7, 18)})  # fmt: skip
    yield Fault(op, "q_pe", "odd", cut_odd)
    yield from faults(op, "q_scale", SCALE)
    floats = f"q_pe ql_nope index_q index_weights {tables} q_scale"
    yield from faults(op, floats, FLOAT_TYPES, TypeError)
    yield from faults(op, floats, GRAD, RuntimeError)
    yield from missing(op, "index_q index_q_cos_sin index_weights")
    yield Fault(op, "fp8_dtype", "float16", put(fp8_dtype=torch.float16), TypeError)


def cut_odd(inputs: Inputs) -> None:
    inputs.update(q_pe=inputs["q_pe"][..., :3], q_pe_cos_sin=inputs["q_pe_cos_sin"][:, :3])


def mtp_faults() -> Iterator[Fault]:
    for op, embeds in (("fused_eh_norm", "inputs_embeds"), ("fused_embed_eh_norm", "embed_table")):
        first = "inputs_embeds" if op == "fused_eh_norm" else "input_ids"
        weights = "enorm_weight hnorm_weight"
        yield from faults(op, "positions", RANKS | STRIDE)
        yield from like_positions(op, first)
        yield from faults(op, "positions", INDEX_TYPES, TypeError)
        yield from faults(op, "previous_hidden", TOKEN_ROWS | COLUMNS)
        yield from faults(op, weights, WEIGHT)
        yield from faults(op, "out", OUT)
        yield from faults(op, f"{embeds} previous_hidden {weights} out", FLOAT_TYPES, TypeError)
        yield from faults(op, "previous_hidden", {"another type": lambda t: t.float()}, TypeError)
        yield from faults(op, f"{embeds} previous_hidden {weights} out", GRAD, RuntimeError)
    yield from faults("fused_eh_norm", "inputs_embeds", TOKEN_ROWS)
    yield from faults("fused_embed_eh_norm", "input_ids", ROWS)
    # The ids set the number of rows and the device of fused_embed_norm.
    elsewhere = to("input_ids", ELSEWHERE["on another device"])
    yield Fault("fused_embed_norm", "input_ids", "on another device", elsewhere, says="embed_table")
    for op in ("fused_embed_norm", "fused_embed_eh_norm"):
        yield from faults(op, "input_ids", IDS)
        yield from faults(op, "input_ids", INDEX_TYPES, TypeError)
        yield from faults(op, "embed_table", RANKS | NO_ROWS | EMPTY_ROWS | STRIDE | ELSEWHERE)
    op = "fused_embed_norm"
    yield from faults("fused_embed_eh_norm", "input_ids", ELSEWHERE)
    yield from faults(op, "norm_weight", WEIGHT)
    yield from faults(op, "residual_out normed_out", OUT)
    floats = "embed_table norm_weight residual_out normed_out"
    yield from faults(op, floats, FLOAT_TYPES, TypeError)
    yield from faults(op, "residual_out", {"another type": retyped(torch.float32)}, TypeError)
    yield from faults(op, floats, GRAD, RuntimeError)


IDS = {
    "no dimension": lambda t: t[0],
    "three dimensions": lambda t: t.view(1, 1, -1),
    "last stride 2": last_stride_2,
    "a column of a matrix": lambda t: last_stride_2(t).view(-1, 1),
    "rows with stride 2": lambda t: last_stride_2(t).view(1, -1),
}

FAULTS = [*norm_rope_faults(), *query_faults(), *mtp_faults()]
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)


def ruined(fault: Fault) -> Inputs:
    inputs = sound(fault.op, fault.mode)
    fault.change(inputs)
    return inputs


def placed(inputs: Inputs, device: str, fake: bool = False) -> Inputs:
    """The tensors on `device` with their strides, offsets and shared memory.

    Those on "meta" stand for a tensor on another device and come to the CPU, or, with fake tensors
    on the CPU, to a GPU.
    """
    other = "cuda" if fake and device == "cpu" else "cpu"
    memories: dict[tuple[int, torch.dtype], Tensor] = {}

    def memory(t: Tensor) -> Tensor:
        size = t.untyped_storage().nbytes() // t.itemsize
        if fake:
            return torch.empty(size, dtype=t.dtype, device=device)
        return memory_of(t)[: size * t.itemsize].to(device).view(t.dtype)

    def place(t: Tensor) -> Tensor:
        if t.device.type == "meta":
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=other)
        key = t.untyped_storage()._cdata, t.dtype
        if key not in memories:
            memories[key] = memory(t)
        view = memories[key].as_strided(t.shape, t.stride(), t.storage_offset())
        return view.requires_grad_() if t.requires_grad else view

    return {name: place(v) if isinstance(v, Tensor) else v for name, v in inputs.items()}


def forms_of(op: str, inputs: Inputs, fault: Fault | None = None) -> dict[str, Callable[[], Any]]:
    """The calls that have to refuse the fault: of the op, its out form and its traced form."""
    ops = torch.ops.dsv32
    functional = {name: value for name, value in inputs.items() if name not in OUTS[op]}
    forms = {"out": lambda: getattr(ops, f"{op}_out")(**inputs)} if OUTS[op] else {}
    if fault is None or fault.argument not in OUTS[op]:
        forms["op"] = lambda: getattr(ops, op)(**functional)
        forms["traced"] = lambda: getattr(ops, f"{op}_triton")(**functional)
    return forms


def texts_of(fault: Fault, inputs: Inputs) -> list[str]:
    texts = []
    for call in forms_of(fault.op, inputs, fault).values():
        with pytest.raises(fault.error) as raised:
            call()
        # A ValueError for a type or the reverse would be as wrong as none.
        assert raised.type is fault.error
        texts.append(str(raised.value))
    return texts


def assert_names(fault: Fault, texts: list[str]) -> str:
    (text,) = set(texts)
    pattern = rf"{fault.says or fault.argument}: expected \S.*, got \S.*"
    assert re.fullmatch(pattern, text), text
    assert re.search(rf"\b{fault.argument}\b", text)
    return text


def memory_of(t: Tensor) -> Tensor:
    """The bytes of the whole memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def contents(inputs: Inputs) -> dict[str, Tensor]:
    return {
        name: memory_of(value).clone()
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.device.type != "meta"
    }


def assert_refused(fault: Fault, inputs: Inputs) -> str:
    before = contents(inputs)
    text = assert_names(fault, texts_of(fault, inputs))
    assert_untouched(inputs, before)
    return text


def assert_untouched(inputs: Inputs, before: dict[str, Tensor]) -> None:
    for name, memory in contents(inputs).items():
        assert torch.equal(memory, before[name]), f"{name} was written"


def fake_text(fault: Fault, inputs: Inputs, device: str) -> str:
    with FakeTensorMode():
        return assert_names(fault, texts_of(fault, placed(inputs, device, fake=True)))


# Tests


@pytest.mark.parametrize("op", OUTS)
def test_the_sound_calls_are_sound(op):
    for mode in layouts.MLA_MODES if op == "fused_norm_rope" else ("auto",):
        with torch.no_grad():
            for call in forms_of(op, sound(op, mode)).values():
                call()
        for device in ("cpu", "cuda"):
            with FakeTensorMode():
                forms = forms_of(op, placed(sound(op, mode), device, fake=True))
                del forms["traced"]  # it would launch its kernel
                for call in forms.values():
                    call()


def test_the_table_covers_every_tensor():
    for op in OUTS:
        inputs = sound(op, "fp8" if op == "fused_norm_rope" else "auto")
        tensors = {name for name, value in inputs.items() if isinstance(value, Tensor)}
        assert tensors <= {fault.argument for fault in FAULTS if fault.op == op}


@each_fault
def test_a_fault_is_refused_before_anything_is_written(fault):
    inputs = ruined(fault)
    text = assert_refused(fault, inputs)
    on_cpu, on_cuda = (fake_text(fault, inputs, device) for device in ("cpu", "cuda"))
    if fault.what != "on another device":
        assert text == on_cpu == on_cuda


@functools.cache
def remember_a_sound_call(op: str, mode: str) -> None:
    """Repeated calls skip the checks: a fault may not be taken for a repetition."""
    forms = forms_of(op, placed(rememberable(sound(op, mode)), "cuda"))
    for form in forms.keys() - {"traced"}:
        forms[form]()


def rememberable(inputs: Inputs) -> Inputs:
    """Calls with index_k_out are checked every time."""
    return {name: value for name, value in inputs.items() if name != "index_k_out"}


@pytest.mark.gpu
@each_fault
def test_a_fault_is_refused_on_a_gpu(fault):
    remember_a_sound_call(fault.op, fault.mode)
    inputs = ruined(fault)
    if fault.argument != "index_k_out":
        inputs = rememberable(inputs)
    text = assert_refused(fault, placed(inputs, "cuda"))
    if fault.what != "on another device":
        assert text == fake_text(fault, inputs, "cuda")


def first_of_each_argument() -> list[Fault]:
    return list({(fault.op, fault.argument): fault for fault in reversed(FAULTS)}.values())


@pytest.mark.parametrize("fault", first_of_each_argument(), ids=lambda fault: fault.id)
def test_a_compiled_model_fails_at_trace_time_with_the_same_text(fault):
    inputs = ruined(fault)
    forms = forms_of(fault.op, inputs, fault)
    text = assert_refused(fault, inputs)
    before = contents(inputs)
    with pytest.raises(Exception) as raised:
        torch.compile(forms.get("op") or forms["out"], fullgraph=True, backend=unreached)()
    assert text in str(raised.value)
    assert_untouched(inputs, before)


def unreached(graph, example_inputs):
    raise AssertionError("a bad call was compiled")


SYMBOLIC = [
    fault
    for fault in FAULTS
    if fault.id
    in (
        "fused_norm_rope-kv_c-too few rows",
        "fused_norm_rope-mla_kv_cache-too narrow",
        "fused_norm_rope-index_k_out-overlaps index_k",
        "fused_norm_rope-mla_kv_cache-block stride no multiple of 4-fp8_ds_mla",
        "fused_q-index_weights-too many columns",
        "fused_embed_norm-residual_out-rows overlap",
    )
]


@pytest.mark.parametrize("fault", SYMBOLIC, ids=lambda fault: fault.id)
def test_the_text_of_a_symbolic_size_is_its_number(fault):
    """Compiled with every size symbolic: the text shows 5 rows, not s26."""
    inputs = ruined(fault)
    forms = forms_of(fault.op, inputs, fault)
    with pytest.raises(Exception) as raised:
        torch.compile(
            forms.get("op") or forms["out"], fullgraph=True, dynamic=True, backend=unreached
        )()
    assert assert_refused(fault, inputs) in str(raised.value)


def sound_for(op: str, num_tokens: int) -> Inputs:
    """A sound call of any token count with everything but the tokens the same; outs in place."""
    if op == "fused_norm_rope":
        blocks = 10 - -(-num_tokens // 4)
        inputs = testing.norm_rope_inputs(SMALL, num_tokens, block_size=4, extra_blocks=blocks)
        buffer = torch.empty(40, SMALL.index_topk, dtype=torch.int32)
        key = testing.poison(torch.empty(num_tokens, 2 * SMALL.index_dim))
        inputs["index_k"], inputs["index_k_out"] = key.fill_(0.5).chunk(2, dim=1)
        inputs.update(topk_indices_buffer=buffer, kv_c_out=inputs["kv_c"], k_pe_out=inputs["k_pe"])
        return inputs
    if op == "fused_q":
        return testing.q_inputs(SMALL, num_tokens, 2)
    makers = {
        "fused_eh_norm": testing.eh_norm_inputs,
        "fused_embed_norm": testing.embed_norm_inputs,
    }
    return makers.get(op, testing.embed_eh_norm_inputs)(SMALL, num_tokens)


@pytest.mark.parametrize("how", ["all dynamic", "marked", "unbacked"])
@pytest.mark.parametrize("op", OUTS)
def test_one_graph_serves_every_token_count(op, how):
    """The checks put no guard on N, even with N unbacked, where N = 1 shares the graph, too."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    mark = {
        "all dynamic": lambda t, dim: None,
        "marked": torch._dynamo.mark_dynamic,
        "unbacked": torch._dynamo.decorators.mark_unbacked,
    }[how]
    run = torch.compile(
        lambda **inputs: getattr(torch.ops.dsv32, op)(**inputs),
        fullgraph=True, dynamic=True if how == "all dynamic" else None, backend=count,
    )  # fmt: skip
    with torch.no_grad():
        for num_tokens in (7, 16, 33, 2, *([1] if how == "unbacked" else [])):
            inputs = sound_for(op, num_tokens)
            for name in inputs.keys() & {*PER_TOKEN, "kv_c_out", "k_pe_out", "index_k_out"}:
                if inputs[name] is not None:
                    mark(inputs[name], 0)
            run(**inputs)
    assert len(graphs) == 1


def one_block(inputs: Inputs) -> None:
    """Its stride says nothing."""
    cache = inputs["mla_kv_cache"][:1]
    inputs["mla_kv_cache"] = cache.as_strided(cache.shape, (0, cache.shape[2], 1))
    inputs["slot_mapping"].clamp_(max=3)


def entry_major(t: Tensor) -> Tensor:
    return t.new_empty(t.shape[1], t.shape[0], t.shape[2]).transpose(0, 1)


UNUSUAL: dict[str, tuple[str, Change]] = {
    "a cache laid out entry-major": ("fused_norm_rope", to("mla_kv_cache", entry_major)),
    "one block of stride 0": ("fused_norm_rope", one_block),
    "a wider cache": ("fused_norm_rope", to("mla_kv_cache", lambda t: torch.cat((t, t), -1))),
    "maps longer and shorter than N": ("fused_norm_rope", lambda i: i.update(
        slot_mapping=i["slot_mapping"].repeat(2), indexer_slot_mapping=i["slot_mapping"][:2])),
    "slots without a cache": ("fused_norm_rope", put(mla_kv_cache=None, indexer_k_cache=None)),
    "only the indexer's map": ("fused_norm_rope", put(slot_mapping=None, mla_kv_cache=None)),
    "an unread k_scale": ("fused_norm_rope", put(mla_k_scale=torch.ones(3).double())),
    "any buffer where nothing is filled": ("fused_norm_rope", put(
        fill_topk=False, topk_indices_buffer=torch.empty(0, dtype=torch.int32))),
    "no indexer": ("fused_norm_rope", put(
        has_indexer=False, index_k=None, index_k_norm_weight=None, index_k_norm_bias=None,
        index_rope_cos_sin=None, index_k_out=None, indexer_slot_mapping=None)),
    "outs that are the inputs": ("fused_norm_rope", lambda i: i.update(
        kv_c_out=i["kv_c"], k_pe_out=i["k_pe"], q_c_out=i["q_c"])),
    "index_k_out beside index_k": ("fused_norm_rope", overlapping(columns=16)),
    "index_k_out behind index_k": ("fused_norm_rope", lambda i: beside(i, 16 * N)),
    "index_k_out before index_k": ("fused_norm_rope", lambda i: beside(i, -16 * N)),
    "a topk buffer without columns": ("fused_norm_rope", to(
        "topk_indices_buffer", lambda t: t[:, :0])),
    "unread ql_nope and q_scale": ("fused_q", put(
        quantize_mqa=False, ql_nope=torch.empty(0), q_scale=torch.empty(2).double())),
    "unread indexer tensors": ("fused_q", put(
        has_indexer=False, index_q=torch.empty(0), index_weights=None)),
    "a gap behind each head": ("fused_q", to("q_pe", lambda t: torch.cat((t, t), -1)[..., :4])),
    "ids [batch, length]": ("fused_embed_norm", to("input_ids", lambda t: t.view(1, -1))),
    "ids [batch, 1]": ("fused_embed_norm", to("input_ids", lambda t: t.view(-1, 1))),
    "a slice of ids": ("fused_embed_eh_norm", to("input_ids", lambda t: t.repeat(2, 2)[:1, :N])),
    "outs of other types": ("fused_embed_norm", to("normed_out", lambda t: t.float())),
    "outs with gaps": ("fused_eh_norm", to("out", lambda t: torch.cat((t, t), 1)[:, : t.shape[1]])),
}  # fmt: skip


def beside(inputs: Inputs, gap: int) -> None:
    key = inputs["index_k"]
    buffer = torch.empty(3 * 16 * N, dtype=key.dtype)
    inputs["index_k"] = buffer.as_strided(key.shape, (16, 1), 16 * N).copy_(key)
    inputs["index_k_out"] = buffer.as_strided(key.shape, (16, 1), 16 * N + gap)


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_but_sound_is_accepted(name):
    op, change = UNUSUAL[name]
    inputs = sound(op)
    change(inputs)
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            forms_of(op, placed(inputs, device, fake=True))["op"]()
    for call in forms_of(op, inputs).values():
        call()


def test_sizes_of_one_or_none_need_no_strides():
    inputs = testing.norm_rope_inputs(SMALL, 1, block_size=4)
    for name in ("q_c", "kv_c", "k_pe", "index_k"):
        row = inputs[name]
        inputs[name] = row.as_strided(row.shape, (0, 1), row.storage_offset())
    for name in ("positions", "slot_mapping"):
        inputs[name] = inputs[name].as_strided((1,), (0,))
    torch.ops.dsv32.fused_norm_rope(**inputs)
    empty = testing.embed_eh_norm_inputs(SMALL, 0)
    empty["positions"] = torch.empty(0, 2, dtype=torch.int64)[:, 0]
    assert torch.ops.dsv32.fused_embed_eh_norm(**empty).shape == (0, 48)


def test_an_unknown_mode_lists_the_modes():
    for name, choices in (
        ("mla_kv_cache_dtype", layouts.MLA_MODES),
        ("index_scale_format", layouts.INDEX_SCALE_FORMATS),
    ):
        with pytest.raises(ValueError) as raised:
            torch.ops.dsv32.fused_norm_rope(**{**testing.norm_rope_inputs(SMALL, N), name: "fp9"})
        assert all(re.search(rf"\b{choice}\b", str(raised.value)) for choice in choices)
        assert "'fp9'" in str(raised.value)


def test_gradients_are_no_error_where_none_are_asked_for():
    inputs = sound("fused_eh_norm")
    inputs = {
        name: t.requires_grad_() if name.endswith("weight") else t for name, t in inputs.items()
    }
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            for call in forms_of("fused_eh_norm", inputs).values():
                call()
