"""The whole proof of one route: which runs ``exactness.follow`` makes, and what they come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sm70lab.engine import reference
from sm70lab.engine.decoder import captures
from sm70lab.engine.hazards import hazard_named
from sm70lab.engine.model import HybridModel
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.routes import graph_is_whole
from sm70lab.engine.sequence import Request
from sm70lab.judge import audit
from sm70lab.judge.exactness import Finding, ProbedDecoder, Run, follow
from sm70lab.judge.tolerance import tolerance_for
from sm70lab.schema import DraftSampling, ExperimentConfig, Generation, ModelDtype, Prompt, Route, Sampling

CANARY_TOKENS = 24
CONTINUED_TOKENS = 64
AUDIT_TOKENS = 2000  # a test of a distribution needs its numbers
GREEDY = Sampling(temperature=0.0)


@dataclass
class Proof:
    """What the proof found."""

    runs: list[Run] = field(default_factory=list)
    seconds: float = 0.0
    hazard: str = "none"
    cannot_act: str | None = None  # why the hazard changes nothing here
    skipped: list[str] = field(default_factory=list)  # runs left out after a fault

    @property
    def findings(self) -> list[Finding]:
        return [finding for run in self.runs for finding in run.findings]

    @property
    def exit_code(self) -> int:
        """0 exact, 1 fault, 3 only ties."""
        if any(not finding.tie for finding in self.findings):
            return 1
        return 3 if self.findings else 0


class Prover:
    """Proves one configuration's route on one loaded model.

    ``prompts`` are token ids, at least two of unequal lengths; ``tokens`` is how long the solo runs are.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        model: HybridModel,
        trusted: HybridModel,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        frequent: list[int] | None,
        observe: Callable[[str], None],
        stop_ids: frozenset[int] = frozenset(),
        audit_tokens: int = AUDIT_TOKENS,
    ) -> None:
        self.config, self.model, self.trusted = config, model, trusted
        self.prompts, self.tokens, self.frequent, self.observe = prompts, tokens, frequent, observe
        self.sampled = (
            config.sampling if config.sampling.temperature else replace(config.sampling, temperature=1)
        )
        self.stop_ids = stop_ids  # sampling.min_tokens bans them; the runs go on beyond one
        self.audit_tokens = max(tokens, audit_tokens)
        self.proof = Proof(hazard=config.hazard)
        longest = max(len(prompt) for prompt in prompts)
        self.capacity = longest + self.audit_tokens + CONTINUED_TOKENS + 2 * (config.route.draft_tokens + 1)

    def prove(self) -> Proof:
        """Everything, twice, in one process; after a fault the rest is left out."""
        started = time.perf_counter()
        config = self.config
        # A captured round runs one sequence: the batches' prompts then follow one another in its slot.
        alone = captures(self.model.device) and graph_is_whole(config.route)
        width = 1 if alone else max(config.target.max_num_seqs, 2)
        reasons = [
            hazard_named(config.hazard).cannot_act(route, self.sampled, width) for route in self._routes()
        ]
        self.proof.cannot_act = reasons[0] if all(reasons) else None
        greedy_route, coupled_route = self._routes()
        solo = self._decoder(greedy_route, 1)
        coupled = self._decoder(coupled_route, 1)
        batch = self._decoder(greedy_route, width)
        coupled_batch = self._decoder(coupled_route, width)
        first: dict[str, Run] = {}
        for turn in ("first", "second"):
            self._runs(turn, first, solo, coupled, batch, coupled_batch)
        if config.route.draft_sampling is not DraftSampling.coupled and config.route.draft_tokens:
            self._step("audit", lambda name: self._audit(name))
        self.proof.seconds = time.perf_counter() - started
        return self.proof

    def _routes(self) -> list[Route]:
        return [self.config.route, replace(self.config.route, draft_sampling=DraftSampling.coupled)]

    def _decoder(self, route: Route, width: int) -> ProbedDecoder:
        hazard = hazard_named(self.config.hazard)
        return ProbedDecoder(self.model, route, self.capacity, width, hazard, self.frequent)

    def _requests(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Request]:
        seed = self.config.seed
        noises = [KeyedNoise(seed, i, 0) for i in range(len(prompts))]
        pairs = zip(prompts, noises, strict=True)
        return [Request(ids, sampling, noise, self.stop_ids) for ids, noise in pairs]

    def _runs(
        self,
        turn: str,
        first: dict[str, Run],
        solo: ProbedDecoder,
        coupled: ProbedDecoder,
        batch: ProbedDecoder,
        coupled_batch: ProbedDecoder,
    ) -> None:
        one, several = [self.prompts[0]], [*self.prompts, self.prompts[0]]
        part = max(self.tokens // (2 * len(several)), 16)
        budgets = [part + 7 * i for i in range(len(several))]
        canary = ("canary", batch, self._requests(one, GREEDY), [CANARY_TOKENS])
        plan: list[tuple[str, ProbedDecoder, list[Request], list[int]]] = [
            ("greedy", solo, self._requests(one, GREEDY), [self.tokens]),
            ("sampled", coupled, self._requests(one, self.sampled), [self.tokens]),
            ("batch greedy", batch, self._requests(several, GREEDY), budgets),
            ("batch sampled", coupled_batch, self._requests(several, self.sampled), budgets),
        ]
        if turn == "first":
            self._one(turn, *canary, first)
        for name, decoder, requests, lengths in plan:
            self._one(turn, name, decoder, requests, lengths, first)
        if turn == "first":
            self._crossing_edges(solo, first)
        if turn == "second":
            self._one("last", *canary, first)

    def _one(
        self,
        turn: str,
        name: str,
        decoder: ProbedDecoder,
        requests: list[Request],
        budgets: list[int],
        first: dict[str, Run],
    ) -> None:
        before = first.get(name)
        greedy = not requests[0].sampling.temperature

        def run(label: str) -> Run:
            scripted = before.outputs if before and greedy and name != "canary" else None
            done = follow(decoder, label, requests, budgets, scripted)
            if before is not None and not done.faulty and done.outputs != before.outputs:
                check = "CAN" if name == "canary" else "TWICE"
                tied = any(finding.tie for finding in (*before.findings, *done.findings))
                where = _first_difference(before.outputs, done.outputs)
                done.find(check, f"{where} in the first run{', after a tie' if tied else ''}", tied)
            return done

        done = self._step(
            name if before is None else f"{name}, {'again' if turn != 'last' else 'after'}", run
        )
        if done is not None:
            first.setdefault(name, done)

    def _crossing_edges(self, decoder: ProbedDecoder, first: dict[str, Run]) -> None:
        """Rounds of many accepted drafts cross block edges; a prompt that goes on from there starts at one.

        The drafts come from the batch's output of the second prompt, which this decoder has not seen.
        """
        if "batch greedy" not in first:
            self.proof.skipped += ["scripted", "continued"]
            return
        prompt, output = self.prompts[1], first["batch greedy"].outputs[1]
        requests = self._requests([prompt], GREEDY)
        self._step("scripted", lambda name: follow(decoder, name, requests, [len(output)], [output]))
        if self.config.route.state.prefix_blocks:
            longer = self._requests([[*prompt, *output[:-1]]], GREEDY)
            self._step("continued", lambda name: follow(decoder, name, longer, [CONTINUED_TOKENS]))

    def _audit(self, name: str) -> Run:
        """A sampled run along the route's own draft sampling, scored by the plain reference."""
        decoder = self._decoder(self.config.route, 1)
        request = self._requests([self.prompts[0]], self.sampled)[0]
        run = Run(name)
        decoder.probe()
        sequence = decoder.admit(request)
        wanted = self.audit_tokens
        while len(sequence.output) < wanted:
            if sequence.in_prefill:
                decoder.prefill(sequence)
                continue
            (step,) = decoder.round([sequence])
            run.rounds += 1
            run.drafted += step.drafted
            run.accepted += len(step.tokens) - 1
        ids = sequence.output[:wanted]
        run.tokens, run.outputs = len(ids), [ids]
        prompt = Prompt(0, "prompt", "", list(request.prompt_ids), wanted)
        generation = Generation(prompt, 0, self.config.seed, ids, "", "length", [], 0.0, 0.0)
        scores = reference.score(self.trusted, list(request.prompt_ids), ids, self.sampled, request.stop_ids)
        dtype = ModelDtype(str(self.model.dtype).removeprefix("torch."))
        tolerance = tolerance_for(dtype)
        found = audit.evidence([generation], [scores], self.config.gate, greedy=False, tolerance=tolerance)
        if found.status.value == "bad":
            run.find("AUD", found.line)
        return run

    def _step(self, name: str, make: Callable[[str], Run]) -> Run | None:
        if any(run.faulty for run in self.proof.runs):
            self.proof.skipped.append(name)
            return None
        self.observe(name)
        run = make(name)
        self.proof.runs.append(run)
        return run


def _first_difference(before: list[list[int]], after: list[list[int]]) -> str:
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        for position, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"sequence {number}, position {position}: token {y}, it was {x}"
        if len(a) != len(b):
            return f"sequence {number}: {len(b)} tokens, there were {len(a)}"
    return "no difference"
