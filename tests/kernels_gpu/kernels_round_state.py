"""The round's bookkeeping on the device against plain Python."""

from __future__ import annotations

import os

import pytest
import torch

from sm70lab.kernels.gpu import round_state

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.mark.parametrize("drafts", [0, 1, 4, 8])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("broken", [None, "target", "draft"])
def test_the_next_round_begins_where_this_one_delivered_to(
    drafts: int, count: int, broken: str | None
) -> None:
    rows = drafts + 1
    count = min(count, rows)
    if broken == "draft" and not drafts:
        pytest.skip("no drafts to break")
    place = round_state.places(drafts, DEVICE)
    place.table.copy_(torch.tensor(round_state.values(100, 1, 0, 7, max(drafts, 1))))
    delivered = torch.arange(50, 50 + rows, device=DEVICE)
    target, draft = (torch.ones(n, dtype=torch.int32, device=DEVICE) for n in (rows, max(drafts, 1)))
    if broken:
        (target if broken == "target" else draft)[-1] = 0
    elif not drafts:
        draft[0] = 0  # belongs to nobody
    tokens, report = (
        torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        torch.full((rows + 2,), -1, device=DEVICE),
    )
    expected, first = round_state.advance_reference(place.table.cpu(), delivered.cpu(), count)
    round_state.advance(place, delivered, torch.tensor([count], device=DEVICE), target, draft, tokens, report)
    assert place.table.tolist() == expected
    assert [int(x) for x in (*place[:5], *place.drafts)] == [row[0] for row in expected]
    assert int(tokens[0]) == first == 49 + count
    assert report.tolist() == [*delivered.tolist(), count, 0 if broken else 1]


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_rotary_rows_of_a_round(drafts: int) -> None:
    rows, capacity = drafts + 1, 40
    cos, sin = torch.randn(2, capacity, 24, device=DEVICE).unbind(0)
    place = round_state.places(drafts, DEVICE)
    start, behind = 37, 2  # the last rows stand beyond the cache
    place.table.copy_(torch.tensor(round_state.values(start, behind, 2, 9, max(drafts, 1))))
    out = torch.empty(2, 3 * rows - 2, 24, device=DEVICE)
    round_state.rotary_rows(place, cos, sin, out[0], out[1])
    positions = [start + r for r in range(rows)]
    if drafts:
        positions += [start - behind + r for r in range(rows)] + [start - 1 + i for i in range(1, drafts)]
    at = [min(p, capacity - 1) for p in positions]
    assert torch.equal(out[0], cos[at]) and torch.equal(out[1], sin[at])


def test_a_row_is_picked_by_its_number() -> None:
    x = torch.randn(5, 1500, device=DEVICE).half()
    out = torch.empty(1, 1500, dtype=torch.float16, device=DEVICE)
    for rows in (1, 3, 5):
        round_state.pick_row(x, torch.tensor([rows], device=DEVICE), out)
        assert torch.equal(out[0], x[rows - 1])
