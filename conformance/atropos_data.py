"""Rows in the shape of the data sets that the upstream scripts ask a hub for, in folders that shadow the hub's names.

`datasets` takes a folder below the current one for the data set of that name, so nothing of a script is changed. The
rows are made here: small sums, and tool calls about the weather.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]

SUMS = [(a, b) for a in range(2, 22) for b in range(3, 13)]
CITIES = [
    f"{first}{second}"
    for first in ("Nor", "Sud", "Ost", "Ven", "Kal", "Mar")
    for second in (
        "berg",
        "dorf",
        "ham",
        "ville",
        "holm",
        "stad",
        "ford",
        "mouth",
        "bridge",
        "haven",
        "minster",
        "wick",
        "field",
        "gate",
        "cliff",
        "brook",
        "shore",
        "mill",
        "wood",
        "hill",
    )
]


def question(a: int, b: int) -> str:
    return f"What is {a} plus {b}?"


def write(folder: Path) -> None:
    """Write every data set into `folder`."""
    gsm8k = [{"question": question(a, b), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in SUMS]
    problems = [{"problem": question(a, b), "answer": str(a + b)} for a, b in SUMS[:4]]
    data_set(folder / "gsm8k", {"main": {"train": gsm8k[8:], "test": gsm8k[:8]}})
    deep = [{"question": question(a, b), "final_answer": str(a + b)} for a, b in SUMS]
    data_set(folder / "zwhe99" / "DeepMath-103K", {"default": {"train": deep}})
    data_set(folder / "HuggingFaceH4" / "aime_2024", {"default": {"train": problems}})
    data_set(folder / "HuggingFaceH4" / "math-500", {"default": {"test": problems}})
    amc = [{"question": row["problem"], "answer": row["answer"]} for row in problems]
    data_set(folder / "math-ai" / "amc23", {"default": {"test": amc}})
    data_set(folder / "NousResearch" / "XLAM-Atropos", {"default": {"train": [weather(city) for city in CITIES]}})
    # A dictionary in which every three letters are a word: what stands in a row of a board then is one.
    words = "".join("".join(letters) + "\n" for letters in itertools.product(string.ascii_uppercase, repeat=3))
    (folder / "words.txt").write_text(words, encoding="utf-8")


def weather(city: str) -> dict[str, Any]:
    tools = '[{"name": "weather", "parameters": {"city": {"type": "string"}}}]'
    return {
        "conversations": [
            {"from": "system", "value": f"You may call these tools: <tools>{tools}</tools>"},
            {"from": "human", "value": f"How is the weather in {city}?"},
            {"from": "gpt", "value": f"<tool_call>\n{weather_call(city)}\n</tool_call>"},
        ]
    }


def weather_call(city: str) -> str:
    return json.dumps({"name": "weather", "arguments": {"city": city}})


def data_set(folder: Path, configurations: Mapping[str, Mapping[str, Rows]]) -> None:
    """Write one data set: a file of JSON lines for each split, and the card that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    card = ["---", "configs:"]
    for name, splits in configurations.items():
        card += [f"- config_name: {name}", "  data_files:"]
        for split, rows in splits.items():
            file = f"{name}-{split}.jsonl"
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            card += [f"  - split: {split}", f"    path: {file}"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")
