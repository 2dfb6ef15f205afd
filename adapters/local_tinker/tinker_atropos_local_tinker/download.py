"""Brings a checkpoint from a local server as a PEFT adapter, of training, sampler and exported weights alike.

The SDK itself only downloads exported weights (`save_weights_external`), which this server serves too; this is the way
without a detour, for what `tinker://` path there is.
"""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

from tinker_atropos.errors import CheckpointError

from tinker_atropos_local_tinker.store import split_path

SECONDS = 60.0


def download_checkpoint(url: str, tinker_path: str, to: Path) -> Path:
    """Fetch `adapter_config.json` and `adapter_model.safetensors` of `tinker_path` from the server at `url` into `to`.

    Returns `to`, which `peft.PeftModel.from_pretrained(base_model, to)` loads. Raises `CheckpointError`.
    """
    model_id, kind, name = split_path(tinker_path)
    listing = f"{url}/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls"
    try:
        with urllib.request.urlopen(listing, timeout=SECONDS) as reply:
            files: dict[str, str] = json.load(reply)["urls"]
        to.mkdir(parents=True, exist_ok=True)
        for file, address in files.items():
            draft = to / f".{file}.part"
            with urllib.request.urlopen(address, timeout=SECONDS) as reply, draft.open("wb") as out:
                shutil.copyfileobj(reply, out)
            draft.replace(to / file)
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")
        raise CheckpointError(f"{tinker_path} can't be downloaded: {_detail(detail)}") from error
    except OSError as error:
        raise CheckpointError(f"{tinker_path} can't be downloaded from {url} to {to}: {error}") from error
    return to


def _detail(body: str) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body[:200]
