"""Values → a strict model, or an error that names path, value, origin and what would be right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tinker_atropos.errors import ConfigError, PluginError, TinkerAtroposError, near

Model = TypeVar("Model", bound=BaseModel)

MOST_NESTED = 50
SECRET = re.compile(r"(://(?:[^/\s:@]*:)?)[^/\s]*(@)")


def validate(
    model: type[Model], values: Mapping[str, Any], *, path: str = "", origins: Mapping[str, str] | None = None
) -> Model:
    """Return `model` made of `values`; raises `ConfigError` with path, value, what is right, and the near name.

    `origins` says where each value was written, for the message. Infinities are refused but where the model writes them
    as such (`ser_json_inf_nan="constants"`); its fields then say which of them may be infinite.
    """
    infinities = model.model_config.get("ser_json_inf_nan") == "constants"
    unknown = {key: "" for key in values if key not in model.model_fields}
    if unknown:
        raise unknown_keys(path, unknown, model.model_fields)
    try:
        # Through JSON: strict there refuses `true` for a number and `"8"` for 8, yet takes text for a path.
        return model.model_validate_json(json.dumps(plain(dict(values), path, infinities=infinities)), strict=True)
    except ValidationError as error:
        problems = [_problem(path, model, entry, origins or {}) for entry in error.errors()]
        raise ConfigError("; ".join(problems)) from None
    except TinkerAtroposError:
        raise
    except Exception as error:
        raise PluginError(
            f"{path or model.__name__}: the check of these settings fails in itself: {type(error).__name__}: {error}"
        ) from error


def unknown_keys(path: str, keys: Mapping[Any, str], known: Mapping[str, Any]) -> ConfigError:
    """Return the error for a section's keys that are none of the `known`; each with the path where it exists, or ""."""
    names = list(known)
    said = [
        f"{join(path, str(key))}: unknown key." + (f" Did you mean {home!r}?" if home else near(str(key), names))
        for key, home in keys.items()
    ]
    return ConfigError(f"{' '.join(said)} Known keys: {', '.join(names) or 'none'}")


def join(path: str, key: str) -> str:
    """Return the path of a key below a path."""
    return f"{path}.{key}" if path and key else path or key


def plain(value: Any, path: str, depth: int = 0, *, infinities: bool = False) -> Any:
    """Return a value as JSON has it; raises `ConfigError` for what JSON has not (but `infinities`, if asked for)."""
    if depth > MOST_NESTED:
        raise ConfigError(f"{path}: nested more than {MOST_NESTED} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) >= 2**63:
            raise ConfigError(f"{path}: {str(value)[:20] if abs(value) < 10**4000 else 'it'}… is too large a number")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value) and not (infinities and math.isinf(value)):
            raise ConfigError(f"{path}: got {value}; expected a finite number")
        return float(value)
    if isinstance(value, str | Path):
        text = str(value)
        if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{path}: {text!r:.80} is not valid Unicode text")
        return text
    if isinstance(value, Mapping):
        return {
            str(key): plain(entry, join(path, str(key)), depth + 1, infinities=infinities)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            plain(entry, join(path, str(place)), depth + 1, infinities=infinities) for place, entry in enumerate(value)
        ]
    raise ConfigError(
        f"{path}: got {value!r:.60} ({type(value).__name__}); expected text, a number, a list or a mapping"
    )


def _problem(path: str, model: type[BaseModel], entry: Any, origins: Mapping[str, str]) -> str:
    loc = [str(part) for part in entry["loc"]]
    where = join(path, ".".join(loc)) or model.__name__
    origin = f", from {origins[loc[0]]}" if loc and loc[0] in origins else ""
    if entry["type"] == "extra_forbidden":
        return f"{where}: unknown key{origin}"
    if entry["type"] == "missing":
        return f"{where}: not given, and there is no default"
    got = entry["input"]
    # A password that stands in an address, as in redis://user:secret@host, is shown to nobody.
    whole = SECRET.sub(r"\1…\2", repr(got))
    shown = whole if len(whole) <= 60 else whole[:57] + "…"
    if entry["type"] == "value_error":  # raised by the model itself, which says all there is to say
        said = str(entry["ctx"]["error"])
        return f"{where}: {said}" if isinstance(got, Mapping) else f"{where}: {said}, got {shown}{origin}"
    message = entry["msg"][:1].lower() + entry["msg"][1:]
    quote = f"; to mean text, quote it: '\"{got}\"'" if entry["type"] == "string_type" and _scalar(got) else ""
    return f"{where}: {message}, got {shown} ({type(got).__name__}){origin}{quote}"


def _scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def check_folder_name(setting: str, name: str) -> str:
    """Return a name that a folder may have; raises `ConfigError` for any other."""
    fine = name.isprintable() and not name.startswith((".", "-")) and not set(name) & {"/", "\\"}
    if not name or not fine or name != name.strip() or len(name.encode("utf-8", "replace")) > 100:
        raise ConfigError(
            f"{setting}: {name!r:.120} can't name a folder; use letters, digits, '-' and '_', 100 at most"
        )
    return name
