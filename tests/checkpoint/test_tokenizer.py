"""tokenizer.json and the chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusal import load, refused
from tiny_checkpoints import VOCABULARY, save_tokenizer

from sm70lab.engine.loading import find
from sm70lab.errors import UsageError
from sm70lab.schema import ModelSpec


def test_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    refused(folder, "tokenizer.json", str(folder))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[]", b"null", b'{"model": {"type": "X"}}', b"\xff\xfe"]
)
def test_broken(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    refused(folder, "tokenizer.json")


@pytest.mark.parametrize("size", [1, 60, VOCABULARY + 1, 200])
def test_too_small_or_too_large(folder: Path, size: int) -> None:
    save_tokenizer(folder, size)
    refused(folder, "tokenizer.json", f"{size} tokens", str(VOCABULARY))


def test_a_few_padding_rows_are_fine(folder: Path) -> None:
    save_tokenizer(folder, VOCABULARY - 2)
    load(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"7", b"null", b"\xff\xfe"])
def test_broken_tokenizer_config(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    refused(folder, "tokenizer_config.json")


def test_template_file_that_is_not_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    refused(folder, "chat_template.jinja")


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}", "{{ messages[5].content }}", "{{ undefined_function() }}", "{{ 1 / 0 }}"],
)
def test_template_that_fails(folder: Path, template: str) -> None:
    """A user message cannot be rendered: one line that says so."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(UsageError, match="template") as caught:
        find(ModelSpec(name="checkpoint", path=str(folder))).text.chat("hello")
    assert "\n" not in str(caught.value)


def test_no_template(folder: Path) -> None:
    with pytest.raises(UsageError, match="chat template"):
        find(ModelSpec(name="checkpoint", path=str(folder))).text.chat("hello")


def test_template_file_is_preferred(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}: {{ m['content'] }}]{% endfor %}", encoding="utf-8"
    )
    assert find(ModelSpec(name="checkpoint", path=str(folder))).text.chat("hello") == "[user: hello]"
