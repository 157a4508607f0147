"""The draft head equals an independent one, written row by row around transformers' own layer."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_close
from engine_runs import CPU, Run, Step, load
from tiny_checkpoints import RECIPES, VOCABULARY, Checkpoints

from sm70lab.engine.kv_cache import KVCache

RMS = 1e-10
ABSOLUTE = 1e-9


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.mtp])
def test_prefix_and_recursive_rows(checkpoints: Checkpoints, name: str) -> None:
    """A prefix in two parts, three recursive drafts, two of them accepted, three drafts again.

    The accepted rows run once more with the target's hidden states over the recursive rows' keys
    and values, as they do after each verify round.
    """
    checkpoint = checkpoints(name)
    mtp = checkpoint.mtp
    assert mtp is not None
    model = load(checkpoint.folder, torch.float64)
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(VOCABULARY, (16,), generator=generator).tolist()
    target = checkpoint.oracle.hidden(ids)
    run = Run(model, "slots", 1)
    with torch.inference_mode():
        hidden = model.run(torch.tensor([ids]), [0], run.store, run.kv, prefill=True)
    assert_close(hidden[0], target, RMS, ABSOLUTE, "hidden states after the final norm")

    kv = KVCache(model.arch, 1, 64, torch.float64, CPU)
    kv.layers[0][0].fill_(torch.nan)
    kv.layers[0][1].fill_(torch.nan)

    def draft(tokens: list[int], rows: torch.Tensor, start: int) -> torch.Tensor:
        with torch.inference_mode():
            return model.draft(
                torch.tensor([tokens]), rows[None], torch.tensor([0]), torch.tensor([start]), kv
            )[0]

    done = 0
    for first, last in ((0, 4), (4, 9), (9, 11)):  # rows of the target: two prefills, then two accepted
        tokens = ids[first + 1 : last + 1]
        ours = draft(tokens, target[first:last], first)
        known_tokens, known_hidden = ids[1 : last + 1], target[:last]
        theirs = mtp.run(known_tokens, known_hidden)
        assert_close(ours, theirs[first:], RMS, ABSOLUTE, f"rows {first}..{last - 1}")
        done += 1
        if done == 1:
            continue
        for depth in range(3):
            token = int(model.logits(ours[-1:]).argmax())
            known_tokens = [*known_tokens, token]
            known_hidden = torch.cat((known_hidden, theirs[-1:]))
            ours = draft([token], ours[-1:], last + depth)
            theirs = mtp.run(known_tokens, known_hidden)
            assert_close(ours, theirs[-1:], RMS, ABSOLUTE, f"recursive row {depth} after {last} rows")


def test_drafting_leaves_the_target_alone(checkpoints: Checkpoints) -> None:
    """The target's logits are those of a checkpoint without a draft head."""
    steps = Step((3, 5, 8, 13, 21), 5, prefill=True)
    with_head, without = (
        Run(load(checkpoints(name).folder, torch.float64), "slots", 1).step([steps])
        for name in ("dense", "dense_without_mtp")
    )
    assert torch.equal(with_head, without)
