"""Chat prompts for training documents, made from a file's title, headings or selectors."""

from __future__ import annotations

import random
import re

TITLE = re.compile(r"<title>\s*([^<>]{3,60}?)\s*</title>", re.I)
HEADING = re.compile(r"<h[12][^>]*>\s*([A-Za-z][^<>]{2,50}?)\s*</h[12]>", re.I)
SELECTOR = re.compile(r"^(\.[A-Za-z][\w-]{2,24})\b[^{}\n]*\{", re.M)
SYSTEM = (
    "You are a helpful assistant.",
    "You are a web developer. Answer with code only.",
    "You write complete, clean HTML and CSS.",
)
HTML_PROMPTS = (
    'Write a complete HTML page titled "{}".',
    'Write a single-file HTML page for "{}" with CSS and JavaScript.',
    "Build a web page about {} with HTML and CSS.",
    "Create a website for {}. Start with <!DOCTYPE html>.",
    "Make a long, complete page: {}.",
    "I need the HTML of {}. Please give me all of it.",
    "Please write {} in HTML.",
)
CSS_PROMPTS = (
    "Write a CSS stylesheet for {}.",
    "Write the CSS of {} with all states and breakpoints.",
    "Style {} with plain CSS.",
    "Give me a long CSS file: {}.",
    "Please write a complete style sheet that covers {}.",
)
OTHER_PROMPTS = (
    "Write a long, detailed answer.",
    "Show me an example.",
    "Write a web page with everything in one file.",
    "Write as much code as you can.",
)


def chat_prompt(text: str, kind: str, rng: random.Random) -> str:
    """The ChatML turns before the assistant's text, up to and with its opening line."""
    if kind == "html":
        found = TITLE.findall(text) + HEADING.findall(text)
        subject = rng.choice(found[:4]) if found else ""
        template = rng.choice(HTML_PROMPTS)
    else:
        names = list(dict.fromkeys(SELECTOR.findall(text)))
        subject = ", ".join(rng.sample(names, min(len(names), rng.randint(1, 4))))
        template = rng.choice(CSS_PROMPTS)
    subject = re.sub(r"\s+", " ", subject)
    user = template.format(subject) if subject else rng.choice(OTHER_PROMPTS)
    head = ""
    if rng.random() < 0.25:
        head = f"<|im_start|>system\n{rng.choice(SYSTEM)}<|im_end|>\n"
    return f"{head}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
