"""Scripts as files: where they are, and every mistake in one as one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from sm70lab.config import explain, near
from sm70lab.errors import UsageError
from sm70lab.raw_text import escape, load_yaml
from sm70lab.serving.script import BEFORE_STATUS, Answer, Fault, FaultKind, Script
from sm70lab.serving.script_recorded import recorded_output

BUNDLED = Path(__file__).with_name("scripts")
SUFFIX = ".yaml"
SOURCES = ("text", "synthetic", "collapse", "run", "sse")
LISTS: dict[str, Any] = {"answers": Answer, "faults": Fault}


def bundled() -> dict[str, Path]:
    """Name → file of the scripts that come with the package, in order of name."""
    return {path.stem: path for path in sorted(BUNDLED.glob(f"*{SUFFIX}"))}


def find(given: str) -> dict[str, Path]:
    """Prefix → file of what ``--script`` names: a file or a bundled name at ``""``, a folder's files at
    ``/<name>``. Raises ``UsageError`` where there is none."""
    path = Path(given).expanduser()
    if path.is_dir():
        found = {f"/{file.stem}": file for file in sorted(path.glob(f"*{SUFFIX}"))}
        if not found:
            raise UsageError(f"--script {given}: no *{SUFFIX} in this folder")
        return found
    if path.is_file():
        return {"": path}
    names = bundled()
    if given in names:
        return {"": names[given]}
    raise UsageError(
        f"--script {given}: no such file, and no script of that name; {near(given, list(names))}"
    )


def load(path: Path) -> Script:
    """Read and check one script. Raises ``UsageError`` that names file, key and what would be right."""
    try:
        values = load_yaml(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text ({error})") from error
    except yaml.YAMLError as error:
        raise explain(error) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: must be a mapping with keys such as {', '.join(_names(Script)[:6])}")
    script = _typed(path, Script, values)
    assert isinstance(script, Script)
    for place, complaint in _complaints(script):
        raise UsageError(f"{path}: {place}: {complaint}")
    _anchor(script, path.parent)
    return script


def _names(kind: Any) -> list[str]:
    return [f.name for f in fields(kind)]


def _typed(path: Path, kind: Any, values: Any, place: str = "") -> Any:
    """``values`` as an object of ``kind``."""
    _check_shapes(path, kind, values, place)
    try:
        return OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.create(_escaped(values)))
        )
    except (OmegaConfBaseException, ValueError) as error:  # ValueError: an entry that is no mapping
        _look_inside(path, values, place)  # OmegaConf does not say which entry of a list it means
        key = f"{place}{getattr(error, 'full_key', None) or ''}".rstrip(".")
        if isinstance(error, ConfigKeyError):
            known = _names(error.object_type) if is_dataclass(error.object_type) else []
            raise UsageError(f"{path}: {key}: no such key; {near(str(error.key), known)}") from error
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path}: {key}: {line}") from error


def _check_shapes(path: Path, kind: Any, values: Any, place: str) -> None:
    """Raise where a list or a group of keys is needed and something else stands: OmegaConf names no key."""
    if not isinstance(values, dict):
        raise UsageError(f"{path}: {place.rstrip('.')}: must be keys and values: {{{_names(kind)[0]}: …}}")
    for key, hint in get_type_hints(kind).items():
        value: Any = values.get(key)
        if key not in values or (value is None and type(None) in get_args(hint)):
            continue
        inner = next((h for h in get_args(hint) if h is not type(None)), hint) if _optional(hint) else hint
        if get_origin(inner) is list and not isinstance(value, list):
            raise UsageError(f"{path}: {place}{key}: must be a list, not {value!r}")
        if get_origin(inner) is dict and not isinstance(value, dict):
            raise UsageError(f"{path}: {place}{key}: must be keys and values, not {value!r}")
        if get_origin(inner) is dict and is_dataclass(get_args(inner)[1]):
            for name, entry in value.items():
                _check_shapes(path, get_args(inner)[1], entry, f"{place}{key}.{name}.")
        if is_dataclass(inner):
            _check_shapes(path, inner, value, f"{place}{key}.")


def _optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _look_inside(path: Path, values: Any, place: str) -> None:
    """Raise for the entry of a list that is wrong, if one is."""
    for key, inner in LISTS.items():
        entries = values.get(key) if isinstance(values, dict) else None
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            _typed(path, inner, entry, f"{place}{key}[{index}].")


def _escaped(value: Any) -> Any:
    """No ``${…}`` in a script is a reference: its texts are those of models."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value


def _complaints(script: Script) -> Iterator[tuple[str, str]]:
    """(place, complaint) of what types cannot say."""
    counters = script.counters
    if counters is not None:
        rates = counters.acceptance
        if len(rates) != counters.drafts:
            yield "counters.acceptance", f"needs {counters.drafts} rates, one a draft; has {len(rates)}"
        if any(not 0 <= rate <= 1 for rate in rates) or rates != sorted(rates, reverse=True):
            yield "counters.acceptance", f"rates of 1, 2, … drafts must fall from 1 to 0; has {rates}"
        if counters.drafts < 0 or counters.other_traffic < 0:
            yield "counters", "drafts and other_traffic must be 0 or more"
    if not script.answers:
        yield "answers", "at least one is needed"
    for index, answer in enumerate(script.answers):
        for key, complaint in _answer_complaints(answer):
            yield f"answers[{index}].{key}", complaint


def _answer_complaints(answer: Answer) -> Iterator[tuple[str, str]]:
    given = [name for name in SOURCES if getattr(answer, name) is not None]
    if len(given) > 1:
        yield given[1], f"an answer has one source of tokens, and {given[0]} is given too"
    streams = answer.status == 200 and answer.body is None
    if not streams and (given or any(fault.at >= 0 for fault in answer.faults)):
        what = given[0] if given else "faults"
        yield what, f"status {answer.status} with a body of its own sends no tokens; leave it out"
    if not 100 <= answer.status <= 599:
        yield "status", f"{answer.status} is no HTTP status"
    if answer.times is not None and answer.times < 1:
        yield "times", f"{answer.times} must be at least 1"
    if answer.reasoning_tokens < 0:
        yield "reasoning_tokens", f"{answer.reasoning_tokens} must be 0 or more"
    for key in ("chunk_tokens", "repeat_text"):
        if getattr(answer, key) < 1:
            yield key, f"{getattr(answer, key)} must be at least 1"
    if answer.repeat_text > 1 and answer.text is None:
        yield "repeat_text", "repeats the key text, which is not given"
    if answer.tokens_per_second is not None and answer.tokens_per_second <= 0:
        yield "tokens_per_second", f"{answer.tokens_per_second} must be above 0; null is without a limit"
    if answer.collapse is not None and (answer.collapse.at < 0 or not answer.collapse.unit):
        yield "collapse", "at must be 0 or more, and unit some text"
    if answer.wire.split is not None and answer.wire.split < 1:
        yield "wire.split", f"{answer.wire.split} must be at least 1 byte"
    if answer.reasoning is not None and answer.reasoning_tokens:
        yield "reasoning_tokens", "reasoning is given too; leave one of them out"
    if answer.sse is not None and (answer.reasoning is not None or answer.reasoning_tokens):
        yield "reasoning", "a recorded event stream is replayed as it is; leave it out"
    early = (FaultKind.stall, FaultKind.cut, FaultKind.reset)
    for number, fault in enumerate(answer.faults):
        if fault.at < BEFORE_STATUS or (fault.at == BEFORE_STATUS and fault.kind not in early):
            yield f"faults[{number}].at", f"{fault.at} must be 0 or more; −1 with stall, cut or reset"


def _anchor(script: Script, folder: Path) -> None:
    """Files that a script names are beside it."""
    for answer in script.answers:
        if answer.sse is not None:
            answer.sse = str(folder / Path(answer.sse).expanduser())
            if not Path(answer.sse).is_file():
                raise UsageError(f"{answer.sse}: no such file; sse names a recorded event stream")
        if answer.run is not None:
            answer.run.folder = str(folder / Path(answer.run.folder).expanduser())
            recorded_output(answer.run)  # what cannot be read is found now
    if script.tokenizer not in ("bytes", "web"):
        script.tokenizer = str(folder / Path(script.tokenizer).expanduser())
