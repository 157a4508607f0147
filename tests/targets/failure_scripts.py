"""What the scripted servers of ``test_failures`` do: one script a kind of failure."""

from __future__ import annotations

import json
from typing import Any

KEY = "sk-sesame-open-4711"
THINKING = "Was ist das? 생각 중 🙂 … fertig."
ANSWER = "Tee für zwei: 42 °C — 안녕, 세계! 🙂 Grüße aus Köln, und noch ein Satz, damit es reicht."
DRAFTS = {"drafts": 4, "acceptance": [0.8, 0.6, 0.45, 0.3]}


def answers(*each: dict[str, Any], **script: Any) -> dict[str, Any]:
    return {"answers": list(each), **script}


def faulty(kind: str, at: int = 100, **fault: Any) -> dict[str, Any]:
    return {"faults": [{"kind": kind, "at": at, **fault}]}


TOO_MANY = {"times": 1, "status": 429, "headers": {"retry-after": "0"}}
BROKEN = {
    "times": 1,
    "status": 500,
    "headers": {"retry-after": "0"},
    "error": "CUDA error: an illegal access",
}
TELLS = {"version": "1", "route": {"name": "spec_core_003"}, "hazard": "no_ssm_rollback"}
TOLD = {"text": ANSWER, "reasoning": THINKING}
HEALTHY: dict[str, Any] = {}

# Answers to one prompt each, all in one run: after the first nothing that fails may harm the others.
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "healthy": [HEALTHY],
    "too_many_then_fine": [TOO_MANY, HEALTHY],
    "broken_then_fine": [BROKEN, BROKEN, HEALTHY],
    "cut_then_fine": [{"times": 1, **faulty("cut", at=0)}, HEALTHY],
    "error_then_fine": [{"times": 1, **faulty("error", at=0)}, HEALTHY],
    "always_broken": [{**BROKEN, "times": None}],
    "error_within": [faulty("error", message="EngineDeadError: the engine has died")],
    "always_cut": [faulty("cut", at=0)],
    "stall_middle": [faulty("stall")],
    "cut": [faulty("cut")],
    "cut_close": [{**faulty("cut"), "wire": {"framing": "close"}}],
    "reset": [faulty("reset")],
    "too_long": [{"wire": {"framing": "too_long"}}],
    "too_short": [{"wire": {"framing": "too_short"}}],
    "malformed": [faulty("malformed")],
    "malformed_first": [faulty("malformed", at=0)],
    "wrong_shape": [faulty("malformed", text='data: {"choices": "none"}')],
    "wrong_ids": [faulty("malformed", text='data: {"choices": [{"index": 0, "token_ids": ["x"]}]}')],
    "not_utf8": [
        faulty("malformed", text='data: {"choices": [{"index": 0, "delta": {"content": "\udcff"}}]}')
    ],
    "junk_lines": [faulty("malformed", text=": a comment\nretry: 3\nevent: message\nid: 4")],
    "duplicate": [faulty("duplicate")],
    "other_id": [faulty("other_id")],
    "told": [TOLD],
    "told_in_content": [{**TOLD, "reasoning_field": None}],
    "told_in_newer_field": [{**TOLD, "reasoning_field": "reasoning"}],
    "bytes": [{**TOLD, "wire": {"split": 1}}],
    "bytes_crlf": [
        {**TOLD, "wire": {"split": 1, "line_end": "crlf", "byte_order_mark": True, "two_lines": True}}
    ],
    "bytes_cr": [{**TOLD, "wire": {"split": 1, "line_end": "cr", "blank": False}}],
    "three_bytes": [{**TOLD, "chunk_tokens": 3, "wire": {"split": 3, "comment_every": 2}}],
    "wrong_usage": [{"usage_tokens": 10}],
    "no_usage_no_ids": [{"usage": "absent", "token_ids": False}],
    "no_ids": [{"token_ids": False}],
    "no_finish": [{"finish": "missing"}],
    "no_done": [{"wire": {"done": False}}],
    "empty": [{"text": ""}],
}


def of_prompts(prompts: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Answers that are told apart by their prompt."""
    return [{**answer, "match": {"prompt": f"<{name}>"}} for name, each in prompts.items() for answer in each]


LINES = "".join(f".card-{i} {{ margin: {i * 7 % 13}px; }}\n" for i in range(92))
# Degenerate outputs, one a prompt, and the shape that each is found as.
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "one_mark": ({"collapse": {"at": 200, "unit": "!"}}, "loop"),
    "one_word": ({"collapse": {"at": 200, "unit": " propertycorrectly", "good": "prose"}}, "bad_markers"),
    "two_lines": ({"collapse": {"at": 200, "unit": "display: block;\nmargin: 0;\n"}}, "loop"),
    "block_of_lines": ({"text": LINES, "repeat_text": 32}, "counter_loop"),
    "blanks": ({"collapse": {"at": 200, "unit": "\n "}}, "blanks"),
    "replacements": ({"collapse": {"at": 200, "unit": "\ufffd"}}, "replacements"),
    "counter": ({"text": "".join(f"  <li>Item number {i}</li>\n" for i in range(300))}, "counter_loop"),
    "early_stop": ({"text": "Sorry."}, "early_stop"),
    "only_thinking": ({"text": "", "reasoning_tokens": 900}, "open_thinking"),
    "thinking_loop": ({"collapse": {"at": 200, "unit": "Wait. ", "reasoning": True}}, "loop"),
    "thinking_in_content": ({"text": "<think>\nHm. " + "Wait. " * 300}, "loop"),
}
SOUND: dict[str, dict[str, Any]] = {
    "page": {"synthetic": {"tokens": 2500}},
    "prose": {"synthetic": {"good": "prose", "tokens": 2500}},
    "thought_about": {"synthetic": {"tokens": 1500}, "reasoning_tokens": 1000},
}
SHAPED = {name: [answer] for name, (answer, _) in SHAPES.items()}

SCRIPTS: dict[str, dict[str, Any]] = {
    "everything": answers(*of_prompts(PROMPTS)),
    "shapes": answers(*of_prompts(SHAPED | {name: [answer] for name, answer in SOUND.items()})),
    "healthy": answers(HEALTHY),
    "short": answers({"text": "Tee? 🙂 안", "reasoning": "hm 🙂", "chunk_tokens": 3}),
    "keyed": answers(HEALTHY, api_key=KEY),
    "always_too_many": answers({**TOO_MANY, "times": None}),
    "always_broken": answers({**BROKEN, "times": None}),
    "refused_for_the_second": answers({"match": {"prompt": "second"}, "status": 400, "error": "no"}, HEALTHY),
    "refused": answers({"status": 400, "error": "temperature must be non-negative"}),
    "not_found": answers({"status": 404, "error": "no such route"}),
    "busy_page": answers({"status": 502, "body": "<html>\n<h1>502 Bad Gateway</h1>\n</html>"}),
    "not_json": answers({"body": "<html>\n<h1>Welcome</h1>\n</html>"}),
    "not_http": answers({"body": "SSH-2.0-OpenSSH_9.6\r\n", "wire": {"framing": "none"}}),
    "cut": answers(faulty("cut")),
    "error_first": answers(faulty("error", at=0)),
    "stall_first": answers(faulty("stall", at=0)),
    "stall_before_status": answers(faulty("stall", at=-1)),
    "trickle": answers({"tokens_per_second": 100.0, "wire": {"comment_every": 1}}),
    "huge_line": answers(faulty("huge_line", bytes=100_000_000)),
    "refuses_ids": answers(HEALTHY, refuses=["return_token_ids"]),
    "refuses_top_k": answers(HEALTHY, refuses=["top_k"]),
    "no_ids": answers({"usage": "absent", "token_ids": False}),
    "empty": answers({"text": ""}),
    "collapse": answers({"collapse": {"at": 500, "unit": "5"}}),
    "collapse_in_reasoning": answers({"collapse": {"at": 500, "unit": "0 ", "reasoning": True}}),
    "plateau": answers(
        {"collapse": {"at": 600, "unit": "px3 "}, "tokens_per_second": 2500.0},
        counters={**DRAFTS, "plateau": True},
    ),
    "drafting": answers({"tokens_per_second": 2500.0}, counters=DRAFTS),
    "traffic": answers({"tokens_per_second": 600.0}, counters={"other_traffic": 2000.0}),
    "bare": answers(HEALTHY, version=None, served_models=None, counters=None),
    "no_chat": answers(HEALTHY, endpoints=["completions"], version=None, counters=None),
    "broken_metrics": answers(HEALTHY, pages={"/metrics": {"body": "this { is no metric 1 2 3\n"}}),
    "failing_pages": answers(
        HEALTHY, pages={"/metrics": {"status": 500, "body": "no"}, "/version": {"status": 503, "body": "no"}}
    ),
    "redirected": answers(
        HEALTHY, pages={"/v1/models": {"status": 307, "headers": {"location": "/elsewhere"}}}
    ),
    "drafting_malformed": answers(
        {"tokens_per_second": 2500.0, **faulty("malformed", at=20)}, counters=DRAFTS
    ),
    "tells": answers(
        {"tokens_per_second": 2500.0},
        counters=DRAFTS,
        pages={"/version": {"body": json.dumps(TELLS), "headers": {"content-type": "application/json"}}},
    ),
    "slow": answers({"tokens_per_second": 100.0}),
}
