"""The page contract: whole pages, cut pages, pages begun by the prompt, lost brackets."""

from __future__ import annotations

import pytest

from sm70lab.judge import html_contract, text_shape
from sm70lab.schema import Gate, Prompt, Status

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
  <style>
    ul>li { color: red; }
    div > p { margin: 0; }
  </style>
</head>
<body class="x">
  <a
     href="#"
     class="y">go</a>
  <script>
    const f = p => p.x;
    const g = a=>a+1;
  </script>
</body>
</html>
"""


def test_a_whole_page_passes() -> None:
    assert html_contract.check(PAGE, cut=False) == html_contract.Contract((), ())
    assert html_contract.check(f"Here:\n```html\n{PAGE}```\n", cut=False).missing == ()


@pytest.mark.parametrize(
    ("taken", "missing"),
    [
        ("<!DOCTYPE html>", "doctype"),
        ('<html lang="en">', "<html>"),
        ("</html>", "</html>"),
        ("<style>", "<style>"),
        ("</style>", "</style>"),
        ("<script>", "<script>"),
        ("</script>", "</script>"),
        ('<body class="x">', "<body>"),
        ("</body>", "</body>"),
    ],
)
def test_each_part_is_asked_for(taken: str, missing: str) -> None:
    assert html_contract.check(PAGE.replace(taken, ""), cut=False).missing == (missing,)


def test_other_elements_are_not_taken_for_the_parts() -> None:
    assert "<body>" in html_contract.check(PAGE.replace("<body", "<bodyguard"), cut=False).missing


def test_an_odd_number_of_fences() -> None:
    assert html_contract.check("```html\n" + PAGE, cut=False).missing == ("closing code fence",)


@pytest.mark.parametrize(
    "line", ['div class="card">', "  /div>", "li>text</li>", "!DOCTYPE html>", "span>", "img src='a.png' />"]
)
def test_a_tag_line_without_its_bracket(line: str) -> None:
    found = html_contract.check(PAGE.replace("<body", f"{line}\n<body"), cut=False)
    assert found.missing == (f"'<' of {found.missing[0][7:]}",)
    assert line.strip()[:3] in found.missing[0]


@pytest.mark.parametrize("line", ["p => p.x", "a=>b", "ul>li {", "div > p,", 'style="x">', "form the div>x"])
def test_lines_that_only_look_like_one(line: str) -> None:
    assert html_contract.check(PAGE.replace("</style>", f"{line}\n</style>"), cut=False).missing == ()


def test_a_cut_page_is_asked_only_for_its_beginning() -> None:
    cut = PAGE[: PAGE.index("</style>")]
    found = html_contract.check("```html\n" + cut, cut=True)
    assert found.missing == ()
    assert set(found.not_applicable) == {
        "</html>", "</style>", "<script>", "</script>", "<body>", "</body>", "closing code fence",
    }  # fmt: skip
    assert html_contract.check("body { }", cut=True).missing == ("doctype", "<html>")
    assert html_contract.check(cut, cut=False).missing == found.not_applicable[:-1]


def test_the_evidence_says_what_was_not_applicable(make, gate: Gate) -> None:  # type: ignore[no-untyped-def]
    cut = PAGE[: PAGE.index("</script>")]
    found = text_shape.evidence([make(cut, finish_reason="length", contract="html")], gate)
    assert found.status is Status.ok
    assert "</script>, </body>" in found.line.replace("</html>, ", "")
    assert "not applicable, cut by the token budget" in found.line
    assert text_shape.evidence([make(cut, contract="html")], gate).status is Status.bad
    assert text_shape.evidence([make(cut)], gate).status is Status.ok


@pytest.mark.parametrize(
    ("prompt", "prefix"),
    [
        ("<!DOCTYPE html>\n<html>\n<head>", "<!DOCTYPE html>\n<html>\n<head>"),
        ("<|im_start|>user\nUse <!doctype html>.<|im_end|>\n<|im_start|>assistant\n", ""),
        (
            "<|im_start|>user\nA page.<|im_end|>\n<|im_start|>assistant\n<!DOCTYPE html>\n",
            "<!DOCTYPE html>\n",
        ),
        ("Explain what <!doctype html> is", ""),
    ],
)
def test_what_the_prompt_already_wrote(prompt: str, prefix: str) -> None:
    assert html_contract.page_prefix(Prompt(0, "p", prompt, [1], 10, "html")) == prefix


def test_a_page_begun_by_the_prompt(make, gate: Gate) -> None:  # type: ignore[no-untyped-def]
    begin, rest = PAGE[:60], PAGE[60:]
    assert text_shape.evidence([make(rest, contract="html", prompt_text=begin)], gate).status is Status.ok
    assert text_shape.evidence([make(rest, contract="html")], gate).status is Status.bad
