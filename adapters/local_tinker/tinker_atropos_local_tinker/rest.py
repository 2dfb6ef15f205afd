"""The read side of the API: runs, checkpoints and their files, as the SDK's RestClient and its CLI ask for them."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker.answers import NotFound
from tinker_atropos_local_tinker.fields import read_json, ttl_seconds
from tinker_atropos_local_tinker.records import PREFIX, Checkpoint, Run
from tinker_atropos_local_tinker.service import Service
from tinker_atropos_local_tinker.store import PEFT_FILES

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
URL_SECONDS = 3600


def add_routes(app: web.Application, service: Service) -> None:
    """Add the routes of this module."""
    rest = _Rest(service)
    runs = "/api/v1/training_runs"
    checkpoint = runs + "/{run}/checkpoints/{kind}/{name}"
    app.add_routes(
        [
            web.get("/api/v1/get_server_capabilities", rest.capabilities),
            web.post("/api/v1/weights_info", rest.weights_info),
            web.get(runs, rest.runs),
            web.get(runs + "/{run}", rest.run),
            web.get(runs + "/{run}/checkpoints", rest.checkpoints),
            web.get("/api/v1/checkpoints", rest.checkpoints),
            web.delete(checkpoint, rest.delete),
            web.put(checkpoint + "/ttl", rest.set_ttl),
            web.get(checkpoint + "/external_weights_urls", rest.urls),
            web.get(checkpoint + "/archive", rest.archive),
            web.get("/api/v1/files/{run}/{kind}/{name}/{file}", rest.file),
            web.get("/api/v1/sessions", rest.sessions),
            web.get("/api/v1/sessions/{session}", rest.session),
        ]
    )


class _Rest:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store

    async def capabilities(self, request: web.Request) -> web.Response:
        base = self._service.base
        model = {
            "model_name": base.name,
            "max_context_length": base.context,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def weights_info(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        found = await asyncio.to_thread(self._store.find, str(body.get("tinker_path")))
        lora = found.lora
        fields: dict[str, Any] = {"base_model": found.base_model, "is_lora": True, "lora_rank": lora["rank"]}
        fields.update({key: lora.get(key, True) for key in ("train_attn", "train_mlp", "train_unembed")})
        return web.json_response(fields)

    async def runs(self, request: web.Request) -> web.Response:
        runs = await asyncio.to_thread(self._store.runs)
        page, cursor = _page(request, runs)
        described = [await asyncio.to_thread(self._describe_run, run) for run in page]
        return web.json_response({"training_runs": described, "cursor": cursor})

    async def run(self, request: web.Request) -> web.Response:
        run = await asyncio.to_thread(self._find_run, request.match_info["run"])
        return web.json_response(await asyncio.to_thread(self._describe_run, run))

    async def checkpoints(self, request: web.Request) -> web.Response:
        model_id = request.match_info.get("run")
        if model_id is not None:
            self._find_run(model_id)
        found = await asyncio.to_thread(self._store.checkpoints, model_id)
        if model_id is not None:
            return web.json_response({"checkpoints": [_describe(c) for c in found]})
        page, cursor = _page(request, found[::-1])
        return web.json_response({"checkpoints": [_describe(c) for c in page], "cursor": cursor})

    async def delete(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._store.delete, self._find(request))
        return web.Response(status=204)

    async def set_ttl(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        seconds = ttl_seconds(body)
        expires = None if seconds is None else time.time() + seconds
        await asyncio.to_thread(self._store.set_expiry, self._find(request), expires)
        return web.Response(status=204)

    async def urls(self, request: web.Request) -> web.Response:
        """Answer with a URL per file of the PEFT adapter: for every kind of checkpoint, not only exported ones."""
        found = self._find(request)
        files = f"http://{request.host}/api/v1/files/{found.model_id}/{found.kind}/{found.name}"
        expires = datetime.now(UTC) + timedelta(seconds=URL_SECONDS)
        return web.json_response(
            {"urls": {name: f"{files}/{name}" for name in PEFT_FILES}, "expires": expires.isoformat()}
        )

    async def file(self, request: web.Request) -> web.FileResponse:
        found, name = self._find(request), request.match_info["file"]
        if name not in PEFT_FILES:
            raise NotFound(f"{found.path} has no file {name!r}; it has {', '.join(PEFT_FILES)}")
        return web.FileResponse(self._store.files(found) / name)

    async def archive(self, request: web.Request) -> web.Response:
        """Answer with a tar of the PEFT adapter: what SDKs before 0.38 and plain HTTP clients ask for."""
        found = self._find(request)
        body = await asyncio.to_thread(self._tar, found)
        headers = {"Content-Disposition": f'attachment; filename="{found.name}.tar"'}
        return web.Response(body=body, content_type="application/x-tar", headers=headers)

    def _tar(self, checkpoint: Checkpoint) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name in PEFT_FILES:
                tar.add(self._store.files(checkpoint) / name, arcname=name)
        return buffer.getvalue()

    async def sessions(self, request: web.Request) -> web.Response:
        page, _ = _page(request, list(self._service.sessions)[::-1])
        return web.json_response({"sessions": page})

    async def session(self, request: web.Request) -> web.Response:
        session = self._service.sessions.get(request.match_info["session"])
        if session is None:
            raise NotFound(f"no session {request.match_info['session']!r} is open here")
        runs = [lane.model_id for lane in self._service.training.lanes() if lane.session_id == session.session_id]
        return web.json_response(
            {
                "training_run_ids": runs,
                "sampler_ids": self._service.samplers.ids(session.session_id),
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    def _find(self, request: web.Request) -> Checkpoint:
        match = request.match_info
        return self._store.find(f"{PREFIX}{match['run']}/{match['kind']}/{match['name']}")

    def _find_run(self, model_id: str) -> Run:
        run = self._store.run(model_id)
        if run is None:
            raise NotFound(f"no training run {model_id!r} in this store")
        return run

    def _describe_run(self, run: Run) -> dict[str, Any]:
        found = self._store.checkpoints(run.model_id)
        newest = {c.kind: c for c in found}
        last = max([run.created, *(c.created for c in found)])
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": run.lora["rank"],
            "last_request_time": _iso(last),
            "last_checkpoint": _describe(newest["weights"]) if "weights" in newest else None,
            "last_sampler_checkpoint": _describe(newest["sampler_weights"]) if "sampler_weights" in newest else None,
            "user_metadata": run.user_metadata,
        }


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _iso(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else _iso(checkpoint.expires),
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: web.Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    try:
        limit, offset = int(request.query.get("limit", "100")), int(request.query.get("offset", "0"))
    except ValueError as error:
        raise UserError(f"limit and offset are whole numbers: {error}") from error
    if limit < 0 or offset < 0:
        raise UserError("limit and offset are not negative")
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
