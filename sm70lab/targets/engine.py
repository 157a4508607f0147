"""The built-in engine as a target."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from sm70lab.engine.architecture import expected_tensors
from sm70lab.engine.capturable import no_capture, no_captured_sampling, no_captured_steps
from sm70lab.engine.decoder import Decoder, captures, decode, state_dtype
from sm70lab.engine.hazards import hazard_named
from sm70lab.engine.loading import Source, find, no_native
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.routes import check_graph, graph_is_whole, resolve
from sm70lab.engine.scheduler import Scheduler
from sm70lab.engine.schemes import scheme_named
from sm70lab.engine.sequence import Request, Step
from sm70lab.engine.stopping import Delivery
from sm70lab.errors import NonFiniteError, UsageError
from sm70lab.kernels import native
from sm70lab.schema import (
    CounterWindow,
    ExperimentConfig,
    Explanation,
    Generation,
    GraphMode,
    KernelSet,
    Prompt,
    Round,
    Rounding,
    TokenScores,
)
from sm70lab.targets.base import OnProgress, Progress
from sm70lab.targets.engine_reference import Referee
from sm70lab.targets.memory import free_bytes

PROGRESS_SECONDS = 0.2
WARM_UP_STEPS = 3
GIB = 1 << 30


class EngineTarget:
    """Loads the configured model and decodes prompt after prompt along the configured route."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.source: Source = find(config.model)
        self.device = _device(config.target.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton launches and graphs belong to the current one
        self._check()

    def _check(self) -> None:
        config, arch = self.config, self.source.arch
        scheme_named(config.route.state.scheme)
        hazard_named(config.hazard)
        if config.route.draft_tokens and not arch.mtp_layers:
            raise UsageError(
                f"route.draft_tokens={config.route.draft_tokens}: this model has no MTP head "
                "(mtp_num_hidden_layers is 0 or missing in config.json); use route=no_mtp"
            )
        dtype: torch.dtype = getattr(torch, config.model.dtype.value)
        if state_dtype(config.route, dtype).itemsize > torch.promote_types(dtype, torch.float32).itemsize:
            raise UsageError(
                f"route.state.dtype={config.route.state.dtype.value}: wider than the arithmetic of "
                f"model.dtype={config.model.dtype.value}; use auto"
            )
        check_graph(config.route, self.device.type)
        if config.route.graph is GraphMode.full:
            self._check_recorded(dtype)
        for name in ("banned_ids", "stop_ids", "logit_bias"):
            outside = [i for i in getattr(config.sampling, name) if not 0 <= i < arch.vocab_size]
            if outside:
                raise UsageError(
                    f"sampling.{name}={outside}: token ids of this model are 0..{arch.vocab_size - 1}"
                )

    def _check_recorded(self, dtype: torch.dtype) -> None:
        config, arch = self.config, self.source.arch
        if self.device.type == "cuda":
            sequences = config.target.max_num_seqs
            if graph_is_whole(config.route):
                reason = no_capture(arch, config.route, dtype, sequences, config.hazard)
                reason = reason or no_captured_sampling(config.sampling)
            else:
                reason = no_captured_steps(arch, dtype)
            if reason:
                raise UsageError(f"route.graph=full captures the round: {reason}; use route.graph=none")
            return
        wide = torch.promote_types(dtype, torch.float32)
        reason = no_native(self.device, dtype)
        if config.target.kernels is KernelSet.plain:
            reason = "target.kernels=plain has none"
        if arch.num_experts:
            reason = "which experts run depends on the data, and a recorded list does not"
        if state_dtype(config.route, dtype) != wide:
            reason = f"route.state.dtype={config.route.state.dtype.value} is not the type it computes in"
        if reason:
            raise UsageError(f"route.graph=full records native calls: {reason}; use route.graph=none")

    @property
    def stop_ids(self) -> frozenset[int]:
        """The model's own end tokens and the configured ones."""
        return frozenset(self.source.arch.eos_token_ids) | frozenset(self.config.sampling.stop_ids)

    def load(self, positions: int | None = None) -> None:
        """Read the weights. Raises ``UsageError`` for damaged files.

        ``positions``: of prompt and output together, by default those of the longest prompt.
        """
        if self.config.target.threads:
            torch.set_num_threads(self.config.target.threads)
        self._positions = positions or max(len(p.token_ids) + p.max_tokens for p in self.prompts())
        self._capacity = self._rows(self._positions)
        self._check_memory()
        self.model = self.source.build(self.config.model.dtype, self.device, self.config.target.kernels)
        self._referee = Referee(self.config, self.source, self.model, self.stop_ids)
        if self.model.native:
            native.set_threads(torch.get_num_threads())
        started = time.perf_counter()
        if self.config.route.compile:
            torch.compiler.reset()  # a sweep's ninth variant would meet Dynamo's recompile limit
            self.model.compile_rounds(pieces=self.config.route.graph is GraphMode.piecewise)
            self._warm_up(self.decoder())
        self._compile_seconds = time.perf_counter() - started

    def _warm_up(self, decoder: Decoder) -> None:
        """Compile or capture outside the timed region. NaN logits are the run's to report."""
        request = Request([0], self.config.sampling, KeyedNoise(0, 0, 0), self.stop_ids)
        with contextlib.suppress(NonFiniteError):
            for _ in zip(range(WARM_UP_STEPS), decode(decoder, request), strict=False):
                pass

    def _rows(self, positions: int) -> int:
        """Rows of a KV cache for so many positions: one round beyond, and room to warm up."""
        rows = self.config.route.draft_tokens + 1
        # A hazard may start a round too late; a captured round runs while the one before is read.
        late = self.config.hazard != "none" or self.config.route.graph is GraphMode.full
        spare = 2 * rows if late else rows
        return max(positions + spare, 1 + WARM_UP_STEPS * rows)

    def cache_bytes(self, positions: int) -> int:
        """Bytes of the KV caches of all sequences, for so many positions each."""
        arch = self.source.arch
        layers = arch.layer_types.count("full_attention") + arch.mtp_layers
        item = torch.empty(0, dtype=getattr(torch, self.config.model.dtype.value)).element_size()
        row = layers * 2 * arch.num_kv_heads * arch.head_dim * item
        return self.config.target.max_num_seqs * self._rows(positions) * row

    def _check_memory(self) -> None:
        """Refuse a KV cache that cannot fit before anything is read."""
        needed, free = self.cache_bytes(self._positions), free_bytes(self.device)
        if needed > free:
            raise UsageError(
                f"workload.max_tokens: a KV cache for {self._positions:,} positions needs "
                f"{needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; ask for fewer tokens"
            )

    def decoder(self) -> Decoder:
        """One capacity for all prompts: a compiled round is made for its shapes."""
        config = self.config
        decoder = Decoder(
            self.model,
            config.route,
            self._capacity,
            config.target.max_num_seqs,
            hazard_named(config.hazard),
            self.source.frequent,
        )
        if captures(self.device) and decoder.recorded is not None:
            self._warm_up(decoder)
        return decoder

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the record; parameters and bytes count the checkpoint's tensors, in the run's dtype."""
        config, boundary = self.config, resolve(self.config.route, self.model.native, captures(self.device))
        idle = hazard_named(config.hazard).cannot_act(
            config.route, config.sampling, config.target.max_num_seqs
        )
        parameters = sum(math.prod(shape) for shape in expected_tensors(self.source.arch).values())
        return {
            "parameters": parameters,
            "weight_bytes": parameters * self.model.dtype.itemsize,
            "dtype": self.config.model.dtype.value,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "opaque": boundary.opaque.value,
            "arithmetic": boundary.arithmetic.value,
            "compile_seconds": self._compile_seconds,
            "hazard_cannot_act": idle or "",
            "positions": self._positions,
            "trained_positions": self.source.arch.max_position_embeddings,
        }

    def prompts(self) -> list[Prompt]:
        """The workload's prompts, tokenised. Raises ``UsageError`` for an empty one."""
        prompts = []
        for index, spec in enumerate(self.config.workload.prompts):
            text = spec.text if spec.text is not None else self.source.text.chat(spec.user or "")
            ids = self.source.text.encode(text)
            if not ids:
                raise UsageError(f"workload.prompts[{index}] ({spec.name}): no tokens; give some text")
            budget = spec.max_tokens if spec.max_tokens is not None else self.config.workload.max_tokens
            prompts.append(Prompt(index, spec.name, text, ids, budget, spec.contract))
        return prompts

    def generate(self, prompts: list[Prompt], repeat: int, on_progress: OnProgress) -> Iterator[Generation]:
        """Decode the prompts, ``target.max_num_seqs`` at once; see ``targets.base.Target``."""
        scheduler = Scheduler(self.decoder())
        live: dict[int, _Live] = {}
        for prompt in prompts:
            noise = KeyedNoise(self.config.seed, prompt.index, repeat)
            request = Request(prompt.token_ids, self.config.sampling, noise, self.stop_ids)
            live[scheduler.add(request)] = self._live(prompt, repeat)
        turns = scheduler.turns()
        while live:
            try:
                number, step = next(turns)
                one = live[number]
                one.push(step)
                if one.delivery.finish_reason:
                    scheduler.finish(number)
                    yield live.pop(number).generation()
                else:
                    one.show(on_progress)
            except KeyboardInterrupt:
                for number in list(scheduler.running):
                    yield live.pop(number).cut_short("interrupted", "")
                raise
            except NonFiniteError as error:
                reason = "model_non_finite" if error.from_scratch else "non_finite"
                running = scheduler.running.items()
                number = next(n for n, sequence in running if sequence.slot == error.slot)
                yield live.pop(number).cut_short(reason, str(error))
                # The others start again: their draws are keyed, so they come to the same tokens.
                yield from self.generate([one.prompt for one in live.values()], repeat, on_progress)
                return

    def _live(self, prompt: Prompt, repeat: int) -> _Live:
        stop_strings = self.config.sampling.stop_strings
        delivery = Delivery(self.source.text.stream(), self.stop_ids, stop_strings, prompt.max_tokens)
        return _Live(prompt, repeat, self.config.seed, delivery)

    @property
    def reference_model(self) -> HybridModel:
        """The run's own weights in float32 or better."""
        return self._referee.model

    def score(self, generation: Generation) -> TokenScores | None:
        """Score under the same weights without drafts, in float32 or better."""
        return self._referee.score(generation)

    def rounding(self, generation: Generation) -> Rounding | None:
        """See ``engine_reference.Referee.rounding``."""
        return self._referee.rounding(generation)

    def explain(self, generation: Generation, index: int) -> Explanation | None:
        """See ``engine_reference.Referee.explain``."""
        return self._referee.explain(generation, index)

    def counters(self) -> list[CounterWindow]:
        """None: the engine has its rounds."""
        return []

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass
class _Live:
    """A generation in the making."""

    prompt: Prompt
    repeat: int
    seed: int
    delivery: Delivery
    rounds: list[Round] = field(default_factory=list)
    accepted: int = 0
    note: str = ""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    shown: float = 0.0

    def push(self, step: Step) -> None:
        """Take a step of the decoder; the first is the prefill's."""
        position = len(self.delivery.token_ids)
        emitted = self.delivery.push(step.tokens)
        if not self.prefill_seconds:
            self.prefill_seconds = step.seconds
            return
        passed = min(len(step.tokens) - 1, emitted)
        whole = emitted == len(step.tokens)
        self.rounds.append(Round(position, step.drafted if whole else passed, passed, emitted, step.seconds))
        self.decode_seconds += step.seconds
        self.accepted += passed

    def show(self, on_progress: OnProgress) -> None:
        """Report, a few times a second."""
        now = time.perf_counter()
        if now - self.shown > PROGRESS_SECONDS:
            self.shown = now
            tokens = len(self.delivery.token_ids)
            on_progress(
                Progress(
                    self.prompt, self.repeat, tokens, len(self.rounds), self.accepted, self.decode_seconds
                )
            )

    def cut_short(self, reason: str, note: str) -> Generation:
        """What there is so far."""
        self.delivery.finish_reason = reason
        self.note = note
        return self.generation()

    def generation(self) -> Generation:
        """The record."""
        return Generation(
            prompt=self.prompt,
            repeat=self.repeat,
            seed=self.seed,
            token_ids=self.delivery.token_ids,
            text=self.delivery.text,
            finish_reason=self.delivery.finish_reason or "interrupted",
            rounds=self.rounds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            note=self.note,
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"target.device={name}: torch {torch.__version__} sees no CUDA device here; use target.device=cpu"
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"target.device={name}: not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UsageError(f"target.device={name}: this machine's last is cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", index)
