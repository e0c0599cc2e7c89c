"""Cache layouts: where every byte of an entry lies, with an encoder and a decoder each.

Slot `s` lives in block `s // block_size` at `o = s % block_size`. MLA caches are
[blocks, block_size, entry] and may have gaps between entries and between blocks; encoders write
the bytes that the layout names and nothing else. All classes take int64 slots (every one live),
fp32 rows, and work in place. A cache that carries codes has 1-byte elements: uint8, or an fp8
dtype, which then decides the e4m3 flavour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .codecs import (
    E2M1_MAX,
    FP8_DTYPES,
    decode_e2m1,
    decode_fp8,
    divide,
    encode_e2m1,
    encode_fp8,
    finite_amax,
    fp8_limit,
    row_scale,
    tile_scale,
)

FLOAT_MODES = ("auto", "bfloat16", "float16")
FP8_MODES = ("fp8", "fp8_e4m3")
MLA_MODES = (*FLOAT_MODES, *FP8_MODES, "fp8_ds_mla", "nvfp4_ds_mla")
INDEX_SCALE_FORMATS = ("fp32", "ue8m0x4")


class Field(NamedTuple):
    """One run of bytes; `offset` counts from the entry (indexer cache: from the block)."""

    name: str
    offset: int
    nbytes: int
    dtype: str
    note: str


def locate(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(block, offset in the block) of each slot, int64, so that byte addresses are int64 too."""
    slots = slots.long()
    block_size = cache.shape[1]
    return slots // block_size, slots % block_size


def cache_fp8_dtype(cache: Tensor, default: torch.dtype) -> torch.dtype:
    """e4m3 flavour of a cache: its own dtype if that is an fp8 one, else `default`."""
    return cache.dtype if cache.dtype in FP8_DTYPES else default


def _byte_map(title: str, fields: list[Field]) -> str:
    rows = [
        (f"{f.offset}..{f.offset + f.nbytes - 1}", str(f.nbytes), f.dtype, f.name, f.note)
        for f in fields
    ]
    rows.insert(0, ("bytes", "size", "format", "field", "note"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows]
    return "\n".join([title, *("  " + line for line in lines)])


class _MlaLayout:
    """What the MLA layouts share: entries at [block, offset] of a strided cache."""

    title: ClassVar[str]
    dtype: torch.dtype
    entry_width: int

    @property
    def entry_bytes(self) -> int:
        return self.entry_width * self.dtype.itemsize

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> Tensor:
        """Uninitialized packed cache [num_blocks, block_size, entry_width]."""
        shape = (num_blocks, block_size, self.entry_width)
        return torch.empty(shape, dtype=self.dtype, device=device)

    def fields(self) -> list[Field]:
        raise NotImplementedError

    def describe(self) -> str:
        """Byte map of one entry, as text."""
        return _byte_map(f"{self.title}: {self.entry_bytes} bytes per token", self.fields())


@dataclass(frozen=True)
class FloatMla(_MlaLayout):
    """`[normed kv | rotated k_pe]`, kv_dim + rope_dim floats of the cache's own dtype.

    Modes auto, bfloat16, float16.
    """

    title: ClassVar[str] = "float MLA entry"
    kv_dim: int = 512
    rope_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def entry_width(self) -> int:  # type: ignore[override]
        return self.kv_dim + self.rope_dim

    @property
    def alignment(self) -> int:
        return self.dtype.itemsize

    def encode(
        self, cache: Tensor, slots: Tensor, kv: Tensor, k_pe: Tensor, scale: Tensor | None = None
    ) -> None:
        block, offset = locate(cache, slots)
        cache[..., : self.kv_dim][block, offset] = kv.to(cache.dtype)
        cache[..., self.kv_dim : self.entry_width][block, offset] = k_pe.to(cache.dtype)

    def decode(
        self, cache: Tensor, slots: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        block, offset = locate(cache, slots)
        entries = cache[..., : self.entry_width][block, offset].float()
        return entries[:, : self.kv_dim], entries[:, self.kv_dim :]

    def fields(self) -> list[Field]:
        size, name = self.dtype.itemsize, str(self.dtype).removeprefix("torch.")
        kv_bytes = self.kv_dim * size
        return [
            Field("kv", 0, kv_bytes, name, "RMSNorm(kv_c)"),
            Field("k_pe", kv_bytes, self.rope_dim * size, name, "rotated, interleaved pairs"),
        ]


class _ByteMlaLayout(_MlaLayout):
    """MLA layouts of 1-byte elements: an entry is assembled as bytes, then stored."""

    dtype = torch.uint8
    alignment: ClassVar[int] = 1

    def _store(self, cache: Tensor, slots: Tensor, *parts: Tensor) -> None:
        block, offset = locate(cache, slots)
        entries = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
        cache.view(torch.uint8)[..., : self.entry_width][block, offset] = entries

    def _load(self, cache: Tensor, slots: Tensor) -> Tensor:
        block, offset = locate(cache, slots)
        return cache.view(torch.uint8)[..., : self.entry_width][block, offset]


@dataclass(frozen=True)
class Fp8Mla(_ByteMlaLayout):
    """`[e4m3(kv / scale) | e4m3(k_pe / scale)]`, one per-tensor fp32 scale kept by the caller.

    Modes fp8, fp8_e4m3. scale None means 1.
    """

    title: ClassVar[str] = "per-tensor fp8 MLA entry"
    kv_dim: int = 512
    rope_dim: int = 64
    fp8_dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def entry_width(self) -> int:  # type: ignore[override]
        return self.kv_dim + self.rope_dim

    def encode(
        self, cache: Tensor, slots: Tensor, kv: Tensor, k_pe: Tensor, scale: Tensor | None = None
    ) -> None:
        if scale is not None:
            scale = scale.float().reshape(())
            kv, k_pe = kv / scale, k_pe / scale
        fp8_dtype = cache_fp8_dtype(cache, self.fp8_dtype)
        self._store(cache, slots, encode_fp8(kv, fp8_dtype), encode_fp8(k_pe, fp8_dtype))

    def decode(
        self, cache: Tensor, slots: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        fp8_dtype = cache_fp8_dtype(cache, self.fp8_dtype)
        entries = decode_fp8(self._load(cache, slots), fp8_dtype)
        if scale is not None:
            entries = entries * scale.float().reshape(())
        return entries[:, : self.kv_dim], entries[:, self.kv_dim :]

    def fields(self) -> list[Field]:
        return [
            Field("kv", 0, self.kv_dim, "e4m3", "RMSNorm(kv_c) / scale"),
            Field("k_pe", self.kv_dim, self.rope_dim, "e4m3", "rotated / scale"),
        ]


@dataclass(frozen=True)
class Fp8DsMla(_ByteMlaLayout):
    """512 e4m3 codes, 4 fp32 scales (one per 128 codes), 64 bf16 of rotated k_pe: 656 bytes.

    scale = pow2ceil(max(amax / 448, 1e-4)) per tile, code = e4m3(kv / scale). The entry that
    FlashMLA's sparse decoding kernels read.
    """

    KV_DIM: ClassVar[int] = 512
    ROPE_DIM: ClassVar[int] = 64
    TILE: ClassVar[int] = 128
    NUM_TILES: ClassVar[int] = KV_DIM // TILE
    SCALE_OFFSET: ClassVar[int] = KV_DIM
    ROPE_OFFSET: ClassVar[int] = SCALE_OFFSET + 4 * NUM_TILES
    ENTRY_BYTES: ClassVar[int] = ROPE_OFFSET + 2 * ROPE_DIM

    title: ClassVar[str] = "fp8_ds_mla entry"
    entry_width: ClassVar[int] = ENTRY_BYTES  # type: ignore[misc]
    # The scales are read and written as fp32 words.
    alignment: ClassVar[int] = 4
    fp8_dtype: torch.dtype = torch.float8_e4m3fn

    def encode(
        self, cache: Tensor, slots: Tensor, kv: Tensor, k_pe: Tensor, scale: Tensor | None = None
    ) -> None:
        fp8_dtype = cache_fp8_dtype(cache, self.fp8_dtype)
        tiles = kv.unflatten(-1, (self.NUM_TILES, self.TILE))
        scales = tile_scale(finite_amax(tiles, -1), fp8_dtype)
        codes = encode_fp8(tiles / scales.unsqueeze(-1), fp8_dtype, fp8_limit(fp8_dtype, True))
        self._store(cache, slots, codes.flatten(-2), scales, k_pe.to(torch.bfloat16))

    def decode(
        self, cache: Tensor, slots: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        entries = self._load(cache, slots)
        codes = entries[:, : self.SCALE_OFFSET].unflatten(-1, (self.NUM_TILES, self.TILE))
        scales = entries[:, self.SCALE_OFFSET : self.ROPE_OFFSET].contiguous().view(torch.float32)
        k_pe = entries[:, self.ROPE_OFFSET :].contiguous().view(torch.bfloat16)
        kv = decode_fp8(codes, cache_fp8_dtype(cache, self.fp8_dtype)) * scales.unsqueeze(-1)
        return kv.flatten(-2), k_pe.float()

    def fields(self) -> list[Field]:
        scale_bytes = self.ROPE_OFFSET - self.SCALE_OFFSET
        return [
            Field("kv", 0, self.KV_DIM, "e4m3", "RMSNorm(kv_c) / tile scale"),
            Field("scales", self.SCALE_OFFSET, scale_bytes, "fp32", f"one per {self.TILE} codes"),
            Field("k_pe", self.ROPE_OFFSET, 2 * self.ROPE_DIM, "bfloat16", "rotated"),
        ]


@dataclass(frozen=True)
class Nvfp4DsMla(_ByteMlaLayout):
    """512 e2m1 nibbles, 64 e4m3 of unscaled rotated k_pe, 32 e4m3 block scales: 352 bytes.

    sf = e4m3(max(amax / 6, 2**-9)) per 16 elements, nibble = e2m1(kv * (1 / sf)). The even
    element is the low nibble. The scale of 16-block s is at scale byte 8 * (s & 3) + (s >> 2).
    """

    KV_DIM: ClassVar[int] = 512
    ROPE_DIM: ClassVar[int] = 64
    TILE: ClassVar[int] = 16
    NUM_TILES: ClassVar[int] = KV_DIM // TILE
    ROPE_OFFSET: ClassVar[int] = KV_DIM // 2
    SCALE_OFFSET: ClassVar[int] = ROPE_OFFSET + ROPE_DIM
    ENTRY_BYTES: ClassVar[int] = SCALE_OFFSET + NUM_TILES
    # The smallest e4m3 code above zero, so that no scale is zero.
    MIN_SCALE: ClassVar[float] = 2.0**-9

    title: ClassVar[str] = "nvfp4_ds_mla entry"
    entry_width: ClassVar[int] = ENTRY_BYTES  # type: ignore[misc]

    def encode(
        self, cache: Tensor, slots: Tensor, kv: Tensor, k_pe: Tensor, scale: Tensor | None = None
    ) -> None:
        tiles = kv.unflatten(-1, (self.NUM_TILES, self.TILE))
        ratio = divide(finite_amax(tiles, -1), E2M1_MAX).clamp(min=self.MIN_SCALE)
        scale_codes = encode_fp8(ratio)
        inverse = decode_fp8(scale_codes).reciprocal().unsqueeze(-1)
        pairs = encode_e2m1(tiles * inverse).view(-1, self.KV_DIM // 2, 2)
        payload = pairs[..., 0] | (pairs[..., 1] << 4)
        # Byte 8 * (s & 3) + (s >> 2) is the transpose of an [8, 4] matrix.
        placed = scale_codes.unflatten(-1, (self.NUM_TILES // 4, 4)).transpose(-1, -2).flatten(-2)
        self._store(cache, slots, payload, encode_fp8(k_pe), placed)

    def decode(
        self, cache: Tensor, slots: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        entries = self._load(cache, slots)
        payload = entries[:, : self.ROPE_OFFSET]
        nibbles = torch.stack((payload & 15, payload >> 4), dim=-1)
        tiles = decode_e2m1(nibbles).view(-1, self.NUM_TILES, self.TILE)
        placed = entries[:, self.SCALE_OFFSET :].unflatten(-1, (4, self.NUM_TILES // 4))
        scales = decode_fp8(placed.transpose(-1, -2).flatten(-2))
        k_pe = decode_fp8(entries[:, self.ROPE_OFFSET : self.SCALE_OFFSET])
        return (tiles * scales.unsqueeze(-1)).flatten(-2), k_pe

    def fields(self) -> list[Field]:
        scales = Field(
            "scales",
            self.SCALE_OFFSET,
            self.NUM_TILES,
            "e4m3",
            f"one per {self.TILE} elements, block s at byte 8 * (s & 3) + (s >> 2)",
        )
        nibbles = "RMSNorm(kv_c) / scale, even element in the low nibble"
        return [
            Field("kv", 0, self.KV_DIM // 2, "e2m1 x 2", nibbles),
            Field("k_pe", self.ROPE_OFFSET, self.ROPE_DIM, "e4m3", "rotated, unscaled"),
            scales,
        ]


MlaLayout = FloatMla | Fp8Mla | Fp8DsMla | Nvfp4DsMla


def mla_layout(
    mode: str,
    *,
    kv_dim: int = 512,
    rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> MlaLayout:
    """Layout of an `mla_kv_cache_dtype` mode.

    dtype is the element type of mode auto; fp8_dtype the e4m3 flavour of a uint8 cache (nvfp4 is
    always e4m3fn). Raises ValueError for an unknown mode, and for sizes that a mode cannot hold.
    """
    if mode not in MLA_MODES:
        modes = ", ".join(MLA_MODES)
        raise ValueError(f"mla_kv_cache_dtype: expected one of {modes}, got {mode!r}")
    if mode in FLOAT_MODES:
        named = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        return FloatMla(kv_dim, rope_dim, named.get(mode, dtype))
    if mode in FP8_MODES:
        return Fp8Mla(kv_dim, rope_dim, fp8_dtype)
    if (kv_dim, rope_dim) != (Fp8DsMla.KV_DIM, Fp8DsMla.ROPE_DIM):
        raise ValueError(
            f"mla_kv_cache_dtype {mode}: expected kv_dim {Fp8DsMla.KV_DIM} and rope_dim "
            f"{Fp8DsMla.ROPE_DIM}, got {kv_dim} and {rope_dim}"
        )
    return Fp8DsMla(fp8_dtype) if mode == "fp8_ds_mla" else Nvfp4DsMla()


@dataclass(frozen=True)
class IndexerCache:
    """Indexer keys: per block, block_size rows of head_dim e4m3 codes, then block_size scales.

    scale = pow2ceil(max(amax, 1e-4) / 448) per row, code = e4m3(row / scale). With
    base = block * stride(0), code d of token o is at base + o * head_dim + d and its 4 scale
    bytes at base + block_size * head_dim + 4 * o, as DeepGEMM's paged MQA logits kernels read
    them. The shape [blocks, block_size, head_dim + 4] is storage only.

    scale_format: "fp32", little-endian, or "ue8m0x4", the biased exponent byte four times.
    shuffled: code (o, d) is at o//16*16*head_dim + d//16*256 + o%16*16 + d%16 instead.
    """

    SCALE_BYTES: ClassVar[int] = 4
    SHUFFLE_TILE: ClassVar[int] = 16
    dtype: ClassVar[torch.dtype] = torch.uint8
    # Readers load a scale as one 32-bit word.
    alignment: ClassVar[int] = 4

    head_dim: int = 128
    scale_format: str = "fp32"
    shuffled: bool = False
    fp8_dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.scale_format not in INDEX_SCALE_FORMATS:
            raise ValueError(
                f"index_scale_format: expected one of {', '.join(INDEX_SCALE_FORMATS)}, "
                f"got {self.scale_format!r}"
            )
        if self.shuffled and self.head_dim % self.SHUFFLE_TILE:
            raise ValueError(
                f"shuffled indexer cache: expected head_dim a multiple of {self.SHUFFLE_TILE}, "
                f"got {self.head_dim}"
            )

    @property
    def entry_width(self) -> int:
        return self.head_dim + self.SCALE_BYTES

    @property
    def entry_bytes(self) -> int:
        return self.entry_width

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> Tensor:
        """Uninitialized packed cache [num_blocks, block_size, head_dim + 4]."""
        self._check_block_size(block_size)
        shape = (num_blocks, block_size, self.entry_width)
        return torch.empty(shape, dtype=self.dtype, device=device)

    def encode(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Quantize fp32 rows [n, head_dim] into the cache."""
        fp8_dtype = cache_fp8_dtype(cache, self.fp8_dtype)
        scale = row_scale(finite_amax(rows, -1), fp8_dtype)
        limit = fp8_limit(fp8_dtype, True)
        codes = encode_fp8(rows / scale.unsqueeze(-1), fp8_dtype, limit)
        if self.scale_format == "fp32":
            scale_bytes = scale.view(torch.uint8).view(-1, self.SCALE_BYTES)
        else:
            exponent = (scale.view(torch.int32) >> 23).to(torch.uint8)
            scale_bytes = exponent.unsqueeze(-1).expand(-1, self.SCALE_BYTES)
        block, offset = locate(cache, slots)
        code_view, scale_view = self._views(cache)
        if self.shuffled:
            tile, row = offset // self.SHUFFLE_TILE, offset % self.SHUFFLE_TILE
            code_view[block, tile, :, row] = codes.unflatten(-1, (-1, self.SHUFFLE_TILE))
        else:
            code_view[block, offset] = codes
        scale_view[block, offset] = scale_bytes

    def decode(self, cache: Tensor, slots: Tensor) -> Tensor:
        """fp32 rows [n, head_dim]."""
        block, offset = locate(cache, slots)
        code_view, scale_view = self._views(cache)
        if self.shuffled:
            tile, row = offset // self.SHUFFLE_TILE, offset % self.SHUFFLE_TILE
            codes = code_view[block, tile, :, row].flatten(-2)
        else:
            codes = code_view[block, offset]
        scale_bytes = scale_view[block, offset]
        if self.scale_format == "fp32":
            scale = scale_bytes.view(torch.float32)
        else:
            scale = (scale_bytes[:, :1].int() << 23).view(torch.float32)
        return decode_fp8(codes, cache_fp8_dtype(cache, self.fp8_dtype)) * scale

    def _views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Strided views: codes [blocks, o, d] (shuffled [blocks, o//16, d//16, o%16, d%16]) and
        scale bytes [blocks, o, 4]."""
        raw = cache.view(torch.uint8)
        num_blocks, block_size = cache.shape[:2]
        self._check_block_size(block_size)
        base, block_stride, dim = raw.storage_offset(), raw.stride(0), self.head_dim
        tile = self.SHUFFLE_TILE
        if self.shuffled:
            shape = (num_blocks, block_size // tile, dim // tile, tile, tile)
            codes = raw.as_strided(shape, (block_stride, tile * dim, tile * tile, tile, 1), base)
        else:
            codes = raw.as_strided((num_blocks, block_size, dim), (block_stride, dim, 1), base)
        scales = raw.as_strided(
            (num_blocks, block_size, self.SCALE_BYTES),
            (block_stride, self.SCALE_BYTES, 1),
            base + block_size * dim,
        )
        return codes, scales

    def _check_block_size(self, block_size: int) -> None:
        if self.shuffled and block_size % self.SHUFFLE_TILE:
            raise ValueError(
                f"shuffled indexer cache: expected block_size a multiple of {self.SHUFFLE_TILE}, "
                f"got {block_size}"
            )

    def fields(self, block_size: int = 64) -> list[Field]:
        """Fields of one block."""
        codes = block_size * self.head_dim
        order = "code d of row o at o*D + d"
        if self.shuffled:
            order = "code d of row o at o//16*16*D + d//16*256 + o%16*16 + d%16"
        scale_note = "one per row" if self.scale_format == "fp32" else "exponent byte, four times"
        return [
            Field("codes", 0, codes, "e4m3", order),
            Field("scales", codes, self.SCALE_BYTES * block_size, self.scale_format, scale_note),
        ]

    def describe(self, block_size: int = 64) -> str:
        """Byte map of one block, as text."""
        nbytes = block_size * self.entry_bytes
        title = f"indexer cache block of {block_size} tokens: {nbytes} bytes"
        return _byte_map(title, self.fields(block_size))
