"""The comparison as text."""

from __future__ import annotations

from collections.abc import Sequence

from .agreement import Acceptance, Comparison, Difference, PromptReport

RUNS = {
    "llama_mtp": "llama.cpp draft-mtp",
    "engine_plain": "engine no_mtp",
    "engine_mtp": "engine MTP",
}
DRAFTING = ("llama_mtp", "engine_mtp")
NONE = "-"
HEADER = (
    "prompt",
    "tokens in",
    "out",
    "llama mtp ids",
    "engine ids",
    "engine mtp ids",
    "llama accepted",
    "engine accepted",
    "equal rounds",
    "max |dlogp|",
    "mean |dlogp|",
)


def text(comparison: Comparison, drafts: int, seconds: float) -> str:
    """The table, the pooled numbers, every difference and the verdict."""
    rows = [_row(prompt) for prompt in comparison.prompts]
    pooled, (equal, union) = comparison.pooled, comparison.rounds
    scored, largest, mean = comparison.logprobs
    total = ["all", "", str(sum(p.tokens for p in comparison.prompts)), *_same_counts(comparison)]
    total += [_share(pooled[run]) for run in DRAFTING]
    lines = _table([HEADER, *rows, (*total, f"{equal}/{union}", f"{largest:.1e}", f"{mean:.1e}")])
    peer, engine = (pooled[run].rate for run in DRAFTING)
    lines += [
        "",
        f"ids: against llama.cpp without drafts; greedy; mtp: {drafts} drafts a round",
        f"accepted, equal rounds: all but each output's last rounds; pooled {peer:.4f} and {engine:.4f}",
        f"dlogp: llama.cpp without drafts minus the engine's reference, {scored} tokens",
    ]
    for prompt in comparison.prompts:
        lines += [_difference(prompt.name, RUNS[n], d) for n, d in prompt.differences.items() if d]
        lines += [f"{prompt.name}: {note}" for note in prompt.notes]
        if "engine_lead" in prompt.equal_rounds:
            lines.append(
                f"{prompt.name}: with llama.cpp's lead row {_rounds(prompt, 'engine_lead')} rounds equal"
            )
    verdict = comparison.faults or ["the engines agree"]
    return "\n".join([*lines, *verdict, f"{seconds:.0f} s"])


def _row(prompt: PromptReport) -> tuple[str, ...]:
    return (
        prompt.name,
        str(prompt.prompt_tokens),
        str(prompt.tokens),
        *(_where(prompt.differences[run]) for run in RUNS),
        *(_share(prompt.acceptance.get(run)) for run in DRAFTING),
        _rounds(prompt, "engine_mtp"),
        f"{prompt.logprob_max:.1e}" if prompt.scored else NONE,
        f"{prompt.logprob_mean:.1e}" if prompt.scored else NONE,
    )


def _rounds(prompt: PromptReport, run: str) -> str:
    return f"{prompt.equal_rounds[run]}/{prompt.union_rounds[run]}" if run in prompt.equal_rounds else NONE


def _same_counts(comparison: Comparison) -> list[str]:
    count = len(comparison.prompts)
    return [f"{sum(p.differences[n] is None for p in comparison.prompts)}/{count}" for n in RUNS]


def _share(acceptance: Acceptance | None) -> str:
    return f"{acceptance.accepted}/{acceptance.drafted}" if acceptance else NONE


def _where(found: Difference | None) -> str:
    if found is None:
        return "equal"
    return f"{'tie' if found.tie else 'differs'} at {found.position}"


def _difference(prompt: str, run: str, d: Difference) -> str:
    ids = " and ".join("the end" if i is None else str(i) for i in (d.llama_id, d.other_id))
    margins = ", ".join(
        f"{name} {'unknown' if m is None else f'{m:.2e}'}"
        for name, m in (("llama.cpp", d.llama_margin), ("engine", d.engine_margin))
    )
    return f"{prompt}: {run} at token {d.position}: ids {ids}; top-2 margin {margins}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "  ".join("-" * w for w in widths)
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
