"""The way to one server: addresses, key, TLS, time limits, and what the server tells of itself."""

from __future__ import annotations

import json
import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import h11
import httpx

from sm70lab import __version__
from sm70lab.config_checks_target import ENV
from sm70lab.errors import UsageError
from sm70lab.schema import TargetConfig
from sm70lab.targets.openai_request import LLAMA_CPP, SGLANG, SM70LAB, UNKNOWN, VLLM
from sm70lab.targets.openai_stream import ServerError, error_of

FACT_CHARS = 2000
FACTS = 200  # entries kept of what a server tells
INFO_SECONDS = 10.0  # for a page that tells of the server; a run does not wait longer for it
SECRET = re.compile(
    r"api_?key|passw|secret|authoriz|credential|(?:hf|auth|access|bearer)_?token|ssl_key", re.IGNORECASE
)
PAGES = {  # where which server tells what it is
    "version": "/version",
    "props": "/props",
    "server_info": "/get_server_info",
}


class Client:
    """Settings of the connection, resolved once. Holds the key; shows it nowhere."""

    def __init__(self, target: TargetConfig) -> None:
        assert target.base_url is not None
        self.target = target
        self.root, self.api = _addresses(target.base_url)
        self.headers = _headers(target)
        self.ssl = _ssl(target)
        self.timeout = httpx.Timeout(
            connect=target.connect_timeout_s,
            read=target.read_timeout_s,
            write=target.read_timeout_s,
            pool=None,
        )
        self.sync = httpx.Client(**self.options())

    def options(self) -> dict[str, Any]:
        """Arguments of an httpx client. Proxies and passwords of the environment and netrc are not read:
        what is measured is the server that the configuration names."""
        return {
            "headers": self.headers,
            "verify": self.ssl,
            "timeout": self.timeout,
            "trust_env": False,
            "follow_redirects": False,
            "limits": httpx.Limits(
                max_connections=None, max_keepalive_connections=self.target.max_num_seqs + 1
            ),
        }

    def close(self) -> None:
        """Close the connections."""
        self.sync.close()

    def url(self, path: str) -> str:
        """Address of a path of the API: ``/models`` is at ``…/v1/models``."""
        return self.api + path

    def get(self, path: str, seconds: float | None = None, api: bool = True) -> httpx.Response:
        """GET below ``…/v1``, or with ``api=False`` below the server's root. Raises ``httpx`` errors."""
        address = (self.api if api else self.root) + path
        try:
            return self.sync.get(address, timeout=self.timeout if seconds is None else seconds)
        except h11.LocalProtocolError as error:  # a body that is not as a header says: httpx lets it through
            raise httpx.LocalProtocolError(str(error)) from error

    def post(self, path: str, body: dict[str, Any], api: bool = True) -> httpx.Response:
        """POST JSON, without streaming. Raises ``httpx`` errors."""
        return self.sync.post((self.api if api else self.root) + path, json=body)

    def hide(self, text: str) -> str:
        """``text`` without the values of secret headers, should a server send them back."""
        for value in self.headers.values():
            secret = value.removeprefix("Bearer ")
            if len(secret) > 3 and secret not in self.target.headers.values():
                text = text.replace(secret, "***")
        return text


@dataclass
class ServerFacts:
    """What a server says of itself."""

    model: str  # that is asked for
    family: str = UNKNOWN
    told: dict[str, Any] = field(default_factory=dict)  # page → its JSON

    @property
    def version(self) -> dict[str, Any]:
        """The answer of ``/version``; empty where there is none."""
        found = self.told.get("version")
        return found if isinstance(found, dict) else {}

    def flat(self) -> dict[str, str | int | float]:
        """Dotted name → value of everything told, without what may be secret."""
        found: dict[str, str | int | float] = {"server": self.family, "served_model": self.model}
        for page, value in self.told.items():
            _flatten(f"server.{page}", value, found)
        return dict(list(found.items())[:FACTS])


def facts(client: Client) -> ServerFacts:
    """Ask a server what it is and has. Raises ``UsageError`` where it cannot be reached or used."""
    wanted = client.target.served_model
    models, listing = _models(client)
    names = [str(model["id"]) for model in models]
    if wanted is not None and names and wanted not in names:
        raise UsageError(f"target.served_model={wanted}: {client.root} serves {', '.join(names[:5])}")
    if wanted is None and not names:
        raise UsageError(f"target.served_model=null: {client.root} lists no models; name one")
    found = ServerFacts(wanted if wanted is not None else names[0])
    entry = next((model for model in models if model["id"] == found.model), {})
    found.told["model"] = entry
    for name, path in PAGES.items():
        page = _page(client, path)
        if page is not None:
            found.told[name] = page
    if software := listing.headers.get("server"):
        found.told["software"] = software
    found.family = _family(found, entry)
    return found


def _models(client: Client) -> tuple[list[dict[str, Any]], httpx.Response]:
    try:
        answer = client.get("/models")
    except httpx.HTTPError as error:
        raise UsageError(
            f"target.base_url={client.target.base_url}: {in_words(error, client.target)}"
        ) from error
    if answer.status_code == 404 and client.target.served_model is not None:
        return [], answer  # a server of the API's two endpoints alone
    if answer.status_code == 404:
        raise UsageError(
            f"{client.url('/models')}: HTTP 404; is target.base_url right? A server without this list needs "
            "target.served_model"
        )
    if answer.status_code != 200:
        raise UsageError(f"{client.url('/models')}: {refusal(client, answer)}")
    try:
        value = answer.json()
        models = [model for model in value["data"] if isinstance(model, dict) and "id" in model]
    except (ValueError, KeyError, TypeError) as error:
        kind = answer.headers.get("content-type", "no content type")
        raise UsageError(
            f"{client.url('/models')}: no list of models in the answer ({kind}); is target.base_url right?"
        ) from error
    return models, answer


def _page(client: Client, path: str) -> Any:
    """JSON of a page that a server may have; None without."""
    try:
        answer = client.get(path, INFO_SECONDS, api=False)
        return answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def _family(found: ServerFacts, entry: dict[str, Any]) -> str:
    if found.version.get("engine") == "sm70lab":
        return SM70LAB
    owner = str(entry.get("owned_by", "")).lower()
    by_owner = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP, "sm70lab": SM70LAB}
    return by_owner.get(owner, UNKNOWN)


def refusal(client: Client, answer: httpx.Response) -> str:
    """A status and what the server says of it, in one line. The body must have been read."""
    status = f"HTTP {answer.status_code} {answer.reason_phrase}".strip()
    if answer.status_code in (301, 302, 303, 307, 308):
        return f"{status} to {answer.headers.get('location')}; set target.base_url to where it leads"
    try:
        said = error_of(answer.json())
    except ValueError:
        said = None
    if said is None:
        text = " ".join(answer.text.split())[:200]
        said = ServerError(text) if text else None
    if said is not None and str(said) == answer.reason_phrase:
        said = None
    hint = ""
    if answer.status_code in (401, 403):
        key = client.target.api_key_env
        hint = f"; the key is that of {key}" if key else "; name the variable of a key in target.api_key_env"
    return client.hide(f"{status}{f': {said}' if said else ''}{hint}")


def in_words(error: BaseException, target: TargetConfig | None = None) -> str:
    """An error of the connection for a person, with the limit of ``target`` that it ran into."""
    limits: list[tuple[type[BaseException], str, str]] = [
        (httpx.ConnectTimeout, "no connection within", "connect_timeout_s"),
        (httpx.ReadTimeout, "nothing came for", "read_timeout_s"),
        (httpx.WriteTimeout, "nothing could be sent for", "read_timeout_s"),
        (TimeoutError, "not done within", "total_timeout_s"),
    ]
    for kind, words, name in limits:
        if isinstance(error, kind):
            value = "" if target is None else f"={getattr(target, name):g}"
            return f"{words} target.{name}{value}"
    kinds: list[tuple[type[BaseException], str]] = [
        (httpx.ConnectError, "cannot be reached"),
        (httpx.LocalProtocolError, "HTTP allows no such request; look at target.headers"),
        (httpx.RemoteProtocolError, "the connection broke off, or is not HTTP"),
        (httpx.NetworkError, "the connection was lost"),
    ]
    said = next((words for kind, words in kinds if isinstance(error, kind)), type(error).__name__)
    text = " ".join(str(error).split())
    hint = "; name its authority in target.tls_ca" if "CERTIFICATE_VERIFY_FAILED" in text else ""
    return f"{said} ({text}){hint}" if text else said


def _addresses(base_url: str) -> tuple[str, str]:
    """The server's root and its API, from an address with or without ``/v1``."""
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/")
    root = path.removesuffix("/v1")
    return (
        urlunsplit((parts.scheme, parts.netloc, root, "", "")),
        urlunsplit((parts.scheme, parts.netloc, f"{root}/v1", "", "")),
    )


def _headers(target: TargetConfig) -> dict[str, str]:
    headers = {"User-Agent": f"sm70lab/{__version__}"}
    for name, value in target.headers.items():
        headers[name] = (
            _secret(f"target.headers.{name}", value.removeprefix(ENV)) if value.startswith(ENV) else value
        )
    if target.api_key_env is not None:
        headers["Authorization"] = f"Bearer {_secret('target.api_key_env', target.api_key_env)}"
    return headers


def _secret(setting: str, variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        right = "printable ASCII without a blank at its ends, as a header must be"
        what = "not set, or empty" if not value else f"not {right}"
        raise UsageError(f"{setting}={variable}: this environment variable is {what}")
    return value


def _ssl(target: TargetConfig) -> ssl.SSLContext | bool:
    """How the server's certificate is checked, and with which one this side answers."""
    addresses = (target.base_url, target.metrics_url)
    if not any(address is not None and address.startswith("https:") for address in addresses):
        return True
    setting = "target.tls_ca"
    try:
        ca = None if target.tls_ca is None else str(Path(target.tls_ca).expanduser())
        context = ssl.create_default_context(cafile=ca)
        if not target.tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if target.tls_cert is not None:
            setting = "target.tls_cert"
            key = None if target.tls_key is None else str(Path(target.tls_key).expanduser())
            # without this a key with a passphrase would stop and ask the terminal
            context.load_cert_chain(str(Path(target.tls_cert).expanduser()), key, password=lambda: b"")
    except (OSError, ssl.SSLError, ValueError) as error:
        name = getattr(target, setting.removeprefix("target."))
        raise UsageError(f"{setting}={name}: cannot be used ({error})") from error
    return context


def _flatten(name: str, value: Any, found: dict[str, str | int | float]) -> None:
    if SECRET.search(name.rsplit(".", 1)[-1]):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}.{key}", item, found)
    elif isinstance(value, bool) or not isinstance(value, int | float | str):
        if value is not None and value != []:
            found[name] = json.dumps(value, ensure_ascii=False)[:FACT_CHARS]
    else:
        found[name] = value[:FACT_CHARS] if isinstance(value, str) else value
