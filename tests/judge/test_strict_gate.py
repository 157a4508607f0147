"""The strict gate: every degenerate shape with its onset, every legitimate text, reasoning apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sm70lab.config import compose
from sm70lab.errors import UsageError
from sm70lab.judge import strict_gate
from sm70lab.judge.degenerate import Finding
from sm70lab.judge.scripts import scripts_of
from sm70lab.schema import Gate, ShapeGate, Status, StrictGate


@pytest.fixture(scope="module")
def strict() -> Gate:
    return compose(["gate=strict"]).gate


def words(count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return " ".join("".join(rng.choice(letters, rng.integers(3, 9))) for _ in range(count))


SOUND = "".join(f".{name} {{\n  color: #{i:06x};\n}}\n" for i, name in enumerate(words(60).split(), 7000))
BLOCK = "".join(f"  {words(4, i)};\n" for i in range(92))
SALAD = "".join(chr(c) for c in np.random.default_rng(3).integers(0x3B1, 0x2FFF, 400))
LETTERS = "".join(
    chr(c + i) for c, i in np.random.default_rng(6).choice([[0x3B1, 0], [0x430, 1], [0x5D0, 2]], 60)
)
COUNTED = "".join(f'<div class="card item" id="c{i}">Item</div>\n' for i in range(20))

# The piece behind SOUND, the shape it is called, its period and how often it comes (None: not asked).
DEGENERATE: dict[str, tuple[str, str, int, float | None]] = {
    "one mark for ever": ("!" * 400, "loop", 1, 400),
    "one digit for ever": ("5" * 240, "loop", 1, 240),
    "one word for ever": (" word" * 80, "loop", 5, 80),
    "one character of three bytes": ("哈" * 80, "loop", 1, 80),
    "chained runs": (" word" * 30 + "\\" * 70 + "0" * 70, "chain", 5, 30),
    "two lines in turn": ("  top: 0;\n  left: 50%;\n" * 12, "loop", 23, 12),
    "a block of 92 lines": (BLOCK * 4, "loop", len(BLOCK), 4),
    "only a counter changes": (COUNTED, "counter_loop", 43, None),
    "a salad of scripts": (SALAD, "script_salad", 0, None),
    "a flood of blanks": (" " * 400 + "end", "blanks", 0, None),
    "a flood of newlines": ("\n" * 200, "blanks", 0, None),
    "replacement characters": ("\ufffd" * 20, "replacements", 0, None),
    "a loop that ended": ("height: 25px;\n" * 200 + SOUND[:500], "ended_loop", 14, 200),
}  # fmt: skip


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, [f.line for f in found]
    return found[0]


@pytest.mark.parametrize("shape", DEGENERATE)
def test_a_degenerate_shape_is_named_with_its_onset(shape: str, make: Any, strict: Gate) -> None:
    piece, metric, period, count = DEGENERATE[shape]
    found = only(strict_gate.findings(make(SOUND + piece, finish_reason="length"), strict))
    assert found.metric == metric
    assert abs(found.position - len(SOUND)) <= 2
    assert f"character {found.position:,}" in found.line
    assert abs(found.period - period) <= 1
    assert count is None or abs(found.count - count) <= 0.2
    assert found.value > found.limit


def test_the_sound_beginning_passes(make: Any, strict: Gate) -> None:
    assert strict_gate.findings(make(SOUND, finish_reason="length"), strict) == []


def test_the_unit_and_the_token_of_the_onset(make: Any, strict: Gate) -> None:
    generation = make(SOUND + "left: 50%;\n" * 90, token_ids=[*range(700), *[1, 2, 3, 4] * 90])
    found = only(strict_gate.findings(generation, strict))
    assert (found.unit, found.token) == ("left: 50%;\n", 700)
    assert found.line == (
        f"a loop to the end, 'left: 50%;\\n' × 90, from character {len(SOUND):,} (token 700)"
    )


def test_the_token_of_a_loop_in_the_reasoning_is_not_that_of_the_content(make: Any, strict: Gate) -> None:
    loop = "left: 50%;\n" * 90
    text = f"<think>{SOUND}{loop}</think>{SOUND}{loop}"
    ids = [*range(700), *[1, 2, 3, 4] * 90, *range(800, 1500), *[1, 2, 3, 4] * 90]
    first, second = strict_gate.findings(make(text, token_ids=ids), strict)
    assert (first.part, second.part, second.token) == ("reasoning", "content", 1760)
    assert "about token" in first.line
    assert abs(first.token - 700) < 150


def test_a_loop_of_tokens_without_text(make: Any, strict: Gate) -> None:
    found = only(strict_gate.findings(make(SOUND, token_ids=[*range(500), *[7, 8] * 100]), strict))
    assert (found.metric, found.token, found.value) == ("token_loop", 500, 200)
    assert strict_gate.findings(make(SOUND, token_ids=[*range(500), *[7, 8] * 80]), strict) == []


def test_an_ending_of_a_few_lines_in_no_order(make: Any, strict: Gate) -> None:
    lines = ["  top: 0;\n", "  left: 50%;\n", "  height: 25px;\n"]
    piece = "".join(lines[i] for i in np.random.default_rng(5).integers(0, 3, 300))
    found = only(strict_gate.findings(make(SOUND + piece, finish_reason="length"), strict))
    assert found.metric == "stale"
    assert abs(found.position - len(SOUND)) < 700


@pytest.mark.parametrize(
    ("build", "limit"),
    [
        (lambda n: "!" * n, 180),
        (lambda n: "哈" * (n // 3), 180),
        (lambda n: "\n" * n, 160),
        (lambda n: "\ufffd" * n, 16),
        (
            lambda n: "".join(
                f"\nThe next of all the entries of this long list is number {i}." for i in range(n)
            ),
            5,
        ),
        (lambda n: "[{]}(\n" * (n // 6) + SOUND[:500], 1000),
        (lambda n: LETTERS[:n], 39),
    ],
)
def test_at_the_threshold_it_passes_and_beyond_it_fails(
    build: Callable[[int], str], limit: int, make: Any, strict: Gate
) -> None:
    at, beyond = make(SOUND + "x" + build(limit)), make(SOUND + "x" + build(limit + 3))
    assert strict_gate.findings(at, strict) == []
    assert len(strict_gate.findings(beyond, strict)) == 1


def test_limits_of_thinking_and_echo(make: Any, strict: Gate) -> None:
    def thinking(tokens: int) -> list[Finding]:
        text = "<think>" + words(500)
        return strict_gate.findings(make(text, token_ids=range(tokens), finish_reason="length"), strict)

    assert thinking(4000) == []
    assert only(thinking(4001)).metric == "open_thinking"

    def echo(length: int) -> list[Finding]:
        prompt = words(20, 9).replace(" ", "-")[:length]
        return strict_gate.findings(make(f"{prompt}\n{prompt}\n{SOUND}", prompt_text=prompt), strict)

    assert echo(48) == []
    assert only(echo(49)).metric == "prompt_echo"


def test_the_limit_of_an_ending_without_anything_new(make: Any, strict: Gate) -> None:
    lines = ["  top: 0;\n", "  left: 50%;\n", "  height: 25px;\n"]
    order = np.random.default_rng(5).integers(0, 3, 300)

    def found(count: int) -> list[Finding]:
        return strict_gate.findings(make(SOUND + "".join(lines[i] for i in order[:count])), strict)

    assert found(40) == []
    first = next(count for count in range(40, 300) if found(count))
    assert 300 < only(found(first)).value < 330


def shuffled(pieces: list[str], count: int, seed: int = 1) -> str:
    return "".join(pieces[i] for i in np.random.default_rng(seed).integers(0, len(pieces), count))


RULES = [f".c{i} {{ color: red; margin: {i}px; }}\n" for i in range(8)]
SENTENCES = ["I am sorry. ", "Let me try again. ", "This is the end of it. ", "Thank you very much. "]
HEXES = [f"  x{n:03x}: y;\n" for n in np.random.default_rng(4).integers(0, 4096, 160)]


@pytest.mark.parametrize(
    ("flood", "metric"),
    [
        (shuffled(SENTENCES, 1100), "little"),
        (shuffled(RULES, 1200), "little"),
        ("".join("  color: red;\n" * 10 + varied for varied in HEXES), "little"),
        (shuffled(list("0123456789"), 16000), "digits"),
        (shuffled(["0", "1"], 400), "digits"),
    ],
)
def test_floods_in_no_order(flood: str, metric: str, make: Any, strict: Gate) -> None:
    finding = only(strict_gate.findings(make(SOUND + flood, finish_reason="length"), strict))
    assert finding.metric == metric
    assert finding.position >= len(SOUND)
    if metric == "little":
        assert strict_gate.findings(make(SOUND + flood[:4000], finish_reason="length"), strict) == []


def test_every_threshold_of_the_yaml_is_read(make: Any, strict: Gate) -> None:
    """Raised high, each threshold lets just its own shape pass."""
    cases = {
        "loop_tokens": "!" * 400,
        "counter_periods": COUNTED,
        "salad_letters": SALAD,
        "blanks": " " * 400 + "end",
        "replacements": "\ufffd" * 20,
        "ended_loop_tokens": "height: 25px;\n" * 200 + SOUND[:500],
    }
    for key, piece in cases.items():
        generation = make(SOUND + piece, finish_reason="length")
        raised = replace(strict, strict=replace(strict.strict, **{key: 100_000, "stale_tokens": 100_000}))
        assert strict_gate.findings(generation, strict), key
        assert strict_gate.findings(generation, raised) == [], key


def test_an_early_stop_fails_and_a_cut_is_unknown(make: Any, strict: Gate) -> None:
    stopped = make("Sure.", token_ids=[1, 2])
    assert only(strict_gate.findings(stopped, strict)).metric == "early_stop"
    cut = strict_gate.evidence([make("Sure.", token_ids=[1, 2], finish_reason="length")], strict)
    assert (cut.status, "62 tokens below" in cut.line) == (Status.unknown, True)


ASKED = "Write a page about pricing of three plans for a small shop."


PASTED = words(60, 12)  # 350 characters


def chat(asked: str) -> str:
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("asked", "answer", "again"),
    [
        (ASKED, ASKED, ""),
        (ASKED, f"\n {ASKED.replace(' ', '  ')}\nHere it is.", ""),
        (ASKED, f"{ASKED} {ASKED}\n{SOUND}", " 2 times"),
        (ASKED, f"{ASKED}\nassistant\n{SOUND}{ASKED}", " 2 times"),
        (f"{PASTED} Mend its spelling.", f"{PASTED} Mend its spelling.\n{SOUND}", ""),
    ],
)
@pytest.mark.parametrize("prompt", [chat, str])
def test_the_prompt_echoed(
    asked: str, answer: str, again: str, prompt: Callable[[str], str], make: Any, strict: Gate
) -> None:
    found = only(strict_gate.findings(make(answer, prompt_text=prompt(asked)), strict))
    assert found.metric == "prompt_echo"
    assert f"the prompt is echoed{again}: '{asked[:40]}" in found.line


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (ASKED, f"{ASKED}\n{SOUND}"),
        (ASKED, f"{ASKED[:49]} is what you asked for.\n{SOUND}"),
        (ASKED, f"# Pricing\n{SOUND}{ASKED}"),
        (ASKED, f"<think>\nThe user wants: {ASKED}\n</think>\n{SOUND}"),  # reasoning may quote it
        (f"{PASTED} Mend its spelling.", PASTED),
        (f"{PASTED} Mend its spelling.", f"Here it is: {PASTED}"),
    ],
)
def test_a_question_may_be_quoted(asked: str, answer: str, make: Any, strict: Gate) -> None:
    assert strict_gate.findings(make(answer, prompt_text=chat(asked)), strict) == []


def test_thinking_that_never_ends(make: Any, strict: Gate) -> None:
    endless = make("<think>\n" + words(3000), token_ids=range(5000), finish_reason="length")
    found = only(strict_gate.findings(endless, strict))
    assert (found.metric, found.part) == ("open_thinking", "reasoning")
    by_template = make(words(3000), prompt_text="…<think>\n", token_ids=range(5000), finish_reason="length")
    assert only(strict_gate.findings(by_template, strict)).metric == "open_thinking"
    stopped = make("<think>\n" + words(300))
    assert "stopped inside its thinking" in only(strict_gate.findings(stopped, strict)).line
    silent = make("<think>\n" + words(300) + "</think>\n ")
    assert "no content" in only(strict_gate.findings(silent, strict)).line
    short = make("<think>\n" + words(300), token_ids=range(600), finish_reason="length")
    evidence = strict_gate.evidence([short], strict)
    assert (evidence.status, "inside the thinking" in evidence.line) == (Status.unknown, True)


def test_reasoning_and_content_are_judged_apart(make: Any, strict: Gate) -> None:
    loop = "Wait, let me check. " * 40
    thought = "<think>\n" + words(200) + "\n"
    in_reasoning = only(strict_gate.findings(make(thought + loop + "</think>\n" + SOUND), strict))
    assert (in_reasoning.metric, in_reasoning.part) == ("loop", "reasoning")
    assert abs(in_reasoning.position - len(thought)) <= 1
    assert in_reasoning.line.endswith("in the reasoning")
    in_content = only(strict_gate.findings(make(thought + "</think>\n" + SOUND + loop), strict))
    assert (in_content.metric, in_content.part) == ("loop", "content")
    assert abs(in_content.position - len(thought + "</think>\n" + SOUND)) <= 1
    # One line in each part, each below the threshold: together they would be a loop.
    part = "Wait, let me check. " * 12
    assert strict_gate.findings(make(thought + part + "</think>" + part + SOUND), strict) == []


@pytest.mark.parametrize("after", ["", "\n", " \n\n", "\n```"])
def test_the_verdict_does_not_hang_on_the_last_characters(after: str, make: Any, strict: Gate) -> None:
    for shape, (piece, metric, _, _) in DEGENERATE.items():
        for cut in range(3):
            text = SOUND + piece[: len(piece) - cut] + after
            metrics = {f.metric for f in strict_gate.findings(make(text), strict)}
            assert metric in metrics, (shape, cut)
    for cut in range(40):
        assert strict_gate.findings(make(SOUND[: len(SOUND) - cut] + after), strict) == []


def test_evidence_names_the_output_and_keeps_the_fields_metrics(make: Any, strict: Gate) -> None:
    good, loop = make(SOUND, name="good"), make(SOUND + "a b c d\n" * 90, name="loop")
    found = strict_gate.evidence([good, loop], strict)
    assert (found.kind, found.status) == ("shape", Status.bad)
    assert found.line.startswith("1 of 2 outputs fail; loop-r0: a loop to the end, 'a b c d\\n' × 90")
    assert "fixed_quality would fail 1 of 2" in found.line
    assert (found.metrics["max_same_line_run"], found.metrics["failed_outputs"]) == (90, 1)
    generations = found.details["generations"]
    assert generations["good-r0"]["failures"] == []
    [failure] = generations["loop-r0"]["failures"]
    assert (failure["metric"], failure["period"], failure["part"]) == ("loop", 8, "content")
    assert json.dumps([found.metrics, found.details], allow_nan=False)
    sound = strict_gate.evidence([good], strict)
    assert (sound.status, sound.metrics["fixed_quality_failed"]) == (Status.ok, 0)
    assert strict_gate.evidence([], strict).status is Status.unknown


def test_a_field_alarm_is_reported_and_decides_nothing(make: Any, strict: Gate) -> None:
    rows = "".join(
        f'<li class="nav-item"><a class="nav-link" href="/{w}">x</a>\n' for w in words(100).split()
    )
    found = strict_gate.evidence([make(rows)], strict)
    assert found.status is Status.ok
    assert "fixed_quality would fail 1 of 1: repeat20" in found.line


def test_markers_and_contract_still_count(make: Any, strict: Gate) -> None:
    assert only(strict_gate.findings(make(SOUND + "rgba(rgba(0"), strict)).metric == "bad_markers"
    page = make(SOUND, contract="html")
    assert only(strict_gate.findings(page, strict)).metric == "contract"


def test_scripts_of_letters() -> None:
    groups = [
        scripts_of(np.array([ord(c) for c in text])).tolist()
        for text in ("aZé", "漢かカ", "1 !—😀", "ж", "ع")
    ]
    assert groups[0] == [1, 1, 1]
    assert groups[1] == [2, 2, 2]
    assert groups[2] == [0] * 5
    assert groups[3] != groups[4]


def test_a_list_of_languages_is_no_salad(make: Any, strict: Gate) -> None:
    names = "العربية Български 中文 Čeština Dansk Ελληνικά עברית हिन्दी 日本語 ქართული 한국어 Русский தமிழ் ไทย"
    assert strict_gate.findings(make(SOUND + names.replace(" ", " · ")), strict) == []


def test_the_default_gate_is_strict_and_its_yaml_names_every_threshold() -> None:
    assert compose().gate.shape is ShapeGate.strict
    path = Path(__file__).parents[2] / "conf" / "gate" / "strict.yaml"
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["strict"] == vars(StrictGate())


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["gate.strict.loop_tokens=3"], "gate.strict.loop_tokens=3: must be 40 or more"),
        (["gate.repeat20=5"], "gate.repeat20=5: decides nothing with gate.shape=strict"),
        (["gate=fixed_quality", "gate.strict.blanks=9"], "gate.strict.blanks=9: decides nothing without"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(line)}"):
        compose(overrides)
