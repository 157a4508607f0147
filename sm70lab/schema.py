"""Typed configuration, and the records that pass between rooms.

Configuration classes mirror the YAML under ``conf/`` one to one: Hydra composes the YAML,
OmegaConf checks it against these types, ``sm70lab.config`` checks what types cannot say.
Records are plain data: targets write them, the judge reads them, tracking stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

RESULT_SCHEMA_VERSION = 1
AUTO_REPEATS = "auto"  # of ``repeats``


# --------------------------------------------------------------------------- configuration


class DraftSampling(str, Enum):
    """How drafts are sampled and accepted (see ``engine.rejection``)."""

    greedy = "greedy"  # drafts are the draft head's argmax; rejection with a one-hot q
    probabilistic = "probabilistic"  # drafts drawn from q; rejection with the true q
    token_matching = "token_matching"  # target tokens drawn first; a draft passes if equal
    coupled = "coupled"  # the same, and drafts are drawn from q with the target's own noise


class Proposal(str, Enum):
    """Which truncation the draft distribution q gets."""

    top_k = "top_k"
    top_k_top_p = "top_k_top_p"


class StateDtype(str, Enum):
    """Element type of the recurrent state; ``auto`` is float32, float64 for a float64 model."""

    auto = "auto"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class DraftHeadKind(str, Enum):
    """Which matrix turns the draft layer's output into draft logits (see ``engine.draft_head``)."""

    full = "full"
    shortlist = "shortlist"  # the rows of the most frequent ids
    int8 = "int8"


class Numerics(str, Enum):
    """Whether a verify row must have the bits of the one-row step."""

    exact = "exact"
    fast = "fast"


class GraphMode(str, Enum):
    """What of a compiled round is replayed as a CUDA graph."""

    none = "none"
    piecewise = "piecewise"  # what lies between the opaque operators
    full = "full"  # the whole round
    full_and_piecewise = "full_and_piecewise"  # full for rounds, piecewise for prefills


class KernelSet(str, Enum):
    """Which twins of the operations run in rounds."""

    auto = "auto"  # native where the device is a CPU and a C++ compiler is there
    plain = "plain"
    native = "native"


class Endpoint(str, Enum):
    """Which of a server's endpoints generates."""

    auto = "auto"  # chat for prompts with a user message, completions for those with raw text
    chat = "chat"
    completions = "completions"


class MetricsSource(str, Enum):
    """Whether a server's Prometheus counters are read."""

    auto = "auto"  # where the server has them
    off = "off"


class ReferenceKind(str, Enum):
    """Who judges the tokens of a server's run (see ``targets.remote_reference``)."""

    auto = "auto"  # the engine where the checkpoint is on this disk, else a server that can, else nobody
    none = "none"
    server = "server"  # its own prefill, or that of ``reference_url``
    engine = "engine"  # the built-in engine, float32, from the checkpoint on this disk


class ModelDtype(str, Enum):
    """Element type of weights and activations."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class Display(str, Enum):
    """What the terminal shows: a live line and a panel, one line at the end, or one JSON object."""

    rich = "rich"
    quiet = "quiet"
    json = "json"


@dataclass
class StateConfig:
    """Recurrent state of the Gated DeltaNet layers."""

    scheme: str = "replay"  # slots, snapshot, fold or replay: ``engine.schemes`` has the list
    dtype: StateDtype = StateDtype.auto
    block_size: int = 816  # tokens; prefill chunks end on multiples of it
    prefill_chunk: int = 0  # tokens of a prefill chunk; 0: up to the block edge
    prefix_blocks: int = 0  # blocks that the prefix cache holds; 0: no prefix cache


@dataclass
class Route:
    """One way to run the model: where the opaque boundary sits, how state and drafts are kept."""

    name: str = "split"
    # Which stages of a Gated DeltaNet layer the compiler may not look into: ``engine.routes`` has the table.
    full_forward: bool = False
    input_core: bool = False
    input_projection: bool = False
    output_projection: bool = False
    context_core: bool = False
    spec_core_003: bool = False
    packed_recurrent: bool = False  # rounds of one row: the core takes mixed_qkv packed, in one pass
    compile: bool = False
    graph: GraphMode = GraphMode.none
    draft_tokens: int = 4  # 0..8; 0 is the no-draft run
    draft_sampling: DraftSampling = DraftSampling.coupled
    proposal: Proposal = Proposal.top_k_top_p
    draft_head: DraftHeadKind = DraftHeadKind.full
    shortlist_size: int = 1024  # ids of draft_head=shortlist
    numerics: Numerics = Numerics.fast
    state: StateConfig = field(default_factory=StateConfig)


@dataclass
class TargetConfig:
    """What is measured. ``config_checks_target.OWNERS`` says which target each setting belongs to."""

    name: str = "engine"
    max_num_seqs: int = 1  # prompts decoded at once
    # The built-in engine.
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    threads: int | None = 1  # CPU threads; None leaves torch's own choice
    kernels: KernelSet = KernelSet.auto
    # A server with the OpenAI API.
    base_url: str | None = None  # http://host:8000/v1; /v1 may be left out
    endpoint: Endpoint = Endpoint.auto
    served_model: str | None = None  # None: the first of /v1/models
    api_key_env: str | None = None  # name of the environment variable that holds the key
    headers: dict[str, str] = field(default_factory=dict)  # "env:NAME" as value: read from that variable
    tls_verify: bool = True
    tls_ca: str | None = None  # PEM file of the authority; None: the system's
    tls_cert: str | None = None  # PEM file of a client certificate
    tls_key: str | None = None  # and of its key, where that is a file of its own
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 120.0  # the longest silence within an answer
    total_timeout_s: float = 3600.0  # of one answer
    retries: int = 2  # of a request of which no token has come yet
    extra_body: dict[str, Any] = field(default_factory=dict)  # fields of the request
    metrics: MetricsSource = MetricsSource.auto
    metrics_url: str | None = None  # None: /metrics of the same server
    reference: ReferenceKind = ReferenceKind.auto
    reference_url: str | None = None  # of a second server that judges; None: the same server
    reference_model: str | None = None  # its name for the model; None: the first of its /v1/models
    reference_api_key_env: str | None = None  # as api_key_env; the first server's key never goes there
    reference_chunk: int = 0  # output tokens a request of the reference adds; 0: all at once
    # A vLLM server that the run starts itself.
    python: str | None = None  # interpreter of its environment; None: this one
    pythonpath: str | None = None  # working tree put before that environment's packages
    command: list[str] = field(default_factory=list)  # the whole program, instead of python -m vllm…
    env: dict[str, str | None] = field(default_factory=dict)  # variables; null leaves one of the route's out
    arguments: dict[str, Any] = field(default_factory=dict)  # max_model_len: 4096 is --max-model-len 4096
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    start_timeout_s: float = 1800.0
    dry_run: bool = False  # print what would be started, and stop


@dataclass
class ModelSpec:
    """Which weights. ``random`` draws them from ``shape`` (keys of a Hugging Face config.json);
    ``served`` is whatever a server has."""

    name: str = "web"
    path: str | None = None  # a Hugging Face folder; None for ``web``, ``random`` and ``served``
    dtype: ModelDtype = ModelDtype.float32
    shape: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the random weights


@dataclass
class PromptSpec:
    """One prompt of a workload: raw ``text``, or a ``user`` message put through the chat template."""

    name: str = "prompt"
    text: str | None = None
    user: str | None = None
    max_tokens: int | None = None  # None: the workload's
    contract: str | None = None  # "html": the structural check of the field's gate


@dataclass
class Workload:
    """What is generated."""

    name: str = "web"
    prompts: list[PromptSpec] = field(default_factory=list)
    max_tokens: int = 6000  # output tokens a prompt, where the prompt names none


@dataclass
class Sampling:
    """Sampling parameters, in this order: penalties, bias, bans, temperature, top-k, top-p, min-p."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 0.95
    top_k: int = 20  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits of these ids
    min_tokens: int = 0  # stop ids are banned before this many output tokens
    banned_ids: list[int] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)  # beside the model's own end tokens
    stop_strings: list[str] = field(default_factory=list)


class ShapeGate(str, Enum):
    """Which measures of the text decide."""

    fixed_quality = "fixed_quality"  # the field's (``judge.text_shape``)
    strict = "strict"  # ours (``judge.strict_gate``)


@dataclass
class StrictGate:
    """Thresholds of ``gate.shape=strict`` (see ``judge.degenerate``): a shape fails when it is beyond one."""

    loop_tokens: int = 180  # of loops that last to the end
    ended_loop_tokens: int = 1000  # of a loop behind which the text went on
    counter_periods: int = 6  # periods in which only numbers change make a loop
    stale_tokens: int = 300  # of an ending in which everything was there just before
    packed_per_mille: int = 40  # least size of an ending of 8,000 characters when packed by bzip2
    digits: int = 200  # decimal digits in a row
    blanks: int = 160  # bytes of blanks and line breaks in a row
    replacements: int = 16  # U+FFFD
    salad_letters: int = 40  # letters in a row that change their script all the time
    thinking_tokens: int = 4000  # of an output that ended inside its thinking
    echo_characters: int = 48  # of a prompt that the answer begins with; a shorter one may be a title


@dataclass
class Gate:
    """Thresholds of a gate: a metric fails when its value is beyond the one given here."""

    name: str = "fixed_quality"
    shape: ShapeGate = ShapeGate.fixed_quality
    min_tokens: int = 64
    max_same_token_run: int = 48
    max_digit_run: int = 80
    max_same_char_run: int = 120
    repeat20: int = 80
    repeat50: int = 40
    repeat100: int = 20
    max_same_line_run: int = 12
    bad_markers: list[str] = field(default_factory=list)
    strict: StrictGate = field(default_factory=StrictGate)  # read where shape is strict
    audit_alpha: float = 0.001  # false-alarm rate of the losslessness audit, over the whole run
    window_tokens: int = 500  # output tokens in one acceptance window


@dataclass
class Tracking:
    """Where records go. The run folder is always written."""

    mlflow: bool = True
    uri: str | None = None  # None: sqlite under runs_dir
    runs_dir: str = "runs"
    timeout_s: float = 10.0  # to reach an http tracking server
    sweep: str | None = None  # runs with one name here share a parent run in MLflow; -m sets it


@dataclass
class Sprt:
    """The sequential test of ``repeats=auto`` (see ``judge.statistics.SequentialTest``)."""

    p0: float = 0.95  # a good route's pass rate
    p1: float = 0.8  # a bad route's
    alpha: float = 0.05  # chance to call a good route bad
    beta: float = 0.05  # chance to call a bad route good
    max_repeats: int = 50  # stop there, decided or not


@dataclass
class ExperimentConfig:
    """The whole resolved configuration of one run."""

    name: str = "default"  # the experiment: folder under runs_dir and MLflow experiment
    route: Route = field(default_factory=Route)
    target: TargetConfig = field(default_factory=TargetConfig)
    model: ModelSpec = field(default_factory=ModelSpec)
    workload: Workload = field(default_factory=Workload)
    sampling: Sampling = field(default_factory=Sampling)
    gate: Gate = field(default_factory=Gate)
    hazard: str = "none"  # a fault put in on purpose: ``engine.hazards`` has the list
    tracking: Tracking = field(default_factory=Tracking)
    seed: int = 20260620
    repeats: int | str = 1  # a number, or "auto": until the sequential test has decided
    first_repeat: int = 0  # repeats are numbered from here, and their draws keyed by the number
    sprt: Sprt = field(default_factory=Sprt)
    audit: bool = True
    force: bool = False  # run again though this fingerprint is finished
    display: Display = Display.rich


# --------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run."""

    index: int
    name: str
    text: str
    token_ids: Sequence[int]  # empty where a server does not tell them: then nothing is scored
    max_tokens: int
    contract: str | None = None


@dataclass(frozen=True)
class Round:
    """One verify round of one generation, as delivered (nothing after an end token counts)."""

    position: int  # output tokens delivered before this round
    drafted: int  # draft tokens put to the test; in a cut round only those delivered
    accepted: int  # of these, accepted and delivered
    emitted: int  # tokens delivered: accepted + 1, or fewer where end or budget cut the round
    seconds: float  # wall time of the round


# Ends of a server's answer that are failures of what lies between, or of the server, after the first token.
BROKEN_ENDS = ("connection_lost", "timeout", "server_error", "malformed")


@dataclass(frozen=True)
class Speculation:
    """A server's own account of the drafts of one request."""

    drafts: int  # rounds that drafted
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...] = ()  # empty: not told


@dataclass(frozen=True)
class CounterWindow:
    """What a server's counters rose by between two readings while a run went on.

    Counters are the server's, not the run's: ``other_traffic`` says that somebody else was served, too.
    """

    tokens: int  # generation tokens
    seconds: float  # wall time between the readings
    drafts: int  # rounds that drafted
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]  # empty: the server does not tell them
    other_traffic: bool
    # This run's own tokens that came in between: (generation key, first, one past the last).
    spans: tuple[tuple[str, int, int], ...] = ()
    own_known: bool = True  # False: how many tokens were this run's is not known, nor whether others had any


@dataclass
class Generation:
    """One completed (or interrupted) output with what is needed to judge it."""

    prompt: Prompt
    repeat: int
    seed: int
    token_ids: list[int]
    text: str
    # stop, length, interrupted; on NaN logits non_finite (the kept state is damaged) or
    # model_non_finite (the model overflows from scratch too); of a server also connection_lost, timeout,
    # server_error, malformed (``BROKEN_ENDS``), or a word of its own: ``note`` says where and what
    finish_reason: str
    rounds: list[Round]
    prefill_seconds: float
    decode_seconds: float
    note: str = ""
    # Of a server:
    reasoning: str | None = None  # told apart by the server; ``text`` is then the content alone
    counted_tokens: int | None = None  # by its usage; None: those of ``token_ids``
    # (tokens so far, −1 where unknown; seconds since the request was sent), one a chunk with text or ids
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    ttft_seconds: float | None = None  # from the request to the first token
    request: dict[str, Any] = field(default_factory=dict)  # what was sent and answered, without secrets
    speculation: Speculation | None = None

    @property
    def tokens(self) -> int:
        """Output tokens: of the ids, else as the server counts them; 0 where neither is known."""
        return len(self.token_ids) or self.counted_tokens or 0

    @property
    def came(self) -> bool:
        """Whether anything came of it."""
        return bool(self.tokens or self.full_text)

    @property
    def full_text(self) -> str:
        """Reasoning and content in one, between think markers where the server told them apart."""
        if self.reasoning is None:
            return self.text
        return f"<think>{self.reasoning}" + (f"</think>{self.text}" if self.text else "")

    @property
    def key(self) -> str:
        """Name of this generation's files: prompt name and repeat."""
        return f"{self.prompt.name}-r{self.repeat}"


@dataclass
class TokenScores:
    """A generation's own tokens under the reference's truncated distribution p'.

    All arrays have one entry an output token. ``cdf_low``/``cdf_high`` bound the token's
    interval in the cumulative p' with tokens ordered by falling probability, so that
    low + U·(high − low), U uniform, is uniform when the token was drawn from p'.
    A token that the reference could not score has NaN in every float but ``log_bets``, where it has 0.
    """

    logprob: np.ndarray  # log p'(token); −inf outside the support
    raw_logprob: np.ndarray  # log p(token) before truncation, at the run's temperature
    entropy: np.ndarray  # entropy of p', nats
    variance: np.ndarray  # variance of log p' under p', nats²
    rank: np.ndarray  # 0 is the reference's most likely token
    in_support: np.ndarray  # bool
    cut_gap: np.ndarray  # how far outside: 0 inside; else logit gap (top-k, min-p) or mass (top-p)
    cut_logit: np.ndarray  # 0 inside; else how far its logit is below the last one inside the cuts
    cut_rule: np.ndarray  # "" inside, else "top_k" (greedy: top-1), "top_p", "min_p", "banned"
    argmax: np.ndarray  # the reference's most likely token id
    top2_margin: np.ndarray  # logit gap between the reference's two most likely tokens
    cdf_low: np.ndarray
    cdf_high: np.ndarray
    collision: np.ndarray  # Σ p'²: the chance that two draws agree
    collision_variance: np.ndarray  # variance of p'(token) under p': Σ p'³ − (Σ p'²)²
    covariance: np.ndarray  # of log p'(token) and p'(token) under p', nats
    log_bets: np.ndarray  # [tokens, len(BETS)]: log r(token)/p'(token) of each alternative r
    # The token that p' gives with the run's own keyed noise (Gumbel-max), where the route draws every
    # token that way; NaN where it does not.
    noise_gap: np.ndarray  # how far this run's token is behind it, in logits; ≤ 0: it is the one
    noise_winner_logit: np.ndarray  # how far that token's logit is above min-p and the likeliest one cut
    noise_winner_mass: np.ndarray  # and inside the nucleus, in probability

    @property
    def known(self) -> np.ndarray:
        """Which tokens were scored, bool."""
        scored: np.ndarray = self.entropy == self.entropy  # not NaN; this file does without numpy
        return scored


# What the audit bets on, token by token: names and parameters of distributions near p' that a broken
# route may draw from instead. ``engine.reference`` has their formulas.
BETS: dict[str, float] = {
    "temperature_0.67": 0.67,
    "temperature_0.87": 0.87,
    "temperature_1.15": 1.15,
    "temperature_1.5": 1.5,
    "noise_0.5": 0.5,  # variance of a disturbance of the logits
    "noise_2": 2.0,
    "flat_0.05": 0.05,  # share drawn evenly from the support
    "flat_0.3": 0.3,
}


@dataclass(frozen=True)
class Rounding:
    """How far plain arithmetic in a route's element type moves the reference's own numbers.

    Largest and typical differences over ``rows`` teacher-forced tokens of a run and their likely
    candidates, against one precision higher, without drafts, state schemes or routes.
    """

    rows: int
    logit: float  # largest change of a candidate's logit against the best one's
    logit_rms: float
    mass: float  # largest change of the probability before a candidate
    outside: float  # mean probability of what only the coarser arithmetic keeps in the support


@dataclass(frozen=True)
class Alternative:
    """A token that the reference could have drawn instead."""

    token: int
    text: str
    probability: float  # p'; 0 where the cuts leave it out


@dataclass(frozen=True)
class Explanation:
    """One token of an output in its surroundings, and what the reference would have said there."""

    before: str
    token: str
    after: str
    alternatives: list[Alternative]  # likeliest first
    drawn: Alternative | None = None  # what the reference draws there with the run's own noise


class VerdictKind(str, Enum):
    """The four verdicts, and the exit code each maps to in ``EXIT_CODES``."""

    passed = "pass"
    route_fault = "route_fault"
    model_degenerate = "model_degenerate"
    inconclusive = "inconclusive"


EXIT_CODES: dict[VerdictKind, int] = {
    VerdictKind.passed: 0,
    VerdictKind.route_fault: 1,
    VerdictKind.model_degenerate: 1,
    VerdictKind.inconclusive: 3,
}
EXIT_USAGE = 2


class Status(str, Enum):
    """What one kind of evidence says."""

    ok = "ok"
    bad = "bad"
    warn = "warn"  # worth reading, decides nothing by itself
    unknown = "unknown"  # not enough to say


@dataclass
class Evidence:
    """One kind of evidence over the whole run: a status, one line for a person, numbers behind it."""

    kind: str  # shape, acceptance, audit
    status: Status
    line: str
    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Verdict:
    """What the run is worth, with its evidence from weak to strong."""

    kind: VerdictKind
    reason: str
    evidence: list[Evidence]
