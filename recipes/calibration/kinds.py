"""Which real files make a kind, and which packages bring the kinds that a machine may lack."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_TABLE_RULE = re.compile(r"^\|?\s*:?-{3,}:?\s*\|", re.MULTILINE)
_KANA = re.compile(r"[\u3041-\u30ff]")
_HAN = re.compile(r"[\u4e00-\u9fff]")
_BOX = re.compile(r"[\u2500-\u257f]")
_LOG_LINE = re.compile(
    r"^\W?(\d{4}[-/]\d\d[-/]\d\d|\d\d:\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d)", re.MULTILINE
)
_NUMBER_LINE = re.compile(r"^[\s,;\d.eE+-]+$", re.MULTILINE)


@dataclass(frozen=True)
class Kind:
    """Files whose path ends in one of ``suffixes`` (or matches ``path``) and whose text ``fits``."""

    name: str
    suffixes: tuple[str, ...] = ()
    path: str = ""  # a regular expression
    fits: Callable[[str], bool] = lambda text: True

    def may_hold(self, name: str) -> bool:
        """Whether a file of this name can be of this kind; a packed file counts as what is in it."""
        name = name.removesuffix(".gz")
        if self.path:
            return re.search(self.path, name) is not None
        return name.endswith(self.suffixes)


def _dense(text: str) -> bool:
    """Few line breaks: minified."""
    return text.count("\n") * 400 < len(text)


def _share(pattern: re.Pattern[str], text: str) -> float:
    """Characters of the matches, as a share of the text's."""
    return sum(len(match) for match in pattern.findall(text)) / max(1, len(text))


def _lines(pattern: re.Pattern[str], text: str) -> float:
    """Matching lines as a share of all lines."""
    return len(pattern.findall(text)) / max(1, text.count("\n"))


# The first kind that fits takes a file.
KINDS = (
    Kind("ascii art", (".flf", ".tlf", ".cow")),
    Kind("base64", (".pem", ".crt", ".b64", ".asc")),
    Kind("logs", (".log",)),
    Kind("logs", path=r"/fail2ban/tests/files/logs/"),
    Kind("logs", (".txt", ".out"), fits=lambda text: _lines(_LOG_LINE, text) > 0.8),
    Kind("fortunes", path=r"/games/fortunes/[a-z0-9-]+$"),
    Kind(
        "Japanese prose",
        (".html", ".txt", ".md", ".rst", ".1", ".2", ".3", ".5", ".7", ".8"),
        fits=lambda text: _share(_KANA, text) > 0.1,
    ),
    Kind(
        "Chinese prose",
        (".html", ".txt", ".md", ".rst", ".1", ".2", ".3", ".5", ".7", ".8"),
        fits=lambda text: _share(_HAN, text) > 0.2,
    ),
    Kind(
        "box drawing",
        (".txt", ".md", ".rst", ".py", ".rs", ".go"),
        fits=lambda text: _share(_BOX, text) > 0.01,
    ),
    Kind("markdown with tables", (".md", ".markdown"), fits=lambda text: bool(_TABLE_RULE.search(text))),
    Kind("markdown", (".md", ".markdown")),
    Kind("minified js", (".js", ".mjs", ".cjs"), fits=_dense),
    Kind("javascript", (".js", ".mjs", ".cjs", ".jsx")),
    Kind("minified css", (".css",), fits=_dense),
    Kind("css", (".css", ".scss", ".less")),
    Kind("html", (".html", ".htm", ".xhtml")),
    Kind("json", (".json", ".geojson", ".ipynb", ".map", ".webmanifest")),
    Kind("csv", (".csv", ".tsv")),
    Kind("number lists", (".txt", ".dat", ".data"), fits=lambda text: _lines(_NUMBER_LINE, text) > 0.9),
    Kind("sql", (".sql", ".ddl")),
    Kind("svg", (".svg",)),
    Kind("xml", (".xml", ".xsd", ".xsl", ".dtd", ".pom", ".rng")),
    Kind("yaml", (".yaml", ".yml")),
    Kind("toml and ini", (".toml", ".ini", ".cfg", ".conf")),
    Kind("python", (".py",)),
    Kind("python stubs", (".pyi",)),
    Kind("c", (".c",)),
    Kind("c headers", (".h",)),
    Kind("c++", (".cpp", ".cc", ".cxx", ".hpp", ".hh", ".hxx", ".ipp", ".tcc", ".cuh", ".cu")),
    Kind("java", (".java", ".kt")),
    Kind("go", (".go",)),
    Kind("rust", (".rs",)),
    Kind("ruby", (".rb",)),
    Kind("typescript", (".ts", ".tsx", ".mts", ".cts")),
    Kind("perl", (".pl", ".pm", ".pod", ".t")),
    Kind("php", (".php",)),
    Kind("shell", (".sh", ".bash", ".zsh")),
    Kind(
        "shell", path=r"/bash-completion/completions/|/bin/[a-z-]+$", fits=lambda text: text.startswith("#")
    ),
    Kind("lua", (".lua",)),
    Kind("tcl", (".tcl",)),
    Kind("vim and emacs", (".vim", ".el")),
    Kind("build scripts", (".cmake", ".m4", ".am", ".mk", ".gradle", ".pri", ".gyp")),
    Kind("reStructuredText", (".rst",)),
    Kind("translations", (".po", ".pot")),
    Kind("locale data", path=r"/i18n/(locales|charmaps)/"),
    Kind("keyboard and terminal data", path=r"/(X11/xkb|X11/locale|tabset|vim/vim\d+/keymap)/"),
    Kind("manual pages", path=r"/man/(man\d|[a-z]{2}(_[A-Z]{2})?/man\d)/"),
    Kind("changelogs", path=r"/doc/.*(changelog|changes|news)[^/]*$"),
    Kind("licences", path=r"(?i)(copyright|licen[cs]e|copying|notice)[^/]*$"),
    Kind("plain text", (".txt", ".text", ".README", ".tex")),
    Kind("plain text", path=r"(?i)/(readme|authors|todo|install|faq)[^/]*$"),
)

# Packages that hold the kinds which a plain machine with Python and Debian lacks. Debian's: Chinese and
# Japanese prose, logs, ASCII art and short texts, Go, Rust, Ruby and Lua.
DEBIAN = (
    "debian-reference-zh-cn",
    "debian-reference-ja",
    "manpages-zh",
    "manpages-ja",
    "fortunes-zh",
    "fail2ban",
    "cowsay",
    "figlet",
    "boxes",
    "fortunes",
    "golang-github-spf13-cobra-dev",
    "golang-golang-x-net-dev",
    "librust-regex-dev",
    "librust-serde-dev",
    "librust-clap-dev",
    "ruby-rack",
    "ruby-sinatra",
    "ruby-activesupport",
    "lua-penlight",
)
NPM = ("react-native", "rxjs", "vega-datasets", "highlight.js")  # Java and C++; TypeScript; data; CSS
PYPI = ("pyfiglet", "sqlfluff", "Sphinx")  # ASCII art; SQL and YAML; translations
