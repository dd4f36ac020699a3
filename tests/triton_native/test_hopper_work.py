"""The work list of the Hopper prefill, made by its kernel in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_backends.triton_native.hopper_work import FIELDS, HEADER, max_entries, work_list

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def _entries(q_lens: list[int], kv_lens: list[int], tile: int, total_q: int, paged: bool):
    """Every tile of the batch, in order of sequences: the five fields of its entry."""
    lengths = [*zip(q_lens, kv_lens), (total_q - sum(q_lens), 0)]
    start, key_start, out = 0, 0, []
    for b, (q_len, kv_len) in enumerate(lengths):
        base = min(b, len(q_lens) - 1) if paged else key_start
        for first in range(0, q_len, tile):
            rows = min(tile, q_len - first)
            out.append((start + first, rows, kv_len, first + kv_len - q_len, base))
        start += q_len
        key_start += kv_len
    return out


def _key_tiles(entry: tuple[int, ...], block_n: int, right: int | None) -> int:
    _, rows, kv_len, position, _ = entry
    end = kv_len if right is None else min(kv_len, position + rows + right)
    return -(-max(end, 0) // block_n)


BATCHES = [
    ([1], [1]),
    ([100, 333, 64, 1, 200], [100, 333, 64, 1, 200]),
    ([130, 5, 0, 700, 128], [4000, 3, 50, 900, 0]),
    ([0, 0], [0, 7]),
    ([300, 1, 257], [20, 0, 256]),
]


@pytest.mark.parametrize("q_lens, kv_lens", BATCHES, ids=[str(i) for i in range(len(BATCHES))])
@pytest.mark.parametrize("tile, block_n, right", [(128, 128, 0), (64, 64, None), (16, 128, 9)])
@pytest.mark.parametrize("spare, paged", [(0, False), (200, True)])
def test_every_tile_is_listed_once_and_longest_first(
    q_lens, kv_lens, tile, block_n, right, spare, paged
):
    total_q = sum(q_lens) + spare
    work = work_list(
        _starts(q_lens), torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
        None if paged else _starts(kv_lens), total_q=total_q, tile=tile, block_n=block_n,
        right=right,
    ).tolist()  # fmt: skip
    count, counter = work[:2]
    assert counter == 0
    assert count <= max_entries(total_q, len(q_lens), tile)
    got = [tuple(work[HEADER + i * FIELDS :][:5]) for i in range(count)]
    want = _entries(q_lens, kv_lens, tile, total_q, paged)
    if not paged:  # where the keys of a tile without keys start says nothing
        got = [e if e[2] else (*e[:4], 0) for e in got]
        want = [e if e[2] else (*e[:4], 0) for e in want]
    assert sorted(got) == sorted(want)
    sizes = [_key_tiles(e, block_n, right) for e in got]
    assert sizes == sorted(sizes, reverse=True)


def test_more_sequences_than_one_step_counts():
    test_every_tile_is_listed_once_and_longest_first(
        [8] * 70, [8 * i for i in range(70)], 128, 64, 0, 0, False
    )


def test_a_left_bound_caps_the_order_but_loses_no_tile():
    q_lens, kv_lens = [500, 90, 300], [900, 90, 4000]
    work = work_list(
        _starts(q_lens), torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE), _starts(kv_lens),
        total_q=sum(q_lens), tile=128, block_n=128, left=100, right=0,
    ).tolist()  # fmt: skip
    got = [tuple(work[HEADER + i * FIELDS :][:5]) for i in range(work[0])]
    assert sorted(got) == sorted(_entries(q_lens, kv_lens, 128, sum(q_lens), False))


def test_a_list_is_refilled_in_place_and_its_counter_reset():
    lengths = torch.tensor([300], dtype=torch.int32, device=DEVICE)
    starts = _starts([300])
    work = work_list(starts, lengths, starts, total_q=300, tile=128, block_n=128, right=0)
    want = work.clone()
    work.fill_(77)
    again = work_list(
        starts, lengths, starts, total_q=300, tile=128, block_n=128, right=0, out=work
    )
    assert again.data_ptr() == work.data_ptr()
    assert work[:2].tolist() == [3, 0]
    for i in range(3):
        fields = slice(HEADER + i * FIELDS, HEADER + i * FIELDS + 5)
        assert work[fields].tolist() == want[fields].tolist()
