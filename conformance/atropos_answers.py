"""Scripted completions for the upstream scripts: of every group some are right and some are wrong.

A small model would answer all of a group wrong, and several scripts then drop the group. What is chosen here is text
alone; its log-probabilities come from the model.
"""

from __future__ import annotations

import ast
import json
import random
import re

from conformance.atropos_data import weather_call

GUESS = " ".join([*(str(n) for n in range(30)), "yes no true false True False A B C D E a b c d e red blue"])


def answer(prompt: str, place: int, draw: random.Random) -> str:
    """Return the completion of `prompt`; the even `place` of a group is right where that can be known."""
    right = place % 2 == 0
    for mark, reply in (
        ("Strings that SHOULD match:", regex),
        ("take_action", blackjack),
        ("Available actions:", taxi),
        ("letter grid", word_hunt),
        ("How is the weather in ", tool_call),
        (" plus ", sums),
    ):
        if mark in prompt:
            return reply(prompt, right, draw)
    return reasoning(prompt, right, draw)


def sums(prompt: str, right: bool, draw: random.Random) -> str:
    a, b = re.findall(r"What is (\d+) plus (\d+)\?", prompt)[-1]
    total = int(a) + int(b) + (0 if right else draw.randint(1, 9))
    return f"<think>\nI add {a} and {b}.\n</think>\n\nThe answer is \\boxed{{{total}}}."


def tool_call(prompt: str, right: bool, draw: random.Random) -> str:
    city = re.findall(r"How is the weather in (\w+)\?", prompt)[-1]
    call = weather_call(city if right else f"{city}{draw.choice('xyz')}")
    return f"<think>\nThe user asks for the weather.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def regex(prompt: str, right: bool, draw: random.Random) -> str:
    listed = prompt.rpartition("Strings that SHOULD match:")[2].partition("Strings that should NOT match:")[0]
    wanted = [ast.literal_eval(text) for text in re.findall(r"^  - (.+)$", listed, re.MULTILINE)]
    pattern = "|".join(re.escape(text) for text in wanted) if right else draw.choice(("x+", "[0-9]", "q?"))
    return f"<think>\nI list what must match.\n</think>\n\n<answer>{pattern}</answer>"


def blackjack(prompt: str, right: bool, draw: random.Random) -> str:
    if not right and draw.random() < 0.3:
        return "I can not decide what to do with this hand."
    call = json.dumps({"arguments": {"action": draw.choice(("hit", "stick"))}, "name": "take_action"})
    return f"The hand decides.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def taxi(prompt: str, right: bool, draw: random.Random) -> str:
    listed = prompt.rpartition("Available actions:")[2]
    actions = re.findall(r"- (\d): ", listed)
    turns = prompt.count("Available actions:")
    if turns > 3 or not actions:
        return "I stop here: 9"
    if "3" in actions and draw.random() < 0.5:  # this script counts action 3 as half a success
        return "3"
    return draw.choice(actions) if draw.random() < 0.7 else "9"


def word_hunt(prompt: str, right: bool, draw: random.Random) -> str:
    rows = re.findall(r"^((?:[A-Z] ){3}[A-Z])$", prompt, re.MULTILINE)
    words = [row.replace(" ", "")[at : at + 3] for row in rows for at in (0, 1)]
    return f"I found these words: {', '.join(words if right else words[:1])}"


def reasoning(prompt: str, right: bool, draw: random.Random) -> str:
    if not right:
        return "I do not know how to answer this question."
    return f"<think>\nIt may be one of these.\n</think>\n<answer>{GUESS}</answer>"
