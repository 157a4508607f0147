"""The table from route and serving shape to variables and arguments, against the audit's own commands."""

from __future__ import annotations

import json
import re
import shlex
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from sm70lab.config import compose, from_plain, plain
from sm70lab.errors import UsageError
from sm70lab.targets import vllm_flags
from sm70lab.targets.vllm_flags import Launch, argument_words, launch
from sm70lab.tracking.published import Needs, matrix

GDN = "VLLM_SM70_QWEN_GDN_"
# Every variable that the audit names.
AUDIT_VARIABLES = """
VLLM_ALLOW_MAMBA_SPEC_FULL_CUDAGRAPH VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
VLLM_FLASH_V100_DECODE_DYNAMIC_PARTITIONS VLLM_MAMBA_ALIGN_CPU_POSTPROCESS VLLM_MAMBA_ALIGN_DEBUG
VLLM_MTP_STOCHASTIC_TOKEN_MATCHING VLLM_SM70_DUMP_GDN_STATE_TABLE_DIR
VLLM_SM70_DUMP_GDN_STATE_TABLE_END_SEQ VLLM_SM70_DUMP_GDN_STATE_TABLE_START_SEQ
VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH VLLM_SM70_FLASH_V100_DECODE_GRAPH_NO_COMPILE
VLLM_SM70_FLA_RECURRENT_SCHEDULE VLLM_SM70_FLA_STAGES VLLM_SM70_FLA_WARPS
VLLM_SM70_GDN_MIXED_QKV_CONTIGUOUS VLLM_SM70_MTP_DENSE_F16_FASTPATH VLLM_SM70_MTP_DUMP_STEP_DIR
VLLM_SM70_MTP_EXACT_DRAFT_SEQ_LENS_CPU VLLM_SM70_MTP_LEGACY_GDN_MIXED_DECODE_ROUTING
VLLM_SM70_MTP_LEGACY_GDN_NON_SPEC_SLOT0 VLLM_SM70_MTP_LEGACY_OUTPUT_TOKEN_REPAIR
VLLM_SM70_MTP_LEGACY_QWEN_STEP_IDX VLLM_SM70_MTP_SYNC_ACCEPT_COUNTS
VLLM_SM70_QWEN_GDN_003_SPEC_CORE_OP VLLM_SM70_QWEN_GDN_CONTEXT_CORE
VLLM_SM70_QWEN_GDN_DISABLE_FULL_FORWARD VLLM_SM70_QWEN_GDN_FULL_FORWARD
VLLM_SM70_QWEN_GDN_INPUT_CORE_OP VLLM_SM70_QWEN_GDN_INPUT_PROJECTION_OP
VLLM_SM70_QWEN_GDN_OUTPUT_PROJECTION_OP VLLM_SM70_QWEN_GDN_SPEC_CORE_OP
VLLM_SM70_QWEN_GDN_SPEC_DECODE_PIECEWISE VLLM_SPEC_DUMP_ALIGNMENT VLLM_SPEC_DUMP_ALIGNMENT_LIMIT
"""
# The arguments with which the audit started the tree under test (its address and served name apart).
AUDIT_COMMAND = """
--model {model} --quantization awq --tensor-parallel-size 2 --dtype half --max-model-len 262144
--max-num-batched-tokens 8096 --max-num-seqs 1 --gpu-memory-utilization 0.88
--attention-backend FLASH_ATTN_V100 --enable-prefix-caching --mamba-cache-mode align
--enable-auto-tool-choice --tool-call-parser mimo --reasoning-parser qwen3
--default-chat-template-kwargs '{{"enable_thinking":true}}'
--speculative-config '{{"method":"mtp","num_speculative_tokens":4,"draft_sample_method":"probabilistic",
"use_local_argmax_reduction":true,"attention_backend":"TRITON_ATTN"}}' --trust-remote-code
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stands for a checkpoint: nothing is loaded here."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


GROUPS = ("route", "serving", "experiment", "target", "workload")


@cache
def composed(*choices: str) -> dict[str, Any]:
    """A composition of groups alone, as plain values: composing takes most of a test's time."""
    place = f"model.path='{Path(__file__).parent}'"  # any folder does: see ``of``
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sm70lab.config.check", lambda config: None)
        return dict(plain(compose(["model=checkpoint", place, *choices])))


def of(folder: Path, *overrides: str) -> Launch:
    chosen = [o for o in overrides if o.split("=")[0] in GROUPS]
    on_vllm = [] if any(o.startswith("experiment=") for o in chosen) else ["target=vllm"]
    values = deepcopy(composed(*on_vllm, *chosen))
    values["model"]["path"] = str(folder)
    given = OmegaConf.from_dotlist([o for o in overrides if o not in chosen])
    return launch(from_plain(OmegaConf.to_container(OmegaConf.merge(values, given))))


def options(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Flag → its values; JSON normalised."""
    found: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, found[word] = word, ()
        elif flag:
            value = json.dumps(json.loads(word), sort_keys=True) if word.startswith("{") else word
            found[flag] = (*found[flag], value)
    return found


def test_every_variable_of_the_audit_has_its_place() -> None:
    known = {
        *vllm_flags.BOUNDARY.values(),
        vllm_flags.DISABLE_FULL_FORWARD,
        vllm_flags.TOKEN_MATCHING,
        vllm_flags.PACKED,
        *vllm_flags.BESIDE_THE_ROUTE,
    }
    assert set(AUDIT_VARIABLES.split()) <= known


def test_the_accepted_route_has_the_audits_five_variables(folder: Path) -> None:
    found = of(folder, "route=spec_core_003").environment
    assert {name: found[GDN + name] for name in ("DISABLE_FULL_FORWARD", "003_SPEC_CORE_OP")} == {
        "DISABLE_FULL_FORWARD": "1",
        "003_SPEC_CORE_OP": "1",
    }
    zero = ("INPUT_CORE_OP", "OUTPUT_PROJECTION_OP", "SPEC_CORE_OP", "FULL_FORWARD", "CONTEXT_CORE")
    assert {found[GDN + name] for name in zero} == {"0"}


@pytest.mark.parametrize(
    ("route", "on"),
    [
        ("split", {"DISABLE_FULL_FORWARD"}),
        ("full_forward", {"FULL_FORWARD"}),
        ("input_core", {"INPUT_CORE_OP", "DISABLE_FULL_FORWARD"}),
        ("input_projection", {"INPUT_PROJECTION_OP", "DISABLE_FULL_FORWARD"}),
        ("output_projection", {"OUTPUT_PROJECTION_OP", "DISABLE_FULL_FORWARD"}),
        ("context_core", {"CONTEXT_CORE", "DISABLE_FULL_FORWARD"}),
        ("no_mtp", {"DISABLE_FULL_FORWARD"}),
    ],
)
def test_a_boundary_flag_is_one_variable(route: str, on: set[str], folder: Path) -> None:
    found = of(folder, f"route={route}").environment
    assert len(found) == 8
    assert {name.removeprefix(GDN) for name, value in found.items() if value == "1"} == on


def test_the_serving_preset_is_the_audits_command(folder: Path) -> None:
    made = of(folder, "experiment=J", "target=vllm", "serving=v100_tp2_27b_awq", "target.python=/fork/python")
    words = made.command("0.0.0.0", 8011)
    assert words[:3] == ["/fork/python", "-m", "vllm.entrypoints.openai.api_server"]
    published = shlex.split(AUDIT_COMMAND.format(model=folder).replace("\n", " "))
    expected = options(published)
    found = options(words)
    # The audit leaves the graph mode to the tree's default, which its start-up log names.
    assert found.pop("--compilation-config") == ('{"cudagraph_mode": "FULL_AND_PIECEWISE"}',)
    assert found.pop("--host") == ("0.0.0.0",) and found.pop("--port") == ("8011",)
    assert found == expected


@pytest.mark.parametrize(
    ("overrides", "method", "matching"),
    [
        (["route.draft_sampling=greedy"], "greedy", None),
        (["route.draft_sampling=probabilistic"], "probabilistic", None),
        (["route.draft_sampling=token_matching"], "greedy", "1"),
        (["route.draft_sampling=coupled"], None, None),
    ],
)
def test_how_drafts_are_sampled(
    overrides: list[str], method: str | None, matching: str | None, folder: Path
) -> None:
    made = of(folder, "route=split", "route.draft_tokens=2", *overrides)
    (wanted,) = options(made.command("h", 1))["--speculative-config"]
    assert json.loads(wanted) == {
        "method": "mtp",
        "num_speculative_tokens": 2,
        **({"draft_sample_method": method} if method else {}),
    }
    assert made.environment.get("VLLM_MTP_STOCHASTIC_TOKEN_MATCHING") == matching
    assert any("coupled" in told for told in made.not_applied) is (method is None)


def test_no_drafts_no_speculation_whatever_the_serving_shape_adds(folder: Path) -> None:
    made = of(folder, "route=no_mtp", "serving=v100_tp2_27b_awq")
    assert "--speculative-config" not in made.command("h", 1)


@pytest.mark.parametrize(
    ("overrides", "flag", "value"),
    [
        ([], "--enforce-eager", None),
        (["route.compile=true"], "--compilation-config", {"cudagraph_mode": "NONE"}),
        (
            ["route.compile=true", "route.graph=piecewise"],
            "--compilation-config",
            {"cudagraph_mode": "PIECEWISE"},
        ),
        (["route.graph=full"], "--compilation-config", {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    ],
)
def test_graphs(overrides: list[str], flag: str, value: dict[str, object] | None, folder: Path) -> None:
    found = options(of(folder, "route=split", *overrides).command("h", 1))
    assert [json.loads(word) for word in found[flag]] == ([value] if value else [])
    assert ("--enforce-eager" in found) is (value is None)


def test_state_and_prefix_cache(folder: Path) -> None:
    plain = options(of(folder, "route=split").command("h", 1))
    assert "--no-enable-prefix-caching" in plain and "--mamba-ssm-cache-dtype" not in plain
    found = options(
        of(folder, "route=split", "route.state.dtype=float16", "route.state.prefix_blocks=8").command("h", 1)
    )
    assert found["--mamba-ssm-cache-dtype"] == ("float16",)
    assert "--enable-prefix-caching" in found and found["--mamba-cache-mode"] == ("align",)


def test_as_served_leaves_everything_to_the_server(folder: Path) -> None:
    made = of(folder, "target.arguments.speculative_config={method: ngram, num_speculative_tokens: 3}")
    assert made.environment == {}
    found = options(made.command("h", 1))
    assert set(found) == {"--model", "--host", "--port", "--dtype", "--max-num-seqs", "--speculative-config"}
    assert made.not_applied == ()


PRESET = "serving=v100_tp2_27b_awq"
ROUTES = sorted(file.stem for file in (Path(__file__).parents[2] / "conf" / "route").glob("*.yaml"))


def test_a_serving_shape_without_a_route_drafts_nothing(folder: Path) -> None:
    made = of(folder, PRESET)
    assert "--speculative-config" not in made.command("h", 1)
    assert [told.split(" ")[0] for told in made.not_applied] == [
        "route.compile=true",
        "route.graph=full_and_piecewise",
        "route.state.prefix_blocks=64",
        "target.arguments.speculative_config",
    ]
    own = of(folder, PRESET, "target.arguments.speculative_config.num_speculative_tokens=2")
    assert '"num_speculative_tokens":2' in options(own.command("h", 1))["--speculative-config"][0].replace(
        " ", ""
    )


@pytest.mark.parametrize("shape", [pytest.param((), marks=pytest.mark.long), (PRESET,)])
def test_no_two_routes_are_the_same_server(shape: tuple[str, ...], folder: Path) -> None:
    made = [of(folder, f"route={route}", *shape) for route in ROUTES]
    assert len(made) > 10
    assert len({launched.shell("h", 1) for launched in made}) == len(made)


def test_a_routes_own_graph_wins_over_the_serving_shape(folder: Path) -> None:
    found = options(of(folder, "route=whole_round", PRESET).command("h", 1))
    assert found["--compilation-config"] == ('{"cudagraph_mode": "FULL_DECODE_ONLY"}',)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["route.draft_tokens=2"], r"route\.draft_tokens=2: route=as_served leaves the route to the server"),
        (["route.full_forward=true"], r"such as route=split route\.full_forward=true"),
        (["route.state.dtype=float16"], r"route\.state\.dtype=float16: route=as_served"),
    ],
)
def test_as_served_takes_no_settings_of_a_route(overrides: list[str], words: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=words):
        of(folder, *overrides)


def test_speculation_is_left_out_where_the_route_does_not_draft(folder: Path) -> None:
    made = of(folder, "route=no_mtp", PRESET, "target.arguments.speculative_config=null")
    assert "--speculative-config" not in made.command("h", 1)


def test_what_the_user_adds_and_takes_out(folder: Path) -> None:
    made = of(
        folder,
        "route=split",
        "route.draft_sampling=probabilistic",
        "target.env.VLLM_SM70_FLA_WARPS=4",
        f"target.env.{GDN}SPEC_CORE_OP=1",
        f"target.env.{GDN}CONTEXT_CORE=null",
        "target.arguments.max_model_len=4096",
        "target.arguments.async_scheduling=false",
        "target.arguments.dtype=null",
        "target.arguments.speculative_config.draft_sample_method=null",
    )
    assert made.environment["VLLM_SM70_FLA_WARPS"] == "4"
    assert made.environment[f"{GDN}SPEC_CORE_OP"] == "1"
    assert f"{GDN}CONTEXT_CORE" not in made.environment
    found = options(made.command("h", 1))
    assert found["--max-model-len"] == ("4096",)
    assert "--no-async-scheduling" in found and "--dtype" not in found
    assert "draft_sample_method" not in found["--speculative-config"][0]
    assert dict(made.sources())["VLLM_SM70_FLA_WARPS=4"].startswith("target.env (O: warps")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"target.env.{GDN}FULL_FORWARD=1"], r"contradicts route\.full_forward=false"),
        (["target.arguments.dtype=bfloat16"], r"contradicts model\.dtype=float16, which asks for half"),
        (
            ["target.arguments.speculative_config.num_speculative_tokens=2"],
            r"contradicts route\.draft_tokens=4.* asks for 4",
        ),
        (["route.graph=piecewise"], r"piecewise graphs are cut by the compiler"),
        (["route.draft_head=int8"], r"route\.draft_head=int8: exists in the built-in engine alone"),
        (["route.numerics=exact"], r"route\.numerics=exact: exists in the built-in engine alone"),
        (["route.state.prefill_chunk=64"], r"prefill_chunk=64: exists in the built-in engine alone"),
        (["route.input_core=true", "route.full_forward=true"], r"contradict each other"),
        (["model.dtype=float64"], r"model\.dtype=float64: vLLM has no such type"),
        (["target.env.VLLM_SM70_FLA_WRAPS=4"], r"did you mean VLLM_SM70_FLA_WARPS"),
        (
            ["target.arguments.model=other/model"],
            r"model=other/model: contradicts model=/.*leave one of them out",
        ),
        (["target.arguments.speculative_config=null"], r"contradicts route\.draft_tokens=4, which needs it"),
        (["route.state.scheme=foo"], r"scheme=foo: no such scheme; known: slots"),
        (["target.arguments.port=8000"], r"set target\.port instead"),
        (["target.arguments.max_num_seqs=8"], r"set target\.max_num_seqs instead"),
        (["target.env.VLLM_API_KEY=x"], r"secrets are recorded"),
        (["target.env.A-B=x"], r"no name of a variable"),
        (["target.command=[x]", "target.python=y"], r"leave out one of them"),
        (["target.pythonpath=/nowhere/tree"], r"no such folder"),
        (["target.port=70000"], r"must be 0 \(a free one\) to 65535"),
        (["target.start_timeout_s=0"], r"must be above 0"),
        (["target.device=cuda"], r"is a setting of target=engine"),
        (["hazard=no_conv_rollback"], r"faults are put into the engine alone"),
    ],
)
def test_what_cannot_be(overrides: list[str], words: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        of(folder, "route=split", *overrides)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["target=vllm"], "needs weights to serve"),
        (["target=vllm", "model=tiny"], "drawn weights have no folder"),
        (["target=engine", "target.env.A=1"], r"target\.env.*is a setting of target=vllm"),
        (["target=engine", "target.dry_run=true"], r"target\.dry_run=True: is a setting of target=vllm"),
    ],
)
def test_what_has_nothing_to_serve(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compose(overrides)


def test_a_hub_name_and_the_embedded_model_are_served_too() -> None:
    hub = launch(compose(["target=vllm", "target.arguments.model=Qwen/Qwen3.5-9B"]))
    assert hub.model == "Qwen/Qwen3.5-9B" and "--dtype" not in hub.command("h", 1)
    web = launch(compose(["target=vllm", "model=web", "model.dtype=bfloat16"]))
    assert (Path(web.model) / "model.safetensors").is_file()


def test_vllm_serve_takes_the_model_as_its_first_word(folder: Path) -> None:
    words = of(folder, "target.command=[/env/bin/vllm,serve]").command("h", 1)
    assert words[:3] == ["/env/bin/vllm", "serve", str(folder)] and "--model" not in words


def test_a_server_is_known_by_what_it_is_started_with(folder: Path) -> None:
    one = of(folder, "route=split", "seed=1")
    assert one == of(folder, "route=split", "seed=2", "workload.max_tokens=9", "target.port=9", "name=other")
    assert one != of(folder, "route=input_core", "seed=1")
    assert one != of(folder, "route=split", "target.arguments.max_model_len=4096")
    assert one != of(folder, "route=split", "target.env.VLLM_SM70_FLA_WARPS=4")


def test_the_shell_command_is_the_command(folder: Path) -> None:
    made = of(folder, "experiment=K", "target.env.ODD='a b'")
    words = shlex.split(made.shell("127.0.0.1", 7).replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in words[: len(made.environment)])
    assert variables == made.environment and variables["ODD"] == "a b"
    assert words[len(variables) :] == made.command("127.0.0.1", 7)


SOME = ("A", "K", "AA", "AH")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row.id, marks=[] if row.id in SOME else pytest.mark.long) for row in matrix()[1]],
)
def test_every_row_of_the_published_matrix_runs_on_vllm(row: str, folder: Path) -> None:
    needs = {r.id: r.needs for r in matrix()[1]}[row]
    elsewhere = ["target=vllm", "serving=v100_tp2_27b_awq", "workload=macos"] if needs is Needs.engine else []
    config = compose([f"experiment={row}", "model=checkpoint", f"model.path='{folder}'", *elsewhere])
    made = launch(config)
    assert config.target.name == "vllm" and config.workload.name == "macos"
    assert made.environment[f"{GDN}FULL_FORWARD"] == str(int(row in ("AA", "AF", "AG")))


def test_the_night_of_the_docs_runs_every_row_that_one_tree_can() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"-m \$FORK experiment=(\S+)", page)
    rows = listed.split(",")
    assert len(rows) == len(set(rows))
    assert set(rows) == {row.id for row in matrix()[1]} - {"I", "I2", "Q", "Y", "AI", "U"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, ["--a-b", "3"]),
        (True, ["--a-b"]),
        (False, ["--no-a-b"]),
        ({"x": [1]}, ["--a-b", '{"x":[1]}']),
        ([1, "c"], ["--a-b", "1", "c"]),
    ],
)
def test_an_argument_in_words(value: object, words: list[str]) -> None:
    assert argument_words("a_b", value) == words
