"""The page of a sweep: which routes pass, how fast, what the hazards showed, every run in one table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sm70lab.judge.statistics import PassRate, pass_rate
from sm70lab.schema import VerdictKind
from sm70lab.tracking import drawing
from sm70lab.tracking.report import parts, pictures, quality
from sm70lab.tracking.report.records import Record
from sm70lab.tracking.variant import Settings, difference, settings_of

SETTING = ("model", "workload", "sampling", "gate", "target", "audit")  # unlike in one: no ranking across
FAULTS_SHOWN = 4
PASSED, INCONCLUSIVE = VerdictKind.passed.value, VerdictKind.inconclusive.value


@dataclass
class Variant:
    """The runs without a hazard that differ in nothing but seed and repeats."""

    letter: str
    label: str
    records: list[Record]
    windows: int  # output tokens a window
    rate: PassRate = field(init=False)
    inconclusive: int = field(init=False)
    speed: quality.Speed | None = field(init=False)  # of the runs whose speed is valid

    def __post_init__(self) -> None:
        done = parts.finished(self.records)
        self.inconclusive = sum(r.verdict == INCONCLUSIVE for r in done)
        self.rate = pass_rate(sum(r.verdict == PASSED for r in done), len(done) - self.inconclusive)
        speeds = [speed for r in done if (speed := r.speed()) is not None]
        self.speed = quality.speed_of(speeds) if speeds else None

    @property
    def sound(self) -> bool:
        """Whether its speed may be ranked: at least one run judged, and every one passes."""
        return self.rate.judged > 0 and self.rate.passed == self.rate.judged and self.speed is not None

    @property
    def outcome(self) -> str:
        """``pass``, ``fail``, ``inconclusive`` or ``no runs``: only runs with a verdict count."""
        if self.rate.judged:
            return "pass" if self.rate.passed == self.rate.judged else "fail"
        return INCONCLUSIVE if self.inconclusive else "no runs"

    @property
    def name(self) -> str:
        """What legends and panels call it."""
        return f"{self.letter}: {self.label}"

    @property
    def rates(self) -> list[float]:
        """Mean acceptance rate per draft position over the finished runs."""
        done = parts.finished(self.records)
        found: list[float] = []
        while values := [
            v for r in done if (v := r.metric("acceptance", f"rate_{len(found) + 1}")) is not None
        ]:
            found.append(sum(values) / len(values))
        return found

    def point(self) -> quality.Point:
        share = self.rate.passed / self.rate.judged if self.rate.judged else 0.0
        return quality.Point(self.letter, share, self.rate.low, self.rate.high, self.speed)


@dataclass(frozen=True)
class Setting:
    """Variants that may be ranked together: one model, workload, sampling, gate, target and machine."""

    name: str
    variants: list[Variant]  # those that may be ranked first, fastest first
    picture: pictures.Picture | None


@dataclass(frozen=True)
class Cell:
    """Runs of one hazard on one route. ``outcome``: caught, partly, missed, unclear, idle, clean or fault."""

    outcome: str
    text: str
    words: str


def build(name: str, records: list[Record]) -> dict[str, Any]:
    """What the template shows of an experiment folder's runs."""
    honest = [r for r in records if r.hazard is None]
    settings = _settings(honest)
    variants = [v for setting in settings for v in setting.variants]
    headline, label, style = _headline(settings, honest, records)
    return {
        "title": name,
        "records": sorted(records, key=lambda r: (r.hazard or "", r.route, str(r.seed), r.started)),
        "label_of": parts.label,
        "style_of": parts.style,
        "style": style,
        "label": label,
        "headline": headline,
        "counts": Counter(parts.label(r) for r in honest),
        "hazard_runs": len(records) - len(honest),
        "settings": settings,
        "pictures": _pictures(variants, honest),
        "heat": _heat(records),
        "faults": _faults(honest),
        "differences": _differences(records),
        "environments": _environments(records),
        "commands": list(dict.fromkeys(c for r in records if (c := parts.typed(r.environment)) is not None)),
    }


def _settings(honest: list[Record]) -> list[Setting]:
    """Group runs by what makes speeds comparable, then by variant."""
    groups: dict[str, dict[str, list[Record]]] = {}
    whole: dict[str, Settings] = {}
    for record in honest:
        if not record.config:
            continue
        settings = settings_of(record.config, record.result.get("loaded", {}).get("model_hash"))
        where = repr([settings.get(key) for key in SETTING]) + repr(_machine(record))
        key = repr(settings)
        whole[key] = settings
        groups.setdefault(where, {}).setdefault(key, []).append(record)
    found = []
    for number, members in enumerate(groups.values(), 1):
        labels = _labels({key: whole[key] for key in members})
        gathered = [
            Variant("", labels[key], records, _window(records[0])) for key, records in members.items()
        ]
        gathered.sort(key=lambda v: (not v.sound, -v.speed.mean if v.speed else 0.0, v.label))
        for index, variant in enumerate(gathered):
            variant.letter = _letter(index)
        first = next(iter(members.values()))[0]
        judged = [v for v in gathered if v.rate.judged]
        picture = None
        if any(v.speed is not None for v in judged):
            points = [v.point() for v in judged]
            names = [v.name for v in judged]
            picture = pictures.quality_picture(points, names, f"quality{number}")
        title = _setting_name(first) if len(groups) > 1 else ""
        found.append(Setting(title, gathered, picture))
    return found


def _labels(variants: dict[str, Settings]) -> dict[str, str]:
    """A variant's name: its route, and where several variants have that route what tells them apart."""
    routes = Counter(settings["route"]["name"] for settings in variants.values())
    labels = {}
    for key, settings in variants.items():
        name = settings["route"]["name"]
        if routes[name] > 1:
            others = [s for s in variants.values() if s["route"]["name"] == name and s is not settings]
            told = dict.fromkeys(d for other in others for d in difference(settings, other))
            name = " ".join([name, *told])
        labels[key] = name
    return labels


def _headline(settings: list[Setting], honest: list[Record], records: list[Record]) -> tuple[str, str, str]:
    """The sweep in a few sentences, the words of its badge and their style."""
    done = parts.finished(honest)
    if not done:
        return f"None of {len(records)} runs has a verdict without a hazard.", INCONCLUSIVE, INCONCLUSIVE
    passed = sum(r.verdict == PASSED for r in done)
    lines = [f"{passed} of {len(done)} judged runs pass."]
    variants = [v for setting in settings for v in setting.variants]
    label, style, routes = _of_the_routes(variants, sum(not r.config for r in honest))
    lines += [routes] if routes else []
    for setting in settings:
        ranked = [v for v in setting.variants if v.sound]
        if ranked:
            lines.append(_fastest(ranked, setting.name))
    return " ".join(lines), label, style


def _of_the_routes(variants: list[Variant], unread: int) -> tuple[str, str, str]:
    """The badge's words and style, and a sentence on the routes where not every one passes.

    ``unread`` runs tell no configuration, so nobody knows which route they were of.
    """
    outcomes = Counter(v.outcome for v in variants)
    if not unread and set(outcomes) == {"pass"} and not any(v.inconclusive for v in variants):
        return "all pass", PASSED, ""
    ways = {  # outcome → one, several
        "fail": ("1 fails", "{} fail"),
        "inconclusive": ("1 is inconclusive", "{} are inconclusive"),
        "no runs": ("1 has no finished run", "{} have no finished run"),
    }
    words = [f"{outcomes['pass']} of {len(variants)} routes {'pass' if len(variants) > 1 else 'passes'}"]
    words += [
        (one if outcomes[way] == 1 else more.format(outcomes[way]))
        for way, (one, more) in ways.items()
        if outcomes[way]
    ]
    words += [f"{unread} run{'s' if unread > 1 else ''} cannot be read"] if unread else []
    line = ", ".join(words)
    if outcomes["fail"]:
        return "faults found", "route_fault", f"{line}."
    return line if outcomes["pass"] else INCONCLUSIVE, INCONCLUSIVE, f"{line}."


def _fastest(ranked: list[Variant], where: str) -> str:
    best = ranked[0]
    assert best.speed is not None
    runs = f"{best.rate.judged} run{'s' if best.rate.judged != 1 else ''}"
    line = (
        f"Fastest of the routes that pass every run{f' ({where})' if where else ''}: {best.label}, "
        f"{best.speed.mean:.1f} tok/s over {runs}, which shows a pass rate of at least {best.rate.low:.0%} "
        "(95 %)."
    )
    rivals = [v for v in ranked[1:] if v.speed is not None and v.speed.high >= best.speed.low]
    if any(v.speed is not None and v.speed.runs < quality.INTERVAL_RUNS for v in (best, *rivals)):
        line += " Too few runs for an interval of the speed: repeat them before you choose."
    elif rivals:
        line += f" Its speed interval overlaps that of {', '.join(v.label for v in rivals)}: a tie."
    return line


def _pictures(variants: list[Variant], honest: list[Record]) -> list[pictures.Picture]:
    found = []
    curves = [
        (variant.name, curve)
        for variant in variants
        for record in variant.records
        if (curve := record.detail("audit", "curve"))
    ]
    if curves:
        decisive = (record.detail("audit", "limit_log10_e") for record in honest)
        limits = {limit for limit in decisive if limit is not None}
        routes, drawn = zip(*curves, strict=True)
        found.append(pictures.evidence_picture(list(drawn), routes, max(limits, default=None)))
    panels = {}
    for variant in variants:
        rounds = [r for record in variant.records for group in record.rounds().values() for r in group]
        if any(rates := drawing.pooled_rates(rounds, variant.windows)):
            panels[variant.name] = rates
    if panels:
        found.append(pictures.acceptance_picture(panels))
    return found


def _heat(records: list[Record]) -> dict[str, Any] | None:
    """Route × hazard: what the verdicts said; None where no run had a hazard."""
    hazards = sorted({r.hazard for r in records if r.hazard is not None})
    if not hazards:
        return None
    routes = list(dict.fromkeys(r.route for r in sorted(records, key=lambda r: r.route)))
    cells: dict[tuple[str | None, str], list[Record]] = {}
    for record in records:
        cells.setdefault((record.hazard, record.route), []).append(record)
    rows = [
        (hazard or "no hazard", [_cell(hazard, cells.get((hazard, route), [])) for route in routes])
        for hazard in (None, *hazards)
    ]
    return {"routes": routes, "rows": rows}


def _cell(hazard: str | None, records: list[Record]) -> Cell | None:
    if not records:
        return None
    done = parts.finished(records)
    kinds = Counter(r.verdict for r in done)
    said = ", ".join(f"{count} {parts.LABELS.get(kind or '', kind)}" for kind, count in sorted(kinds.items()))
    words = said or "no verdict"
    bad = sum(count for kind, count in kinds.items() if kind not in (PASSED, INCONCLUSIVE))
    if not done:
        return Cell("unclear", "–", words)
    if hazard is not None and all(r.idle_hazard for r in done):
        return Cell("idle", "n/a", f"cannot act here; {words}")
    text = f"{bad}/{len(done)}"
    if kinds[INCONCLUSIVE] == len(done):
        return Cell("unclear", text, words)
    if hazard is None:
        return Cell("fault" if bad else "clean", text, words)
    return Cell("caught" if bad == len(done) else "partly" if bad else "missed", text, words)


def _faults(honest: list[Record]) -> list[tuple[Record, parts.Excerpt]]:
    """The first faults of the first runs that have one."""
    found = ((record, excerpt) for record in honest for excerpt in parts.excerpts(record))
    return [pair for pair, _ in zip(found, range(FAULTS_SHOWN), strict=False)]


def _differences(records: list[Record]) -> dict[str, Any]:
    """The settings that differ in the sweep: one row a distinct combination, one column a setting."""
    known = [r for r in records if r.config]
    table = parts.differences({r.name: r.config for r in known})
    rows: dict[tuple[str, ...], list[Any]] = {}
    for index, record in enumerate(known):
        rows.setdefault(tuple(d.values[index] for d in table), []).append(record.seed)
    # Folders stand in the order of their fingerprints, which says nothing to a reader.
    ordered = sorted((values, sorted(seeds, key=str)) for values, seeds in rows.items())
    return {"keys": [d.key for d in table], "rows": ordered}


def _environments(records: list[Record]) -> list[dict[str, Any]]:
    """Each machine and software state that runs of this sweep had, with how many."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        rows = parts.environment_rows(record.environment)
        entry = found.setdefault(repr(rows), {"rows": rows, "runs": 0})
        entry["runs"] += 1
    return [entry for entry in found.values() if entry["rows"]]


def _machine(record: Record) -> list[Any]:
    cpu = (record.environment.get("cpu") or {}).get("name")
    return [cpu, [gpu.get("name") for gpu in record.environment.get("gpus") or []]]


def _setting_name(record: Record) -> str:
    config = record.config
    names = [
        f"{key} {config[key].get('name')}"
        for key in ("model", "workload", "sampling")
        if isinstance(config.get(key), dict) and config[key].get("name")
    ]
    gpus = [gpu.get("name") for gpu in record.environment.get("gpus") or []]
    machine = gpus[0] if gpus else (record.environment.get("cpu") or {}).get("name")
    return ", ".join([*names, *([str(machine)] if machine else [])])


def _window(record: Record) -> int:
    return int((record.config.get("gate") or {}).get("window_tokens") or 500)


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)
