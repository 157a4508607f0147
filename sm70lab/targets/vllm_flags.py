"""A configuration as the command of a vLLM server: the one table of variables and arguments.

Sources: names, values and meaning of the fork's variables are those of the SM70 MTP output-quality audit
(1Cat-vLLM, June and July 2026); arguments are vLLM's own. The audit's rows stand behind the entries.
"""

from __future__ import annotations

import difflib
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from sm70lab.config_checks_target import AS_SERVED
from sm70lab.errors import UsageError
from sm70lab.schema import (
    DraftHeadKind,
    DraftSampling,
    ExperimentConfig,
    GraphMode,
    ModelDtype,
    ModelSpec,
    Numerics,
    Route,
    StateConfig,
    StateDtype,
)

EMBEDDED = "web"  # the checkpoint within the package
RANDOM_MODELS = ("random", "tiny")
PROGRAM = ("-m", "vllm.entrypoints.openai.api_server")
MTP = "mtp"
GDN = "VLLM_SM70_QWEN_GDN_"

# Route flag → the variable that is 1 where it is set and 0 where it is not. All are always written, so
# that no default of some version of the fork decides: it changed on the way (rows AE, AG).
BOUNDARY: dict[str, str] = {
    "full_forward": f"{GDN}FULL_FORWARD",  # AA, AF
    "input_core": f"{GDN}INPUT_CORE_OP",  # AC
    "input_projection": f"{GDN}INPUT_PROJECTION_OP",  # AD
    "output_projection": f"{GDN}OUTPUT_PROJECTION_OP",  # AB
    "context_core": f"{GDN}CONTEXT_CORE",  # V, W, Z
    "spec_core_003": f"{GDN}003_SPEC_CORE_OP",  # the accepted route
}
DISABLE_FULL_FORWARD = f"{GDN}DISABLE_FULL_FORWARD"  # 1 where route.full_forward is not set
TOKEN_MATCHING = "VLLM_MTP_STOCHASTIC_TOKEN_MATCHING"  # R
PACKED = "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE"

# Variables without a route field, set by target.env: what the audit says of each.
BESIDE_THE_ROUTE: dict[str, str] = {
    f"{GDN}SPEC_CORE_OP": "the other speculative core; 0 in the accepted route",
    f"{GDN}SPEC_DECODE_PIECEWISE": "AH: verify rounds go to PIECEWISE graphs",
    f"{GDN}003_SPEC_ALLOW_DEEP_MTP": "later trees keep three and more drafts off the 003 core without it",
    "VLLM_SM70_GDN_MIXED_QKV_CONTIGUOUS": "N: mixed_qkv is copied before the core",
    "VLLM_SM70_FLA_WARPS": "O: warps of the recurrent kernel (0.0.3: 4)",
    "VLLM_SM70_FLA_STAGES": "O: its stages (0.0.3: 2)",
    "VLLM_SM70_FLA_RECURRENT_SCHEDULE": "1: its SM70 schedule, one warp and three stages",
    "VLLM_SM70_MTP_DENSE_F16_FASTPATH": "K: 0 turns the draft layers' dense float16 path off",
    "VLLM_SM70_MTP_SYNC_ACCEPT_COUNTS": "L: accepted counts corrected synchronously",
    "VLLM_SM70_MTP_LEGACY_OUTPUT_TOKEN_REPAIR": "M: output ids repaired as in 0.0.3",
    "VLLM_SM70_MTP_LEGACY_GDN_NON_SPEC_SLOT0": "non-speculative rows read state slot 0",
    "VLLM_SM70_MTP_LEGACY_GDN_MIXED_DECODE_ROUTING": "one-token rows of mixed batches decode",
    "VLLM_SM70_MTP_LEGACY_QWEN_STEP_IDX": "every draft step has index 0",
    "VLLM_SM70_MTP_EXACT_DRAFT_SEQ_LENS_CPU": "T: exact sequence lengths for the drafter",
    "VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH": "compile and graph policy of 0.0.3; 0 turns it off",
    "VLLM_SM70_FLASH_V100_DECODE_GRAPH_NO_COMPILE": "decode graphs without compilation",
    "VLLM_FLASH_V100_DECODE_DYNAMIC_PARTITIONS": "S: 0 turns dynamic partitions off",
    "VLLM_MAMBA_ALIGN_CPU_POSTPROCESS": "C: state copied by the CPU reference",
    "VLLM_ALLOW_MAMBA_SPEC_FULL_CUDAGRAPH": "AI: 0 keeps verify rounds off FULL graphs",
    "VLLM_MAMBA_ALIGN_DEBUG": "logs state copies",
    "VLLM_SPEC_DUMP_ALIGNMENT": "B: dumps sampler rows",
    "VLLM_SPEC_DUMP_ALIGNMENT_LIMIT": "how many",
    "VLLM_SM70_MTP_DUMP_STEP_DIR": "S: folder of step dumps",
    "VLLM_SM70_DUMP_GDN_STATE_TABLE_DIR": "folder of state-table dumps",
    "VLLM_SM70_DUMP_GDN_STATE_TABLE_START_SEQ": "from this sequence length",
    "VLLM_SM70_DUMP_GDN_STATE_TABLE_END_SEQ": "to this one",
}

DRAFT_SAMPLE_METHOD = {
    DraftSampling.greedy: "greedy",  # G, P, W
    DraftSampling.probabilistic: "probabilistic",  # J
    DraftSampling.token_matching: "greedy",  # R, with TOKEN_MATCHING=1
}
DTYPES = {ModelDtype.float16: "half", ModelDtype.bfloat16: "bfloat16", ModelDtype.float32: "float32"}
GRAPHS = {
    GraphMode.none: "NONE",
    GraphMode.piecewise: "PIECEWISE",
    GraphMode.full: "FULL_DECODE_ONLY",
    GraphMode.full_and_piecewise: "FULL_AND_PIECEWISE",
}
STARTS_DRAFTS = ("method", "model", "num_speculative_tokens")  # without one vLLM has nothing to draft with
SHAPED = ("compile", "graph", "prefix_blocks")  # route settings that a serving shape has for every route
LIKE_A_KNOWN_ONE = 0.94  # difflib's ratio above which an unknown variable is a slip of the hand


@dataclass(frozen=True)
class Entry:
    """One variable or argument of a launch."""

    name: str  # VLLM_… or an argument with underscores, as target.arguments has it
    value: Any
    source: str  # the setting that asks for it


@dataclass(frozen=True)
class Launch:
    """How a server is started. Two equal ones are the same server."""

    program: tuple[str, ...]
    variables: tuple[Entry, ...]
    arguments: tuple[Entry, ...]
    model: str
    not_applied: tuple[str, ...]  # settings of the route that a vLLM server has nothing for

    @property
    def environment(self) -> dict[str, str]:
        """Variables beside the inherited ones."""
        return {entry.name: str(entry.value) for entry in self.variables}

    def command(self, host: str, port: int) -> list[str]:
        """Program and arguments."""
        serve = self.program[-1] == "serve"  # takes the model as its first word
        words = [*self.program, *([self.model] if serve else ["--model", self.model])]
        words += ["--host", host, "--port", str(port)]
        for entry in self.arguments:
            words += argument_words(entry.name, entry.value)
        return words

    def shell(self, host: str, port: int) -> str:
        """The same as one command for a shell, a variable or argument a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = self.command(host, port)
        count = len(self.program)
        lines.append(shlex.join(words[:count]))
        rest = words[count:]
        while rest:
            line = [rest.pop(0)]
            while rest and not rest[0].startswith("--"):
                line.append(rest.pop(0))
            lines.append("  " + shlex.join(line))
        return " \\\n".join(lines)

    def sources(self) -> list[tuple[str, str]]:
        """(what is set, by which setting), in the command's order."""
        told = [(f"{entry.name}={entry.value}", entry.source) for entry in self.variables]
        return told + [
            (shlex.join(argument_words(entry.name, entry.value)), entry.source) for entry in self.arguments
        ]


def argument_words(name: str, value: Any) -> list[str]:
    """``--max-model-len 4096`` of ``max_model_len``; ``--no-…`` of false; JSON of dictionaries."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{name.replace('_', '-')}"]
    if isinstance(value, dict):
        return [flag, json.dumps(value, ensure_ascii=False, separators=(",", ":"))]
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


def launch(config: ExperimentConfig) -> Launch:
    """How this configuration's server is started: pure, nothing is looked up or run.

    | setting | variable or argument |
    |---|---|
    | ``route.full_forward`` … ``spec_core_003`` | ``BOUNDARY``, and ``DISABLE_FULL_FORWARD`` |
    | ``route.packed_recurrent=true`` | ``PACKED`` = 1; false leaves the fork's default |
    | ``route.draft_tokens`` | ``--speculative-config`` ``method=mtp``, ``num_speculative_tokens``; 0: none |
    | ``route.draft_sampling`` | its ``draft_sample_method``, and ``TOKEN_MATCHING`` |
    | ``route.compile``, ``route.graph`` | ``--enforce-eager``, or ``--compilation-config`` |
    | ``route.state.dtype`` | ``--mamba-ssm-cache-dtype`` |
    | ``route.state.prefix_blocks`` | ``--[no-]enable-prefix-caching``, with ``--mamba-cache-mode align`` |
    | ``model.path``, ``model.dtype`` | ``--model``, ``--dtype`` |
    | ``target.max_num_seqs`` | ``--max-num-seqs`` |
    | ``target.env``, ``target.arguments`` | as they stand; null leaves out what stands above |

    ``route=as_served`` writes nothing of a route, and no ``speculative_config`` that only adds to a route's
    drafts. Raises ``UsageError`` where settings contradict each
    other, or one exists in the built-in engine alone.
    """
    target = config.target
    _check_engine_alone(config.route)
    for name in target.env:
        _check_spelling(name)
    variables, arguments, not_applied = _of_route(config.route)
    arguments, unused = _merged_speculation(config.route, arguments, dict(target.arguments))
    not_applied += unused
    folder = _folder(config.model)
    if folder is not None:
        if config.model.dtype not in DTYPES:
            raise UsageError(
                f"model.dtype={config.model.dtype.value}: vLLM has no such type; "
                f"choose from {', '.join(dtype.value for dtype in DTYPES)}"
            )
        arguments.append(
            Entry("dtype", DTYPES[config.model.dtype], f"model.dtype={config.model.dtype.value}")
        )
    arguments.append(Entry("max_num_seqs", target.max_num_seqs, f"target.max_num_seqs={target.max_num_seqs}"))
    given = {name: value for name, value in target.arguments.items() if name != "speculative_config"}
    named = given.pop("model", None)
    if folder is not None and named not in (None, folder):
        raise UsageError(
            f"target.arguments.model={named}: contradicts model={folder}, which is served; leave one of them "
            "out"
        )
    model = folder or named
    if model is None:
        raise UsageError(
            "model.path=null: target=vllm needs weights to serve; set model=/a/folder, or "
            "target.arguments.model to a name of the Hugging Face hub"
        )
    return Launch(
        program=tuple(target.command or (target.python or sys.executable, *PROGRAM)),
        variables=tuple(_with_given(variables, dict(target.env), "target.env")),
        arguments=tuple(_with_given(arguments, given, "target.arguments")),
        model=str(model),
        not_applied=tuple(not_applied),
    )


def _folder(model: ModelSpec) -> str | None:
    if model.name in RANDOM_MODELS:
        raise UsageError(f"model={model.name}: drawn weights have no folder to serve; set model=/a/folder")
    if model.name == EMBEDDED:
        return str(Path(__file__).resolve().parents[1] / "models" / EMBEDDED)
    return model.path


def _check_engine_alone(route: Route) -> None:
    """Settings that nothing in vLLM answers to, and that a run must not carry as if it had."""
    for name, value, default in (
        ("draft_head", route.draft_head.value, DraftHeadKind.full.value),
        ("numerics", route.numerics.value, Numerics.fast.value),
        ("state.prefill_chunk", route.state.prefill_chunk, 0),
    ):
        if value != default:
            raise UsageError(
                f"route.{name}={value}: exists in the built-in engine alone; with target=vllm use "
                f"route.{name}={default}"
            )
    if route.state.dtype is StateDtype.float64:
        raise UsageError("route.state.dtype=float64: vLLM has no such type; use auto, float16 or float32")


def _check_spelling(name: str) -> None:
    """A variable that nobody reads changes nothing, in silence."""
    known = [*BOUNDARY.values(), DISABLE_FULL_FORWARD, TOKEN_MATCHING, PACKED, *BESIDE_THE_ROUTE]
    close = difflib.get_close_matches(name, known, n=1, cutoff=LIKE_A_KNOWN_ONE)
    if close and close[0] != name:
        raise UsageError(f"target.env.{name}: no variable of the table; did you mean {close[0]}?")


def _of_route(route: Route) -> tuple[list[Entry], list[Entry], list[str]]:
    """Variables, arguments, and what has no counterpart."""
    if route.name == AS_SERVED:
        return [], [], list(_left_to_the_server(route))
    _check_scheme(route.state.scheme)
    variables = list(_boundary(route))
    arguments: list[Entry] = []
    not_applied = [f"route.state.scheme={route.state.scheme}", f"route.proposal={route.proposal.value}"]
    if route.packed_recurrent:
        variables.append(Entry(PACKED, 1, "route.packed_recurrent=true"))
    if route.draft_tokens:
        source = f"route.draft_tokens={route.draft_tokens}"
        speculation: dict[str, Any] = {"method": MTP, "num_speculative_tokens": route.draft_tokens}
        sampling = f"route.draft_sampling={route.draft_sampling.value}"
        if route.draft_sampling in DRAFT_SAMPLE_METHOD:
            speculation["draft_sample_method"] = DRAFT_SAMPLE_METHOD[route.draft_sampling]
            source += f" {sampling}"
        else:
            not_applied.append(f"{sampling} (the server draws drafts its own way)")
        matching = int(route.draft_sampling is DraftSampling.token_matching)
        if matching:
            variables.append(Entry(TOKEN_MATCHING, matching, sampling))
        arguments.append(Entry("speculative_config", speculation, source))
    arguments += _graphs(route)
    if route.state.dtype is not StateDtype.auto:
        source = f"route.state.dtype={route.state.dtype.value}"
        arguments.append(Entry("mamba_ssm_cache_dtype", route.state.dtype.value, source))
    source = f"route.state.prefix_blocks={route.state.prefix_blocks}"
    arguments.append(Entry("enable_prefix_caching", route.state.prefix_blocks > 0, source))
    if route.state.prefix_blocks:
        arguments.append(Entry("mamba_cache_mode", "align", source))
        not_applied.append(f"{source} (on or off; the server sizes its cache)")
    return variables, arguments, not_applied


def _left_to_the_server(route: Route) -> Iterator[str]:
    """What ``route=as_served`` carries without effect: a serving shape's settings for any route.

    Raises ``UsageError`` for anything else, which makes a route of its own.
    """
    blank = Route(name=AS_SERVED, draft_tokens=0)
    for section, own, default in (("route", route, blank), ("route.state", route.state, blank.state)):
        for f in fields(own):
            value = getattr(own, f.name)
            if f.name == "state" or value == getattr(default, f.name):
                continue
            shown = value.value if isinstance(value, Enum) else str(value).lower()
            setting = f"{section}.{f.name}={shown}"
            if f.name not in SHAPED:
                raise UsageError(
                    f"{setting}: route={AS_SERVED} leaves the route to the server; choose one, such as "
                    f"route=split {setting}"
                )
            yield f"{setting} (route={AS_SERVED} leaves it to the server)"


def _check_scheme(name: str) -> None:
    """No scheme reaches vLLM, but the record must not carry one that there is not."""
    if name != StateConfig().scheme:
        from sm70lab.engine.schemes import scheme_named  # brings torch

        scheme_named(name)


def _boundary(route: Route) -> Iterator[Entry]:
    for flag, variable in BOUNDARY.items():
        value = getattr(route, flag)
        yield Entry(variable, int(value), f"route.{flag}={str(value).lower()}")
    off = int(not route.full_forward)
    yield Entry(DISABLE_FULL_FORWARD, off, f"route.full_forward={str(route.full_forward).lower()}")
    yield Entry(f"{GDN}SPEC_CORE_OP", 0, "the table: no route has it")


def _graphs(route: Route) -> list[Entry]:
    source = f"route.compile={str(route.compile).lower()} route.graph={route.graph.value}"
    if not route.compile and route.graph is GraphMode.none:
        return [Entry("enforce_eager", True, source)]
    if not route.compile and route.graph in (GraphMode.piecewise, GraphMode.full_and_piecewise):
        raise UsageError(
            f"{source}: piecewise graphs are cut by the compiler; set route.compile=true, or route.graph=full"
        )
    wanted: dict[str, Any] = {"cudagraph_mode": GRAPHS[route.graph]}
    return [Entry("compilation_config", wanted if route.compile else {"mode": 0, **wanted}, source)]


def _merged_speculation(
    route: Route, own: list[Entry], given: dict[str, Any]
) -> tuple[list[Entry], list[str]]:
    """``target.arguments.speculative_config`` adds to what the route asks for; null takes a key out.

    Also returns what is not applied: additions to drafts that ``route=as_served`` does not ask for.
    """
    setting = "target.arguments.speculative_config"
    extra = given.get("speculative_config")
    if extra is None:
        if "speculative_config" in given and route.name != AS_SERVED and route.draft_tokens:
            raise UsageError(
                f"{setting}=null: contradicts route.draft_tokens={route.draft_tokens}, which needs it; set "
                "route=no_mtp or route.draft_tokens=0"
            )
        return own, []
    if route.name == AS_SERVED:
        if isinstance(extra, dict) and not any(extra.get(key) is not None for key in STARTS_DRAFTS):
            return own, [f"{setting} (route={AS_SERVED}, and it names no {' or '.join(STARTS_DRAFTS)})"]
        return [*own, Entry("speculative_config", _without_null(extra), "target.arguments")], []
    if not isinstance(extra, dict):
        raise UsageError(f"{setting}={extra}: must be a group of settings")
    merged = []
    for entry in own:  # without drafts there is no such entry, and what is given has nothing to add to
        if entry.name == "speculative_config":
            value = dict(entry.value)
            for key, wanted in extra.items():
                if wanted is None:
                    value.pop(key, None)
                elif value.setdefault(key, wanted) != wanted:
                    raise UsageError(
                        f"{setting}.{key}={wanted}: contradicts {entry.source}, "
                        f"which asks for {value[key]}; leave it out"
                    )
            entry = Entry(entry.name, value, f"{entry.source} target.arguments")
        merged.append(entry)
    return merged, []


def _without_null(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _with_given(own: list[Entry], given: dict[str, Any], setting: str) -> list[Entry]:
    """What the user names beside the table: more, the same again, or null to leave one out."""
    entries = {entry.name: entry for entry in own}
    for name, value in given.items():
        entry = entries.get(name)
        if value is None:
            entries.pop(name, None)
        elif entry is None or entry.source.startswith("the table"):
            about = BESIDE_THE_ROUTE.get(name)
            entries[name] = Entry(name, value, f"{setting} ({about})" if about else setting)
        elif str(entry.value) != str(value):
            raise UsageError(
                f"{setting}.{name}={value}: contradicts {entry.source}, which asks for {entry.value}; "
                "change one of them"
            )
    return list(entries.values())
