"""For tests of these ops and of kernels like them: token counts, inputs, canaries, comparisons.

Inputs have the strides they have in a model (column slices of fused projections, transposed batched
products), depend on nothing but the arguments (the same seed gives the same values on every device)
and are never zero. What an op has to write is poisoned, so that an element left out shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dsv32_ops.models import ModelConfig
from dsv32_ops.rope import cos_sin_table

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

POISON_BYTE = 0xA5

_BOUNDARY = (65_534, 65_535, 65_536, 65_537, 65_538, 131_069, 131_070, 131_071)
_POOL_SIZE = 1_048_583


def token_counts(max_value: int = 2**31 - 1) -> SearchStrategy[int]:
    """A hypothesis strategy for token counts that clusters around 2^16.

    About half of the draws are 65,534 to 65,538 or 2 * 65,535 and its neighbours, where a grid with
    tokens on a 65,535-block axis breaks; the others are 0, 1, small, odd and multiples of 16, and,
    up to ``max_value``, anything. Needs hypothesis (the extra ``test``).
    """
    from hypothesis import strategies as st

    if max_value < 0:
        raise ValueError(f"max_value: expected at least 0, got {max_value}")
    small = st.integers(0, min(max_value, 300))
    near = [count for count in _BOUNDARY if count <= max_value]
    # Separate objects: one_of counts a strategy that it is given twice only once.
    kinds = [st.sampled_from(near) if near else small for _ in range(5)]
    kinds += [
        st.sampled_from(sorted({0, min(1, max_value), max(max_value - 1, 0), max_value})),
        small,
        st.integers(0, max_value // 16).map(lambda n: 16 * n),
        st.integers(0, (max_value - 1) // 2).map(lambda n: 2 * n + 1) if max_value else small,
        st.integers(0, max_value),
    ]
    return st.one_of(kinds)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` in place with NaN (floats) or 0xA5 bytes (all else), and return it.

    One-byte floats are codes and get 0xA5. Strided views are filled, their gaps are not.
    """
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.fill_(float("nan"))
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(POISON_BYTE)
        return tensor
    pattern = int.from_bytes(bytes([POISON_BYTE]) * tensor.element_size(), "little", signed=True)
    return tensor.fill_(pattern)


def norm_rope_inputs(
    config: ModelConfig,
    num_tokens: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    mode: str = "auto",
    block_size: int = 64,
    seed: int = 0,
    padding: float = 0.0,
    caches: bool = True,
    extra_blocks: int = 1,
    outs: bool = False,
    table_rows: int | None = None,
    shared_table: bool = False,
    weight_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int64,
    index_scale_format: str = "fp32",
    indexer_cache_shuffled: bool = False,
    fp8_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Keyword arguments for ``fused_norm_rope``, as a layer of ``config`` makes them.

    ``q_c``, ``kv_c`` and ``k_pe`` are column slices of one [N, Dq + Dkv + R] projection,
    ``index_k`` of an [N, Di + Hi] one. About one row in four is scaled by a power of two from 2^-6
    to 2^6. The caches are poisoned; slots are distinct and in random order.

    Args:
        config: the model's sizes.
        num_tokens: N.
        device: of every tensor.
        dtype: of the activations, and of the MLA cache in mode ``auto``.
        mode: the ``mla_kv_cache_dtype``.
        block_size: tokens per cache block.
        seed: decides every random value.
        padding: share of rows whose slot is -1.
        caches: False for a memory-profiling run: no caches and no slots.
        extra_blocks: blocks beyond those that N tokens fill.
        outs: also poisoned ``kv_c_out``, ``k_pe_out`` and ``index_k_out``.
        table_rows: rows of the cos/sin tables, and bound of the positions; 4,096, or
            ``config.max_positions`` if that is less, when None.
        shared_table: one table for both rotations, as the models have it. By default the indexer's
            has twice the theta, so that mixing the two up shows.
        weight_dtype: of the two RMSNorm weights, ``dtype`` when None. The LayerNorm's are fp32.
        index_dtype: of positions and slots.
        index_scale_format, indexer_cache_shuffled, fp8_dtype: passed on to the op and the layouts.

    Returns:
        All arguments of the op by name. ``topk_indices_buffer`` is poisoned and has two rows more
        than N; without an indexer it is a [1, 8] that nobody may touch. ``mla_k_scale`` is None but
        for the fp8 modes, where it is 0.37, no power of two.
    """
    make = _Maker(seed, device)
    dq, dkv, rope = config.q_lora_rank, config.kv_lora_rank, config.rope_dim
    latent = make.activations((num_tokens, dq + dkv + rope), dtype)
    rows = _table_rows(config, table_rows)
    table, index_table = _tables(config, rows, shared_table, device)
    inputs: dict[str, Any] = dict(
        positions=make.integers(rows, num_tokens, index_dtype),
        q_c=latent[:, :dq],
        q_norm_weight=make.weight(dq, weight_dtype or dtype),
        q_norm_eps=config.rms_norm_eps,
        kv_c=latent[:, dq : dq + dkv],
        kv_norm_weight=make.weight(dkv, weight_dtype or dtype),
        kv_norm_eps=config.rms_norm_eps,
        k_pe=latent[:, dq + dkv :],
        rope_cos_sin=table,
        index_k=None,
        index_k_norm_weight=None,
        index_k_norm_bias=None,
        index_k_norm_eps=1e-6,
        index_rope_cos_sin=None,
        topk_indices_buffer=poison(torch.empty(1, 8, dtype=torch.int32, device=device)),
        slot_mapping=None,
        indexer_slot_mapping=None,
        indexer_k_cache=None,
        mla_kv_cache=None,
        mla_kv_cache_dtype=mode,
        mla_k_scale=None,
        has_indexer=config.has_indexer,
        index_rope_interleave=config.index_rope_interleave,
        index_scale_format=index_scale_format,
        indexer_cache_shuffled=indexer_cache_shuffled,
        fp8_dtype=fp8_dtype,
    )
    if mode in ("fp8", "fp8_e4m3"):
        inputs["mla_k_scale"] = torch.tensor([0.37], device=device)
    if config.has_indexer:
        inputs.update(_indexer_inputs(config, num_tokens, make, dtype))
        inputs["index_rope_cos_sin"] = index_table
    if caches:
        num_blocks = -(-num_tokens // block_size) + extra_blocks
        inputs["slot_mapping"] = make.slots(
            num_tokens, num_blocks * block_size, padding, index_dtype
        )
        inputs.update(_caches(config, inputs, num_blocks, block_size, dtype, device))
    if outs:
        inputs.update(_outs(inputs))
    return inputs


def q_inputs(
    config: ModelConfig,
    num_tokens: int,
    num_heads: int | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    quantize_mqa: bool = True,
    table_rows: int | None = None,
    shared_table: bool = False,
    index_weights_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int64,
    fp8_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Keyword arguments for ``fused_q``, as a layer of ``config`` makes them.

    ``q_pe`` is the tail of an [N, H, nope_dim + R] query projection, ``ql_nope`` [N, H, Dkv] a
    transposed batched product (strides Dkv, N * Dkv, 1), ``index_weights`` the tail columns of an
    [N, Di + Hi] projection. Some rows are scaled by a power of two, as in ``norm_rope_inputs``.

    Args:
        num_heads: local heads H, the whole model's when None.
        quantize_mqa: passed on. False fills ``ql_nope`` with NaN: then it may not be read.
        index_weights_dtype: of ``index_weights``, ``dtype`` when None.
        config, num_tokens, device, dtype, seed, table_rows, shared_table, index_dtype, fp8_dtype:
            as in ``norm_rope_inputs``.

    Returns:
        All arguments of the op by name. ``q_scale`` is 0.37, no power of two.
    """
    make = _Maker(seed, device)
    heads = config.num_heads if num_heads is None else num_heads
    query = make.activations((num_tokens, heads, config.nope_dim + config.rope_dim), dtype)
    nope_shape = (heads, num_tokens, config.kv_lora_rank)
    if quantize_mqa:
        ql_nope = make.activations(nope_shape, dtype, row_dim=1)
    else:
        ql_nope = poison(torch.empty(nope_shape, dtype=dtype, device=device))
    rows = _table_rows(config, table_rows)
    table, index_table = _tables(config, rows, shared_table, device)
    inputs: dict[str, Any] = dict(
        positions=make.integers(rows, num_tokens, index_dtype),
        q_pe=query[..., config.nope_dim :],
        q_pe_cos_sin=table,
        index_q=None,
        index_q_cos_sin=None,
        ql_nope=ql_nope.transpose(0, 1),
        q_scale=torch.tensor([0.37], device=device),
        index_weights=None,
        index_weights_softmax_scale=1.0,
        index_weights_head_scale=1.0,
        has_indexer=config.has_indexer,
        index_rope_interleave=config.index_rope_interleave,
        quantize_mqa=quantize_mqa,
        fp8_dtype=fp8_dtype,
    )
    if config.has_indexer:
        heads, dim = config.index_heads, config.index_dim
        fused = make.activations((num_tokens, dim + heads), index_weights_dtype or dtype)
        inputs.update(
            index_q=make.activations((num_tokens, heads, dim), dtype),
            index_q_cos_sin=index_table,
            index_weights=fused[:, dim:],
            index_weights_softmax_scale=dim**-0.5,
            index_weights_head_scale=heads**-0.5,
        )
    return inputs


def eh_norm_inputs(
    config: ModelConfig,
    num_tokens: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    index_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Keyword arguments for ``fused_eh_norm``. Row 0 and about a quarter are at position 0."""
    make = _Maker(seed, device)
    size = config.hidden_size
    return dict(
        positions=_positions_with_starts(make, num_tokens, index_dtype),
        inputs_embeds=make.activations((num_tokens, size), dtype),
        previous_hidden=make.activations((num_tokens, size), dtype),
        enorm_weight=make.weight(size, weight_dtype or dtype),
        hnorm_weight=make.weight(size, weight_dtype or dtype),
        eps=config.rms_norm_eps,
    )


def embed_norm_inputs(
    config: ModelConfig,
    num_tokens: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    index_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
    vocab_rows: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments for ``fused_embed_norm``.

    The table has ``vocab_rows`` rows: 4,096, or ``config.vocab_size`` if that is less, when None.
    """
    make = _Maker(seed, device)
    vocab = min(config.vocab_size, 4096) if vocab_rows is None else vocab_rows
    return dict(
        input_ids=make.integers(vocab, num_tokens, index_dtype),
        embed_table=make.activations((vocab, config.hidden_size), dtype),
        norm_weight=make.weight(config.hidden_size, weight_dtype or dtype),
        eps=config.rms_norm_eps,
    )


def embed_eh_norm_inputs(
    config: ModelConfig,
    num_tokens: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    index_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
    vocab_rows: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments for ``fused_embed_eh_norm``: those of the two ops that it joins."""
    shared: dict[str, Any] = dict(
        device=device, dtype=dtype, index_dtype=index_dtype, weight_dtype=weight_dtype
    )
    joined = eh_norm_inputs(config, num_tokens, seed=seed, **shared)
    embed = embed_norm_inputs(config, num_tokens, seed=seed + 1, vocab_rows=vocab_rows, **shared)
    joined.update(input_ids=embed["input_ids"], embed_table=embed["embed_table"])
    del joined["inputs_embeds"]
    return joined


def canary_cache(
    layout: Any,
    num_blocks: int,
    block_size: int,
    *,
    guard: int = 4096,
    block_gap: int = 0,
    entry_gap: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned cache between guard bytes, optionally with gaps: ``(cache, buffer)``.

    ``cache`` has the shape and dtype of ``layout.empty(num_blocks, block_size)`` and is a view into
    ``buffer``, a flat uint8 tensor filled with 0xA5, with ``guard`` bytes before and after it.
    ``block_gap`` bytes follow each block, ``entry_gap`` bytes each entry. After a write,
    ``changed_canaries(cache, buffer)`` lists the bytes outside the cache that changed.

    Raises:
        ValueError: a guard or gap that breaks the layout's alignment, or an entry gap in an indexer
            cache, whose tokens are packed inside a block.
    """
    from dsv32_ops.layouts import IndexerCache

    proto = layout.empty(1, block_size)
    _, tokens, width = proto.shape
    itemsize = proto.element_size()
    alignment = max(itemsize, getattr(layout, "alignment", 1))
    for name, nbytes in (("guard", guard), ("block_gap", block_gap), ("entry_gap", entry_gap)):
        if nbytes < 0 or nbytes % alignment:
            raise ValueError(f"{name}: expected a multiple of {alignment} bytes, got {nbytes}")
    if entry_gap and isinstance(layout, IndexerCache):
        raise ValueError("entry_gap: the tokens of an indexer cache are packed inside a block")
    entry_bytes = width * itemsize + entry_gap
    block_bytes = tokens * entry_bytes + block_gap
    body = num_blocks * block_bytes
    buffer = torch.full((2 * guard + body,), POISON_BYTE, dtype=torch.uint8, device=device)
    typed = buffer[guard : guard + body].view(proto.dtype)
    strides = (block_bytes // itemsize, entry_bytes // itemsize, 1)
    return typed.as_strided((num_blocks, tokens, width), strides), buffer


def changed_canaries(cache: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Offsets [int64] into ``buffer`` of the bytes outside ``cache`` that are no longer 0xA5."""
    outside = torch.ones_like(buffer, dtype=torch.bool)
    itemsize = cache.element_size()
    offset = cache.data_ptr() - buffer.data_ptr()
    shape = (*cache.shape[:-1], cache.shape[-1] * itemsize)
    strides = (*(stride * itemsize for stride in cache.stride()[:-1]), 1)
    outside.as_strided(shape, strides, offset).fill_(False)
    return (outside & (buffer != POISON_BYTE)).nonzero().flatten()


class CodeReport(NamedTuple):
    """How far two tensors of fp8 codes are apart. Unpacks to ``(max_step, equal)``."""

    max_step: int
    """Largest distance in the order of the format's values; -0 and +0 are 0 apart."""
    equal: float
    """Fraction of bytes that are the same; 1.0 for empty tensors."""


def compare_codes(
    actual: torch.Tensor, expected: torch.Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn
) -> CodeReport:
    """Compare fp8 codes (uint8 or the fp8 dtype itself) by their place in the format's order.

    Neighbouring values are one step apart. NaN against NaN is 0 steps, NaN against a number 1,000.
    ``fp8_dtype`` is float8_e4m3fn (NaN 0x7F and 0xFF) or float8_e4m3fnuz (NaN 0x80).
    """
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
        )
    for name, codes in (("actual", actual), ("expected", expected)):
        if codes.element_size() != 1:
            raise TypeError(f"{name}: expected one-byte codes, got {codes.dtype}")
    if actual.numel() == 0:
        return CodeReport(0, 1.0)
    left, right = actual.view(torch.uint8), expected.view(torch.uint8)
    places = _code_places(fp8_dtype).to(actual.device)
    max_step, equal = 0, 0
    for a, b in zip(_chunks(left), _chunks(right), strict=True):
        steps = (places[a.long()] - places[b.long()]).abs_().clamp_(max=1000)
        max_step = max(max_step, int(steps.max()))
        equal += int((a == b).sum())
    return CodeReport(max_step, equal / left.numel())


class FloatReport(NamedTuple):
    """How far two float tensors are apart."""

    max_error: float
    """Largest absolute difference; inf where one is NaN or infinite and the other is not."""
    rms_error: float
    """Root of the mean squared difference."""
    max_step: int
    """Largest distance in representable values of the dtype."""


def compare_floats(actual: torch.Tensor, expected: torch.Tensor) -> FloatReport:
    """Compare bf16, fp16 or fp32 tensors of one shape and dtype. NaN equals NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"actual: expected {expected.dtype} {tuple(expected.shape)}, "
            f"got {actual.dtype} {tuple(actual.shape)}"
        )
    max_error, squares, max_step = 0.0, 0.0, 0
    for a, b in zip(_chunks(actual), _chunks(expected), strict=True):
        if a.numel() == 0:
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        error = (a.double() - b.double()).abs_()
        error = error.nan_to_num_(nan=float("inf")).masked_fill_(same, 0.0)
        steps = (_float_places(a) - _float_places(b)).abs_().masked_fill_(same, 0)
        max_error = max(max_error, float(error.max()))
        squares += float(error.square().sum())
        max_step = max(max_step, int(steps.max()))
    return FloatReport(max_error, (squares / max(actual.numel(), 1)) ** 0.5, max_step)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a flat uint8 tensor, row-major whatever its strides."""
    return tensor.contiguous().flatten().view(torch.uint8)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """True when shape, dtype and every byte agree, NaN payloads and signed zeros included."""
    return (
        actual.shape == expected.shape
        and actual.dtype == expected.dtype
        and torch.equal(as_bytes(actual), as_bytes(expected))
    )


class _Maker:
    """Draws on the CPU and moves to the device, so that values do not depend on the device."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)

    def activations(
        self, shape: tuple[int, ...], dtype: torch.dtype, row_dim: int = 0
    ) -> torch.Tensor:
        """Normal values; about a quarter of the rows scaled by 2^-6 to 2^6."""
        out = self._normal(shape, dtype)
        rows = shape[row_dim]
        exponents = torch.randint(-6, 7, (rows,), generator=self.generator)
        chosen = torch.rand(rows, generator=self.generator) < 0.25
        factors = torch.ldexp(torch.ones(rows), exponents * chosen).to(self.device, dtype)
        return out.mul_(factors.view(-1, *[1] * (len(shape) - row_dim - 1)))

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # At 10 ns a value, a billion draws would take longer than the op: a large tensor repeats a
        # pool. Its size is prime, so that the first million rows of any length still differ.
        out = torch.empty(shape, dtype=dtype, device=self.device)
        flat = out.view(-1)
        pool = torch.randn(min(flat.numel(), _POOL_SIZE), generator=self.generator)
        pool = pool.to(self.device, dtype)
        for piece in flat.split(_POOL_SIZE):
            piece.copy_(pool[: piece.numel()])
        return out

    def weight(self, size: int, dtype: torch.dtype, mean: float = 1.0) -> torch.Tensor:
        values = mean + 0.25 * torch.randn(size, generator=self.generator)
        return values.to(self.device, dtype)

    def integers(self, below: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, below, (count,), generator=self.generator).to(self.device, dtype)

    def mask(self, share: float, count: int) -> torch.Tensor:
        return (torch.rand(count, generator=self.generator) < share).to(self.device)

    def slots(self, count: int, capacity: int, padding: float, dtype: torch.dtype) -> torch.Tensor:
        slots = torch.randperm(capacity, generator=self.generator)[:count].to(self.device, dtype)
        return slots.masked_fill_(self.mask(padding, count), -1)


def _table_rows(config: ModelConfig, table_rows: int | None) -> int:
    return min(config.max_positions, 4096) if table_rows is None else table_rows


def _tables(
    config: ModelConfig, rows: int, shared: bool, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    theta, scaling = config.rope_theta, config.rope_scaling
    table = cos_sin_table(rows, config.rope_dim, theta=theta, scaling=scaling, device=device)
    if shared:
        return table, table
    return table, cos_sin_table(
        rows, config.rope_dim, theta=2 * theta, scaling=scaling, device=device
    )


def _positions_with_starts(make: _Maker, count: int, dtype: torch.dtype) -> torch.Tensor:
    positions = make.integers(4096, count, dtype).masked_fill_(make.mask(0.25, count), 0)
    positions[:1] = 0
    return positions


def _indexer_inputs(
    config: ModelConfig, num_tokens: int, make: _Maker, dtype: torch.dtype
) -> dict[str, Any]:
    dim = config.index_dim
    fused = make.activations((num_tokens, dim + config.index_heads), dtype)
    topk = torch.empty(num_tokens + 2, config.index_topk, dtype=torch.int32, device=make.device)
    return dict(
        index_k=fused[:, :dim],
        index_k_norm_weight=make.weight(dim, torch.float32),
        index_k_norm_bias=make.weight(dim, torch.float32, mean=0.0),
        topk_indices_buffer=poison(topk),
    )


def _caches(
    config: ModelConfig,
    inputs: dict[str, Any],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    from dsv32_ops.layouts import IndexerCache, mla_layout

    fp8_dtype = inputs["fp8_dtype"] or torch.float8_e4m3fn
    layouts: dict[str, Any] = {
        "mla_kv_cache": mla_layout(
            inputs["mla_kv_cache_dtype"],
            kv_dim=config.kv_lora_rank,
            rope_dim=config.rope_dim,
            dtype=dtype,
            fp8_dtype=fp8_dtype,
        )
    }
    if config.has_indexer:
        layouts["indexer_k_cache"] = IndexerCache(
            head_dim=config.index_dim,
            scale_format=inputs["index_scale_format"],
            shuffled=inputs["indexer_cache_shuffled"],
            fp8_dtype=fp8_dtype,
        )
    caches = {}
    for name, layout in layouts.items():
        cache = layout.empty(num_blocks, block_size, device=device)
        cache.view(torch.uint8).fill_(POISON_BYTE)
        caches[name] = cache
    return caches


def _outs(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    pairs = {"kv_c_out": "kv_c", "k_pe_out": "k_pe", "index_k_out": "index_k"}
    outs = {}
    for out, source in pairs.items():
        if inputs[source] is not None:
            like = inputs[source]
            outs[out] = poison(torch.empty(like.shape, dtype=like.dtype, device=like.device))
    return outs


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.flatten().split(1 << 22)


def _code_places(fp8_dtype: torch.dtype) -> torch.Tensor:
    """The place of each of the 256 codes in the order of values [int32]; NaN far from all."""
    codes = torch.arange(256, dtype=torch.int32)
    places = torch.where(codes < 128, codes, 128 - codes)
    if fp8_dtype == torch.float8_e4m3fn:
        places[[0x7F, 0xFF]] = 100_000
    elif fp8_dtype == torch.float8_e4m3fnuz:
        places[0x80] = 100_000
    else:
        raise TypeError(f"fp8_dtype: expected float8_e4m3fn or float8_e4m3fnuz, got {fp8_dtype}")
    return places


def _float_places(tensor: torch.Tensor) -> torch.Tensor:
    ints = {2: torch.int16, 4: torch.int32}
    if tensor.element_size() not in ints or not tensor.is_floating_point():
        raise TypeError(f"actual: expected bfloat16, float16 or float32, got {tensor.dtype}")
    bits = tensor.view(ints[tensor.element_size()]).long()
    lowest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
