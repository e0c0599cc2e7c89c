from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from dsv32_ops.geometry import MAX_GRID_X, MAX_GRID_YZ, Grid, check_grid, max_tokens
from dsv32_ops.testing import token_counts


@given(token_counts(2**22 - 1), st.integers(1, 4), st.integers(1, 128))
def test_every_token_count_gives_a_legal_grid_with_tokens_on_x(tokens, tasks, heads):
    x, y, z = Grid(tokens, tasks, heads).launch()
    assert (x, y, z) == (tokens, tasks, heads)
    assert x <= 2**31 - 1 and y <= 65_535 and z <= 65_535


@given(token_counts(2**26 - 1), st.sampled_from([32, 64]))
def test_hip_takes_the_same_grid_while_its_threads_fit_32_bits(tokens, threads):
    assert tokens * threads < 2**32
    assert Grid(tokens, 4, 8).launch("hip", threads=threads) == (tokens, 4, 8)


@pytest.mark.parametrize("axis", ["y", "z"])
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_65536_blocks_on_y_or_z_are_refused(axis, backend):
    fits = (1, 65_535, 1) if axis == "y" else (1, 1, 65_535)
    assert check_grid(fits, backend) == fits
    over = tuple(65_536 if count > 1 else 1 for count in fits)
    with pytest.raises(ValueError, match=rf"axis {axis}: 65536 .* allows 0 to 65535\. .*axis x"):
        check_grid(over, backend)


def test_cuda_x_ends_at_2_to_the_31_minus_1():
    assert check_grid((2**31 - 1, 1, 1)) == (2**31 - 1, 1, 1)
    with pytest.raises(ValueError, match="axis x: 2147483648 .* 2147483647.*Split the call"):
        check_grid((2**31, 1, 1))


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_the_product_of_the_axes_ends_there_too(backend):
    """Triton multiplies them as 32-bit ints and takes a product that is not positive for empty."""
    assert check_grid((2**24 - 1, 128, 1), backend, threads=32) == (2**24 - 1, 128, 1)
    with pytest.raises(ValueError, match=r"16777216 x 128 x 1 .* 2147483647 .*most 16777215 along"):
        check_grid((2**24, 128, 1), backend, threads=32)
    with pytest.raises(ValueError, match=r"1 x 65535 x 65535 .*several"):
        Grid(1, 65_535, 65_535).launch(backend)
    assert check_grid((0, 65_535, 65_535), backend) == (0, 65_535, 65_535)


@pytest.mark.parametrize("threads", [1, 32, 64, 96, 256, 1024])
def test_hip_bounds_the_threads_on_x(threads):
    limit = max_tokens("hip", threads=threads)
    assert limit == MAX_GRID_X or limit * threads < 2**32 <= (limit + 1) * threads
    assert check_grid((limit,), "hip", threads=threads) == (limit, 1, 1)
    with pytest.raises(ValueError, match=rf"axis x: {limit + 1} .* HIP allows 0 to {limit}"):
        check_grid((limit + 1,), "hip", threads=threads)


def test_hip_without_threads_assumes_the_largest_block():
    assert max_tokens("hip") == max_tokens("hip", threads=1024)


def test_a_grid_names_its_axes():
    with pytest.raises(ValueError, match=r"y \(tasks\): 65536"):
        Grid(1, MAX_GRID_YZ + 1).launch()
    with pytest.raises(ValueError, match=r"z \(heads\): 65536"):
        Grid(1, 1, MAX_GRID_YZ + 1).launch()
    with pytest.raises(ValueError, match=r"x \(tokens\): 2147483648"):
        Grid(MAX_GRID_X + 1).launch()


def test_no_tokens_are_legal_and_empty():
    assert Grid(0, 4).launch() == (0, 4, 1)
    assert Grid(0, 4).empty and Grid(1, 0).empty and Grid(1, 1, 0).empty
    assert not Grid(1).empty


def test_missing_axes_are_one():
    assert check_grid((7,)) == (7, 1, 1)
    assert check_grid([7, 5]) == (7, 5, 1)
    for grid in ((), (1, 1, 1, 1)):
        with pytest.raises(ValueError, match=f"one to three axes, got {len(grid)}"):
            check_grid(grid)


def test_counts_of_any_integer_type_are_checked():
    assert check_grid((np.int64(65_536), 1, 1)) == (65_536, 1, 1)
    with pytest.raises(ValueError, match="axis y: 65536"):
        check_grid((1, np.int64(65_536), 1))
    with pytest.raises(ValueError, match="negative"):
        check_grid((-1, 1, 1))
    with pytest.raises(TypeError):
        check_grid((1.5, 1, 1))  # type: ignore[arg-type]


def test_unknown_backends_and_thread_counts_are_refused():
    with pytest.raises(ValueError, match="cuda, hip.*'metal'"):
        check_grid((1, 1, 1), "metal")
    with pytest.raises(ValueError, match="threads"):
        check_grid((1, 1, 1), "hip", threads=0)


def test_a_symbolic_token_count_passes_without_a_guard():
    seen = []

    def trace(x):
        grid = Grid(x.shape[0], 4, 2)
        seen.append((grid.launch(), grid.launch("hip", threads=64), check_grid((x.shape[0],))))
        return x + 1

    graph = make_fx(trace, tracing_mode="symbolic")(torch.ones(70_000))
    cuda, hip, plain = seen[0]
    for launch in (cuda, hip, plain):
        assert isinstance(launch[0], torch.SymInt)
    assert cuda[1:] == hip[1:] == (4, 2)
    assert not graph.shape_env.guards


def test_compiled_code_with_a_grid_is_one_graph_for_all_token_counts():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    def rows(x):
        tokens, tasks, _ = Grid(x.shape[0], 4).launch()
        return x + tokens * tasks

    torch._dynamo.reset()
    run = torch.compile(rows, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (5, 16, 65_535, 65_536, 65_537):
        assert run(torch.zeros(num_tokens))[0] == 4 * num_tokens
    assert len(compiled) == 1
