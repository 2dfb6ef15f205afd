"""The trajectory API inside a run, for the scripts of that run: served here, and watched for who posts what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web
from tinker_atropos.external import GroupSink, PolicyEndpoint

from tinker_atropos_atropos.api import ApiSettings, make_app
from tinker_atropos_atropos.backend import Arrival
from tinker_atropos_atropos.roster import RegisterEnv
from tinker_atropos_atropos.script_watch import Seen
from tinker_atropos_atropos.serving import BACKLOG, bind
from tinker_atropos_atropos.sink_backend import SinkBackend

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHOWN = 400
"""Characters of a refusal that are kept."""


class Observed:
    """Who registered, and how many groups each posted. Refusals can't be told apart by poster: a refused body may not
    even say whose it is, so all environments share them."""

    def __init__(self) -> None:
        self.url = ""
        self._names: dict[int, str] = {}
        self._seen: dict[str, Seen] = {}
        self._refused, self._last_refusal = 0, ""

    def seen(self) -> Mapping[str, Seen]:
        """Return what was seen so far, by `desired_name`."""
        last = self._last_refusal or None
        return {name: replace(facts, refused=self._refused, last_refusal=last) for name, facts in self._seen.items()}

    def registered(self, name: str, number: int) -> None:
        """Note an environment."""
        self._names[number] = name
        self._seen[name] = replace(self._seen.get(name, Seen()), registered=True)

    def posted(self, number: int | None) -> None:
        """Note a group that was taken."""
        name = self._names.get(number) if number is not None else None
        for one in [name] if name is not None else list(self._seen):  # it need not say whose it is
            self._seen[one] = replace(self._seen[one], posted=self._seen[one].posted + 1)

    def refused(self, why: str) -> None:
        """Note a post that was refused."""
        self._refused += 1
        self._last_refusal = why[:SHOWN]


class ObservedBackend(SinkBackend):
    """The run's sink behind the API, telling what comes."""

    def __init__(self, sink: GroupSink, endpoint: PolicyEndpoint, observed: Observed) -> None:
        super().__init__(sink, endpoint)
        self._observed = observed

    def info(self) -> dict[str, Any]:
        """Return the run's sizes. A script drops sequences of this length as well, and that many tokens still fit."""
        told = super().info()
        return {**told, "max_token_len": told["max_token_len"] + 1}

    async def register_env(self, asked: RegisterEnv) -> dict[str, Any]:
        """Admit an environment."""
        answer = await super().register_env(asked)
        if answer.get("status") == "success":
            self._observed.registered(asked.desired_name or "env", int(answer["env_id"]))
        return answer

    async def put(self, arrivals: Sequence[Arrival], wait: float) -> list[dict[str, Any]]:
        """Hand groups to the run."""
        answers = await super().put(arrivals, wait)
        for arrival, answer in zip(arrivals, answers, strict=True):
            if "duplicate" not in answer:
                self._observed.posted(arrival.group.posted.env_id)
        return answers


@asynccontextmanager
async def serve_for_scripts(
    endpoint: PolicyEndpoint, sink: GroupSink, *, host: str, port: int
) -> AsyncIterator[Observed]:
    """Serve until the block ends. Raises `ConfigError` for an address that can't be had."""
    observed = Observed()
    listener = bind(host, port, guarded=False)
    app = make_app(ObservedBackend(sink, endpoint, observed), ApiSettings())
    app.middlewares.insert(0, _noting(observed))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, auto_decompress=False)
    try:
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        observed.url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        yield observed
    finally:
        await runner.cleanup()
        listener.close()


def _noting(observed: Observed) -> Any:
    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.method == "POST" and 400 <= answer.status < 500:
            body = answer.body if isinstance(answer, web.Response) else b""
            said = body.decode(errors="replace") if isinstance(body, bytes) else ""
            observed.refused(f"{answer.status} {said}")
        return answer

    return note
