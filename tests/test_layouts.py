"""Layouts against addresses spelled out one by one; every other byte of the buffer is a canary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv32_ops import codecs, layouts
from dsv32_ops.layouts import Fp8DsMla, Fp8Mla, IndexerCache, Nvfp4DsMla, mla_layout

CANARY = 0xA5
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BYTE_DTYPES = [torch.uint8, FN, FNUZ]
BLOCKS, BLOCK_SIZE, BASE = 3, 4, 48
SLOTS = [9, 0, 7, 11, 4]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-8, 9, (*shape[:-1], 1), generator=generator)
    return torch.randn(*shape, generator=generator) * torch.exp2(scales.float())


class GappedCache:
    """A cache of 1-byte or wider elements inside a buffer of canaries, with gaps everywhere."""

    def __init__(self, width: int, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> None:
        self.entry_stride = (width + 16) * dtype.itemsize
        self.block_stride = self.entry_stride * block_size + 32 * dtype.itemsize
        size = BASE + self.block_stride * BLOCKS
        self.buffer = torch.full((size,), CANARY, dtype=torch.uint8)
        self.expected = self.buffer.numpy().copy()
        strides = (self.block_stride // dtype.itemsize, self.entry_stride // dtype.itemsize, 1)
        shape = (BLOCKS, block_size, width + 8)
        self.block_size = block_size
        self.cache = self.buffer.view(dtype).as_strided(shape, strides, BASE // dtype.itemsize)

    def put(self, slot: int, offset: int, values: torch.Tensor) -> None:
        raw = values.contiguous().view(torch.uint8).flatten().numpy()
        block, token = divmod(slot, self.block_size)
        start = BASE + block * self.block_stride + token * self.entry_stride + offset
        self.expected[start : start + len(raw)] = raw

    def check(self) -> None:
        np.testing.assert_array_equal(self.buffer.numpy(), self.expected)


def flavour(cache_dtype: torch.dtype) -> torch.dtype:
    return FN if cache_dtype is torch.uint8 else cache_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kv_dim", "rope_dim"), [(512, 64), (1, 2), (40, 6)])
def test_float_mla(dtype, kv_dim, rope_dim):
    layout = mla_layout("auto", kv_dim=kv_dim, rope_dim=rope_dim, dtype=dtype)
    gapped = GappedCache(layout.entry_width, dtype)
    kv, k_pe = rows(len(SLOTS), kv_dim), rows(len(SLOTS), rope_dim, seed=1)
    layout.encode(gapped.cache, torch.tensor(SLOTS), kv, k_pe)
    for i, slot in enumerate(SLOTS):
        gapped.put(slot, 0, kv[i].to(dtype))
        gapped.put(slot, kv_dim * dtype.itemsize, k_pe[i].to(dtype))
    gapped.check()
    decoded = layout.decode(gapped.cache, torch.tensor(SLOTS))
    assert torch.equal(decoded[0], kv.to(dtype).float())
    assert torch.equal(decoded[1], k_pe.to(dtype).float())


@pytest.mark.parametrize("cache_dtype", BYTE_DTYPES)
@pytest.mark.parametrize("scale", [None, 0.37])
def test_fp8_mla_divides_both_parts(cache_dtype, scale):
    kv, k_pe = rows(len(SLOTS), 24), rows(len(SLOTS), 6, seed=1)
    kv[0, :3] = torch.tensor([torch.nan, torch.inf, -1e6])
    gapped = GappedCache(30, cache_dtype)
    layout = mla_layout("fp8", kv_dim=24, rope_dim=6)
    device_scale = None if scale is None else torch.tensor([scale])
    layout.encode(gapped.cache, torch.tensor(SLOTS), kv, k_pe, device_scale)
    divisor = np.float32(1.0 if scale is None else scale)
    fp8_dtype = flavour(cache_dtype)
    both = torch.cat([kv, k_pe], 1)
    codes = codecs.encode_fp8(torch.from_numpy(both.numpy() / divisor), fp8_dtype)
    for i, slot in enumerate(SLOTS):
        gapped.put(slot, 0, codes[i])
    gapped.check()
    decoded = torch.cat(layout.decode(gapped.cache, torch.tensor(SLOTS), device_scale), 1)
    expected = codecs.decode_fp8(codes, fp8_dtype) * float(divisor)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    limit = 448.0 if fp8_dtype is FN else 240.0
    assert decoded[0, 1] == limit * divisor and decoded[0, 2] == -limit * divisor


@pytest.mark.parametrize("cache_dtype", BYTE_DTYPES)
def test_fp8_ds_mla(cache_dtype):
    kv, k_pe = rows(len(SLOTS), 4, 128).flatten(1), rows(len(SLOTS), 64, seed=1)
    kv[1] = 0.0
    kv[2, 5], kv[2, 200], kv[2, 300] = torch.nan, torch.inf, -3e38
    gapped = GappedCache(656, cache_dtype)
    Fp8DsMla().encode(gapped.cache, torch.tensor(SLOTS), kv, k_pe)
    fp8_dtype = flavour(cache_dtype)
    limit = 448.0 if fp8_dtype is FN else 224.0
    decoded_kv = torch.empty_like(kv)
    for i, slot in enumerate(SLOTS):
        for t in range(4):
            tile = kv[i, 128 * t : 128 * t + 128]
            scale = codecs.tile_scale(codecs.finite_amax(tile, 0, keepdim=True), fp8_dtype)
            codes = codecs.encode_fp8(tile / scale, fp8_dtype, limit)
            gapped.put(slot, 128 * t, codes)
            gapped.put(slot, 512 + 4 * t, scale)
            decoded_kv[i, 128 * t : 128 * t + 128] = codecs.decode_fp8(codes, fp8_dtype) * scale
        gapped.put(slot, 528, k_pe[i].bfloat16())
    gapped.check()
    decoded = Fp8DsMla().decode(gapped.cache, torch.tensor(SLOTS))
    torch.testing.assert_close(decoded[0], decoded_kv, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(decoded[1], k_pe.bfloat16().float())
    # Half a step is at most 2**-4 of a normal value and, for amax >= 224 (FNUZ 112) of the
    # subnormal step 2**-9 (2**-10), 2**-17 of amax.
    error, tiles = (decoded[0][0] - kv[0]).abs().view(4, 128), kv[0].abs().view(4, 128)
    assert (error <= tiles * 2.0**-4 + tiles.amax(1, keepdim=True) * 2.0**-17).all()


def test_fp8_ds_mla_zero_tile_has_scale_two_to_minus_13():
    cache = Fp8DsMla().empty(1, 1)
    zeros = torch.zeros(1, 512), torch.zeros(1, 64)
    Fp8DsMla().encode(cache, torch.tensor([0]), *zeros)
    assert cache[0, 0, 512:528].view(torch.float32).tolist() == [2.0**-13] * 4


@pytest.mark.parametrize("cache_dtype", [torch.uint8, FN])
def test_nvfp4_ds_mla(cache_dtype):
    kv, k_pe = rows(len(SLOTS), 32, 16).flatten(1), rows(len(SLOTS), 64, seed=1)
    kv[1] = 0.0
    kv[2, 5], kv[2, 20], kv[2, 40] = torch.nan, -torch.inf, 3e38
    gapped = GappedCache(352, cache_dtype)
    Nvfp4DsMla().encode(gapped.cache, torch.tensor(SLOTS), kv, k_pe)
    decoded_kv = torch.empty_like(kv)
    for i, slot in enumerate(SLOTS):
        for s in range(32):
            block = kv[i, 16 * s : 16 * s + 16]
            ratio = codecs.finite_amax(block, 0).numpy() / np.float32(6.0)
            code = codecs.encode_fp8(torch.tensor([max(ratio, np.float32(2.0**-9))]))
            inverse = np.float32(1.0) / codecs.decode_fp8(code).numpy()
            nibbles = codecs.encode_e2m1(torch.from_numpy(block.numpy() * inverse))
            packed = torch.tensor(
                [int(nibbles[2 * j]) + 16 * int(nibbles[2 * j + 1]) for j in range(8)],
                dtype=torch.uint8,
            )
            gapped.put(slot, 8 * s, packed)
            gapped.put(slot, 320 + 8 * (s & 3) + (s >> 2), code)
            decoded_kv[i, 16 * s : 16 * s + 16] = codecs.decode_e2m1(nibbles) / inverse.item()
        gapped.put(slot, 256, codecs.encode_fp8(k_pe[i]))
    gapped.check()
    decoded = Nvfp4DsMla().decode(gapped.cache, torch.tensor(SLOTS))
    # The test divides by a rounded reciprocal, the decoder multiplies by the scale.
    torch.testing.assert_close(decoded[0], decoded_kv, rtol=2.0**-22, atol=0)
    assert torch.equal(decoded[1], codecs.decode_fp8(codecs.encode_fp8(k_pe)))
    assert decoded[0][2, 5] > 0 and decoded[0][2, 20] == -6 * 448.0


INDEX_DIM = 32


@pytest.mark.parametrize("cache_dtype", BYTE_DTYPES)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0x4"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_indexer_cache(cache_dtype, scale_format, shuffled):
    block_size, block_stride = 32, 32 * (INDEX_DIM + 4) + 64
    buffer = torch.full((BASE + 3 * block_stride,), CANARY, dtype=torch.uint8)
    shape, strides = (3, block_size, INDEX_DIM + 4), (block_stride, INDEX_DIM + 4, 1)
    cache = buffer.view(cache_dtype).as_strided(shape, strides, BASE)
    slots = [95, 0, 17, 33, 64, 31]
    keys = rows(len(slots), INDEX_DIM)
    keys[1] = 0.0
    keys[2, :2] = torch.tensor([torch.nan, -torch.inf])
    layout = IndexerCache(INDEX_DIM, scale_format, shuffled)
    layout.encode(cache, torch.tensor(slots), keys)

    fp8_dtype = flavour(cache_dtype)
    expected, decoded = buffer.numpy().copy(), torch.empty_like(keys)
    expected[:] = CANARY
    for i, slot in enumerate(slots):
        scale = codecs.row_scale(codecs.finite_amax(keys[i], 0), fp8_dtype)
        codes = codecs.encode_fp8(keys[i] / scale, fp8_dtype, codecs.fp8_limit(fp8_dtype, True))
        base, o = BASE + slot // block_size * block_stride, slot % block_size
        for d in range(INDEX_DIM):
            place = o * INDEX_DIM + d
            if shuffled:
                place = (o // 16) * 16 * INDEX_DIM + (d // 16) * 256 + (o % 16) * 16 + d % 16
            expected[base + place] = codes[d]
        raw = np.float32(scale.item()).tobytes()
        if scale_format == "ue8m0x4":
            raw = bytes([127 + int(np.log2(scale.item()))] * 4)
        start = base + block_size * INDEX_DIM + 4 * o
        expected[start : start + 4] = np.frombuffer(raw, dtype=np.uint8)
        decoded[i] = codecs.decode_fp8(codes, fp8_dtype) * scale
    np.testing.assert_array_equal(buffer.numpy(), expected)
    actual = layout.decode(cache, torch.tensor(slots))
    torch.testing.assert_close(actual, decoded, rtol=0, atol=0, equal_nan=True)


def test_indexer_zero_row_has_scale_two_to_minus_22():
    cache = IndexerCache(4).empty(1, 1)
    IndexerCache(4).encode(cache, torch.tensor([0]), torch.zeros(1, 4))
    assert cache[0, 0, 4:].view(torch.float32).item() == 2.0**-22


def test_addresses_pass_two_to_the_31():
    """Only the touched pages of the 4 GiB take memory."""
    block_stride = 1 << 31
    buffer = torch.empty(2 * block_stride + 1024, dtype=torch.uint8)
    last = buffer[2 * block_stride :].fill_(CANARY)
    mla = buffer.as_strided((3, 1, 656), (block_stride, 656, 1))
    kv, k_pe, slots = rows(1, 512), rows(1, 64), torch.tensor([2], dtype=torch.int32)
    Fp8DsMla().encode(mla, slots, kv, k_pe)
    packed = Fp8DsMla().empty(1, 1)
    Fp8DsMla().encode(packed, torch.tensor([0]), kv, k_pe)
    assert torch.equal(last[:656], packed.flatten())
    assert (last[656:] == CANARY).all()
    index = buffer.as_strided((3, 1, 68), (block_stride, 68, 1))
    IndexerCache(64).encode(index, slots, k_pe)
    near = IndexerCache(64).empty(1, 1)
    IndexerCache(64).encode(near, torch.tensor([0]), k_pe)
    assert torch.equal(last[:68], near.flatten())
    decoded = IndexerCache(64).decode(index, slots)
    assert torch.equal(decoded, IndexerCache(64).decode(near, torch.tensor([0])))


@pytest.mark.parametrize("mode", layouts.MLA_MODES)
def test_fields_cover_the_entry(mode):
    layout = mla_layout(mode, dtype=torch.float32)
    end = 0
    for field in layout.fields():
        assert field.offset == end
        end += field.nbytes
        assert field.name in layout.describe()
    sizes = {"auto": 2304, "fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
    sizes.update(dict.fromkeys(("bfloat16", "float16"), 1152), fp8=576, fp8_e4m3=576)
    assert end == layout.entry_bytes == sizes[mode]
    cache = layout.empty(2, 3)
    assert cache.shape == (2, 3, layout.entry_width) and cache.dtype == layout.dtype
    assert layout.entry_bytes % layout.alignment == 0


def test_indexer_fields_cover_the_block():
    codes, scales = IndexerCache(shuffled=True).fields(block_size=48)
    assert (codes.offset, codes.nbytes) == (0, 48 * 128)
    assert (scales.offset, scales.nbytes) == (48 * 128, 4 * 48)
    assert "6336 bytes" in IndexerCache().describe(block_size=48)


@pytest.mark.parametrize("mode", ["", "fp8_e5m2", "FP8", "nvfp4"])
def test_unknown_mode_lists_the_modes(mode):
    with pytest.raises(ValueError, match="auto, bfloat16.*nvfp4_ds_mla") as error:
        mla_layout(mode)
    assert repr(mode) in str(error.value)


@pytest.mark.parametrize("mode", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_ds_mla_holds_one_size(mode):
    with pytest.raises(ValueError, match="kv_dim 512 and rope_dim 64, got 256 and 64"):
        mla_layout(mode, kv_dim=256)


def test_indexer_cache_rejects_what_it_cannot_hold():
    with pytest.raises(ValueError, match="fp32, ue8m0x4, got 'e8m0'"):
        IndexerCache(scale_format="e8m0")
    with pytest.raises(ValueError, match="head_dim a multiple of 16, got 24"):
        IndexerCache(24, shuffled=True)
    with pytest.raises(ValueError, match="block_size a multiple of 16, got 8"):
        IndexerCache(shuffled=True).empty(1, 8)


def test_no_slots_write_nothing():
    none, cache = torch.empty(0, dtype=torch.int64), torch.full((1, 2, 656), CANARY).byte()
    Fp8DsMla().encode(cache, none, torch.empty(0, 512), torch.empty(0, 64))
    Nvfp4DsMla().encode(cache, none, torch.empty(0, 512), torch.empty(0, 64))
    Fp8Mla().encode(cache, none, torch.empty(0, 512), torch.empty(0, 64))
    IndexerCache(652).encode(cache, none, torch.empty(0, 652))
    assert (cache == CANARY).all()
    assert Nvfp4DsMla().decode(cache, none)[0].shape == (0, 512)
