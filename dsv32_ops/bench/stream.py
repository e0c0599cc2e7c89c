"""The bandwidth floor: a kernel that only streams, with a given mix of reads and writes."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# int32 elements that a warp moves with one 16-byte access per lane.
_WARP_ELEMENTS = 128


@triton.jit(do_not_specialize=["reads_per_program"])
def stream_kernel(
    src_ptr,
    dst_ptr,
    n_read,
    n_written,
    reads_per_program,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    HINT: tl.constexpr,
):
    """Each program reads one tile of PIECES * PIECE elements, or writes one.

    ``reads_per_program`` is the share of reading programs times 2^32. They are spread evenly, so
    that reads and writes are in flight together at any time, in the proportion of the whole.
    """
    program = tl.program_id(0).to(tl.int64)
    reads_before = (program * reads_per_program) >> 32
    reads_after = ((program + 1) * reads_per_program) >> 32
    lanes = tl.arange(0, PIECE)
    if reads_after > reads_before:
        start = reads_before * (PIECE * PIECES)
        mixed = tl.zeros([PIECE], tl.int32)
        for i in tl.static_range(PIECES):
            offsets = start + i * PIECE + lanes
            mask = offsets < n_read
            mixed ^= tl.load(src_ptr + offsets, mask=mask, other=0, eviction_policy=HINT)
        # Never true for the source's values, which the compiler cannot know: it keeps the loads.
        tl.store(dst_ptr + lanes, mixed, mask=mixed == -1)
    else:
        start = (program - reads_before) * (PIECE * PIECES)
        for i in tl.static_range(PIECES):
            offsets = start + i * PIECE + lanes
            tl.store(
                dst_ptr + offsets,
                offsets.to(tl.int32),
                mask=offsets < n_written,
                eviction_policy=HINT,
            )


class StreamConfig(NamedTuple):
    """Warps per program, 16-byte accesses per thread, and the cache hint of all accesses."""

    num_warps: int
    pieces: int
    hint: str


# The floor is the fastest of these at its byte counts.
CONFIGS = (
    StreamConfig(4, 4, ""),
    StreamConfig(4, 8, ""),
    StreamConfig(8, 4, ""),
    StreamConfig(4, 4, "evict_first"),
)


class StreamBuffers:
    """A source and a destination that hold ``copies`` disjoint sets of the bytes of one call."""

    def __init__(self, read: int, written: int, copies: int, device: torch.device | str) -> None:
        self.n_read, self.n_written = _elements(read), _elements(written)
        self.copies = copies
        # Non-negative, so that no combination of them is the -1 that the kernel looks for.
        self.src = torch.randint(
            0, 2**31 - 1, (copies * self.n_read,), dtype=torch.int32, device=device
        )
        # Room for the reading programs' store, which never happens, when little is written.
        self.dst = torch.empty(
            copies * max(self.n_written, 8 * _WARP_ELEMENTS), dtype=torch.int32, device=device
        )

    def launch(self, copy: int, config: StreamConfig) -> None:
        """Stream one set of buffers once."""
        tile = config.num_warps * _WARP_ELEMENTS * config.pieces
        reads = triton.cdiv(self.n_read, tile)
        programs = reads + triton.cdiv(self.n_written, tile)
        stream_kernel[(programs,)](
            self.src[copy * self.n_read :],
            self.dst[copy * self.n_written :],
            self.n_read,
            self.n_written,
            triton.cdiv(reads << 32, programs),
            PIECE=config.num_warps * _WARP_ELEMENTS,
            PIECES=config.pieces,
            HINT=config.hint,
            num_warps=config.num_warps,
        )

    def calls(self, config: StreamConfig) -> list[functools.partial[None]]:
        """One call per set of buffers."""
        return [functools.partial(self.launch, copy, config) for copy in range(self.copies)]


def _elements(nbytes: int) -> int:
    """int32 elements, rounded up to 64 bytes so that every access of a tail stays 16 bytes wide."""
    return triton.cdiv(nbytes, 64) * 16
