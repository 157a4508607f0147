"""The exactness proof: a route's tokens and states against the no-draft run's, round by round.

Checks, by name:

* ID: every token is the one that the no-draft run emits, greedy and at temperature 1 (with
  coupled drafts, whose sampled output is token-identical by construction).
* ST: after every commit each layer's conv window and SSM state is the shadow's.
* NUM: with exact arithmetic every verify row's logits have the bits of the one-row step.
* DRAFT: the first draft is the honest draft head's.
* AUD: a sampled run with the route's own draft sampling has the reference's distribution.
* CAN: a fixed prompt gives the same tokens before and after all of it.
* TWICE: a second pass in the same process gives the first pass's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sm70lab.engine.decoder import Decoder
from sm70lab.engine.rejection import Drafts
from sm70lab.engine.sampling import Candidates
from sm70lab.engine.scheduler import Scheduler
from sm70lab.engine.sequence import Request, Sequence, Step
from sm70lab.engine.state import LayerSnapshot
from sm70lab.errors import NonFiniteError
from sm70lab.judge.shadow import Shadow

if TYPE_CHECKING:
    from sm70lab.engine.captured import Told, WholeRound

# Largest relative RMS of a state where bits may differ (another chunking, plain products), by dtype.
STATE_LIMIT = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.2}
# Largest lead of the expected token that rounding may overturn: below it a difference is a tie.
TIE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.3}
AFTER_FAULT = 40  # tokens that a run goes on after a fault, so that the other checks can see it too


@dataclass
class Finding:
    """One thing that is not exact."""

    check: str
    run: str
    tie: bool  # rounding explains it
    line: str


@dataclass
class Run:
    """What one run of the proof measured."""

    name: str
    outputs: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    edges: int = 0  # block edges that the sequences crossed
    reused: int = 0  # prompt tokens out of the prefix cache
    states: int = 0  # layer states compared
    worst_state: float = 0.0  # relative RMS
    worst_logit: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def find(self, check: str, line: str, tie: bool = False) -> None:
        """Record the first of each kind."""
        if all(f.check != check or f.tie != tie for f in self.findings):
            self.findings.append(Finding(check, self.name, tie, line))

    @property
    def faulty(self) -> bool:
        return any(not finding.tie for finding in self.findings)


class ProbedDecoder(Decoder):
    """Keeps each sequence's last raw logits, and can be told what to draft."""

    def probe(self, script: dict[int, list[int]] | None = None) -> None:
        """``script``: slot → the tokens that the no-draft run emits, from which drafts are taken."""
        self.logits_of: dict[int, torch.Tensor] = {}
        self.drafts_of: dict[int, list[int]] = {}
        self.script = script

    def _finite(self, logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        self.logits_of[sequence.slot] = logits
        return super()._finite(logits, sequence)

    def _told_of(self, captured: WholeRound, sequence: Sequence) -> Iterator[Told]:
        """Each round is read before the next begins; with a script its kernels are launched one by one."""
        if not sequence.rounds:
            scripted = bool(self.script and self.k)
            between = (lambda: self._script_captured(captured, sequence)) if scripted else None
            self._told = captured.rounds(sequence, ahead=False, between=between)
        return self._told

    def _captured_round(self, captured: WholeRound, sequence: Sequence) -> Step:
        step = super()._captured_round(captured, sequence)
        self.logits_of[sequence.slot] = captured.logits[: len(step.tokens)].clone()
        self.drafts_of[sequence.slot] = captured.tokens[1:].tolist()
        self.store.position[sequence.slot] += len(step.tokens)
        self.store.accepted[:, sequence.slot] = len(step.tokens)
        return step

    def _script_captured(self, captured: WholeRound, sequence: Sequence) -> None:
        q = captured.drafted(captured.kind(sequence.sampling)[0])
        if self.script and (known := self.script.get(sequence.slot)):
            drafts = Drafts(captured.tokens[1:], Candidates(q.ids, q.probs))
            self._from_script(drafts, known, len(sequence.output), self.k)

    def _draft(self, sequences: list[Sequence], k: int) -> list[Drafts]:
        found = super()._draft(sequences, k)
        for sequence, drafts in zip(sequences, found, strict=True):
            if self.script and k and (known := self.script.get(sequence.slot)):
                self._from_script(drafts, known, len(sequence.output), k)
            self.drafts_of[sequence.slot] = drafts.tokens.tolist()
        return found

    def _from_script(self, drafts: Drafts, known: list[int], position: int, k: int) -> None:
        """Right drafts up to a depth that changes from round to round, then a wrong one."""
        right = (7 * position + position // 5) % (k + 1)
        tokens = known[position : position + k]
        for i in range(len(tokens)):
            token = tokens[i] if i < right else (tokens[i] + 1) % self.model.arch.vocab_size
            drafts.tokens[i] = drafts.q.ids[i, 0] = token


class _Followed:
    """One sequence of a run and its shadow."""

    def __init__(self, decoder: ProbedDecoder, request: Request, capacity: int, check_drafts: int) -> None:
        self.shadow = Shadow(decoder, request, capacity)
        self.check_drafts = check_drafts
        self.pending: int | None = None  # delivered, its state not committed yet

    def take(self, run: Run, decoder: ProbedDecoder, sequence: Sequence, tokens: list[int]) -> None:
        """Check one step's tokens and the state behind them."""
        shadow, logits = self.shadow, decoder.logits_of[sequence.slot]
        for row, token in enumerate(tokens):
            if self.pending is not None:
                if self.check_drafts > len(shadow.output):
                    self._check_draft(run, decoder, sequence, self.pending, first=row == 0)
                shadow.feed(self.pending)
            self._check_row(run, decoder, logits[row : row + 1])
            wanted, lead = shadow.expect()
            if token != wanted:
                tie = lead < TIE[decoder.model.dtype]
                where = f"position {len(shadow.output)}: token {token}, the no-draft run has {wanted}"
                word = "tie" if tie else "fault"
                run.find("ID", f"{where}, which leads by {lead:.3g}: {word}", tie)
            shadow.deliver(token)
            self.pending = token
        self._check_states(run, decoder, sequence)

    def _check_row(self, run: Run, decoder: ProbedDecoder, row: torch.Tensor) -> None:
        if torch.equal(row, self.shadow.logits):
            return
        worst = float((row - self.shadow.logits).abs().max())
        run.worst_logit = max(run.worst_logit, worst)
        if self._bits_must_agree(decoder, run):
            position = len(self.shadow.output)
            run.find(
                "NUM", f"position {position}: a verify row's logits differ by {worst:.3g} from one row's"
            )

    def _check_draft(
        self, run: Run, decoder: ProbedDecoder, sequence: Sequence, token: int, first: bool
    ) -> None:
        """The first draft of a round, where drafts are the draft head's argmax."""
        logits = self.shadow.first_draft(token)  # also the shadow's own draft cache
        drafts = decoder.drafts_of.get(sequence.slot)
        if logits is None or not first or not drafts or self.shadow.request.sampling.temperature:
            return
        if len(logits) == 1:  # a shortlist of one id drafts it
            return
        top = logits.double().topk(2)
        wanted = int(decoder.head.ids(top.indices[0]))
        lead = float(top.values[0] - top.values[1])
        if drafts[0] != wanted and lead > TIE[decoder.model.dtype]:
            position = len(self.shadow.output)
            run.find("DRAFT", f"position {position}: draft {drafts[0]}, an honest head drafts {wanted}")

    def _check_states(self, run: Run, decoder: ProbedDecoder, sequence: Sequence) -> None:
        found = decoder.store.snapshot([sequence.slot])
        bits = self._bits_must_agree(decoder, run)
        for layer, what, worst in _differences(found, self.shadow.states()):
            run.states += 1
            run.worst_state = max(run.worst_state, worst)
            # Captured rounds fold in their kernel's order of operations, a snapshot in PyTorch's.
            exact = bits and decoder.captured is None
            if worst > (0 if exact else STATE_LIMIT[decoder.model.dtype]):
                position = decoder.store.position[sequence.slot]
                where = f"{what} of GDN layer {layer}, round {sequence.rounds}, position {position}"
                run.find("ST", f"{where}: off by {worst:.3g} (relative RMS)")

    @staticmethod
    def _bits_must_agree(decoder: ProbedDecoder, run: Run) -> bool:
        """A state out of the prefix cache was made in other chunks, and plain products round by row count."""
        if decoder.captured is not None:
            return decoder.captured.exact
        return not decoder.boundary.arithmetic.whole and not run.reused


def _differences(found: list[LayerSnapshot], wanted: list[LayerSnapshot]) -> Iterator[tuple[int, str, float]]:
    """(layer, which state, relative RMS) of conv windows and SSM states; NaN counts as infinite."""
    for layer, pairs in enumerate(zip(found, wanted, strict=True)):
        for what, a, b in zip(("conv window", "SSM state"), *pairs, strict=True):
            if torch.equal(a, b):
                yield layer, what, 0.0
                continue
            a, b = a.double(), b.double()
            worst = float((a - b).norm() / b.norm().clamp_min(1e-30))
            yield layer, what, worst if worst == worst else float("inf")


def follow(
    decoder: ProbedDecoder,
    name: str,
    requests: list[Request],
    budgets: list[int],
    known: list[list[int]] | None = None,
    check_drafts: int = 200,
) -> Run:
    """Run requests through the scheduler with a shadow beside each, ``budgets`` output tokens of each.

    ``known`` are the outputs of an earlier run: drafts are then taken from them, right to a depth
    that changes from round to round.
    """
    run = Run(name, outputs=[[] for _ in requests])
    decoder.probe({} if known else None)
    scheduler = Scheduler(decoder)
    for request in requests:
        scheduler.add(request)
    followed: dict[int, _Followed] = {}
    block, left = decoder.route.state.block_size, AFTER_FAULT
    turns = scheduler.turns()
    while True:
        try:
            number, step = next(turns)
        except StopIteration:
            break
        except (NonFiniteError, ValueError, IndexError, RuntimeError) as error:
            what = (
                "" if isinstance(error, NonFiniteError) else f"the engine stopped: {type(error).__name__}: "
            )
            run.find("ID", f"{what}{error}")
            break
        sequence = scheduler.running[number]
        if number not in followed:
            run.reused += sequence.reused
            drafts = 0 if known else check_drafts
            followed[number] = _Followed(decoder, requests[number], decoder.kv.capacity, drafts)
            if known is not None and decoder.script is not None:
                decoder.script[sequence.slot] = known[number]
        with torch.inference_mode():
            followed[number].take(run, decoder, sequence, step.tokens)
        run.tokens += len(step.tokens)
        run.drafted += step.drafted
        run.accepted += len(step.tokens) - 1
        run.rounds += 1
        left -= len(step.tokens) if run.faulty else 0
        if len(sequence.output) >= budgets[number] or left < 0:
            run.outputs[number] = sequence.output[: budgets[number]]
            run.edges += (len(sequence.tokens) - 1) // block - len(sequence.prompt_ids) // block
            scheduler.finish(number)
        if left < 0:
            break
    return run
