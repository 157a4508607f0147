"""Settings of a server's target: whose they are, what contradicts, and what leaves engine runs alone."""

from __future__ import annotations

import hashlib
import json

import pytest

from sm70lab.config import compose, conf_dir, from_plain, plain
from sm70lab.config_checks import STATE_SCHEMES
from sm70lab.config_checks_target import OWNERS, TARGETS, foreign_settings
from sm70lab.engine.schemes import SCHEMES
from sm70lab.errors import UsageError
from sm70lab.schema import ModelSpec, TargetConfig
from sm70lab.tracking import accepted
from sm70lab.tracking.fingerprint import fingerprint, model_hash
from sm70lab.tracking.variant import difference, settings_of, variant_id

URL = "http://127.0.0.1:9/v1"
SERVER = ("target=openai", f"target.base_url={URL}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["target=openai"], "target.base_url=null: must name the server"),
        ([f"target.base_url={URL}"], "target.base_url=http://127.0.0.1:9/v1: is a setting of target=openai"),
        ([*SERVER, "target.device=cpu"], "target.device=cpu: is a setting of target=engine"),
        ([*SERVER, "target.threads=4"], "target.threads=4: is a setting of target=engine"),
        ([*SERVER, "hazard=accepted_plus_one"], "hazard=accepted_plus_one: faults are put into the engine"),
        (["model=served"], "model=served: is what a server has"),
        (["target=openai", "target.base_url=ftp://x"], "must be http(s)://host:port"),
        (
            ["target=openai", "target.base_url=http://me:word@x/v1"],
            "target.base_url=http://***@x/v1: must hold no",
        ),
        (
            ["target=openai", "target.base_url='http://x/v1?key=4711'"],
            "target.base_url=http://x/v1: must have no",
        ),
        ([*SERVER, "target.tls_verify=false"], "target.tls_verify=false: acts on https:// alone"),
        ([*SERVER, "target.read_timeout_s=0"], "target.read_timeout_s=0.0: must be above 0 seconds"),
        ([*SERVER, "target.retries=-1"], "target.retries=-1: must be 0 to 100"),
        (
            [*SERVER, "target.api_key_env=NO_SUCH_KEY_4711"],
            "NO_SUCH_KEY_4711: this environment variable is not set",
        ),
        (
            [*SERVER, "target.api_key_env=sk-secret"],
            "target.api_key_env=***: must be the name of an environment",
        ),
        (
            [*SERVER, "target.headers={Authorization: Bearer sk-1}"],
            "target.headers.Authorization=***: must be env:",
        ),
        ([*SERVER, "target.headers={X-Api-Key: sk-1}"], "target.headers.X-Api-Key=***: must be env:NAME"),
        (
            [*SERVER, "target.headers={Content-Length: 3}"],
            "target.headers.Content-Length=…: is written by the client",
        ),
        ([*SERVER, "target.headers={X-Team: 'a '}"], "target.headers.X-Team='a ': must be printable ASCII"),
        ([*SERVER, "route.draft_tokens=2"], "route.draft_tokens=2: the server's route is its own"),
        ([*SERVER, "route.graph=full"], "route.graph=full: the server's route is its own"),
        ([*SERVER, "route.state.block_size=32"], "route.state.block_size=32: the server's route is its own"),
        ([*SERVER, "route=split", "route.state.scheme=foo"], "route.state.scheme=foo: no such scheme; known"),
        ([*SERVER, "serving=v100_tp2_27b_awq"], "serving=v100_tp2_27b_awq: belongs to target=vllm"),
        ([*SERVER, "target.extra_body={temperature: 2}"], "set sampling.temperature instead"),
        ([*SERVER, "target.extra_body={stream: false}"], "is written by the target itself"),
        ([*SERVER, "target.extra_body={api_key: x}"], "target.extra_body.api_key=***"),
        ([*SERVER, "target.metrics='off'", "target.metrics_url=http://x/m"], "target.metrics=off reads none"),
    ],
)
def test_what_cannot_act_or_contradicts_is_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        compose(overrides)
    assert words in str(caught.value) and "sk-" not in str(caught.value)


def test_a_servers_target_has_its_own_model_and_route() -> None:
    config = compose(SERVER)
    assert (config.model.name, config.route.name) == ("served", "as_served")
    config = compose([*SERVER, "model=web", "route=no_mtp"])
    assert (config.model.name, config.route.name) == ("web", "no_mtp")


def test_the_checks_know_every_scheme_of_the_state() -> None:
    assert set(STATE_SCHEMES) == set(SCHEMES)


def test_headers_and_fields_of_ones_own_arrive() -> None:
    config = compose(
        [*SERVER, "target.headers={X-Team: a b}", "+target.extra_body.chat_template_kwargs={x: 1}"]
    )
    assert config.target.headers == {"X-Team": "a b"}
    assert config.target.extra_body == {"chat_template_kwargs": {"x": 1}}
    assert from_plain(plain(config)) == config


def test_an_engine_run_is_recorded_and_known_without_the_settings_of_servers() -> None:
    config = compose()
    assert set(plain(config)["target"]) == {"name", "max_num_seqs", "device", "threads", "kernels"}
    assert settings_of(plain(config), "w" * 64) == settings_of(
        json.loads(json.dumps(plain(config))), "w" * 64
    )
    assert {key for key in OWNERS if key not in foreign_settings("engine")} == {
        "device",
        "threads",
        "kernels",
    }
    assert set(OWNERS) < set(TargetConfig.__dataclass_fields__)
    assert all(set(owners) <= set(TARGETS) for owners in OWNERS.values())


def test_the_pinned_variant_keeps_its_id() -> None:
    """It was pinned before servers had any settings."""
    pinned = accepted.load(conf_dir() / accepted.ACCEPTED)
    assert variant_id(pinned.settings) == pinned.values["variant"]


def test_how_a_server_is_reached_is_not_what_is_run() -> None:
    a = compose(SERVER)
    b = compose([*SERVER, "target.read_timeout_s=7", "target.retries=9"])
    weights = model_hash(a.model, a.target)
    assert fingerprint(a, weights) == fingerprint(b, weights)
    assert settings_of(plain(a), weights) == settings_of(plain(b), weights)
    other = compose(["target=openai", "target.base_url=http://127.0.0.1:10/v1"])
    assert model_hash(other.model, other.target) != weights
    assert fingerprint(other, weights) != fingerprint(a, weights)


def test_a_served_models_hash_is_its_place_and_name() -> None:
    target = TargetConfig(name="openai", base_url=URL, served_model="m")
    expected = hashlib.sha256(json.dumps([URL, "m"]).encode()).hexdigest()
    assert model_hash(ModelSpec(name="served"), target) == expected


def test_a_difference_names_the_target_and_what_is_not_its_yaml() -> None:
    engine = settings_of(plain(compose(["model=tiny"])), None)
    served = settings_of(plain(compose([*SERVER, "target.endpoint=chat"])), None)
    told = difference(served, engine)
    assert "target=openai" in told and "target.endpoint=chat" in told
    assert not [line for line in told if line.startswith(("target.device", "target.defaults", "target.tls"))]
