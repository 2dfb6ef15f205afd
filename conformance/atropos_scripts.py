"""`make conformance`: upstream Atropos scripts, unmodified, each train two steps through the one command.

`ATROPOS_CHECKOUT=/path/to/atropos` names a checkout (296a0bc, or the sources of atroposlib 0.4.0 with `environments/`);
without it nothing is run. The scripts run in an interpreter of their own, which is built with the pins they need
(`ATROPOS_PYTHON=/path/to/venv` takes one that is there). Nothing of theirs is changed or kept.

Replaced is only what can't be had without a hub: the data sets (`atropos_data`), by folders that shadow the hub's
names, and what the model says (`atropos_answers`), since a small model's equal scores would make a script drop every
group. The log-probabilities of what is said, and the training on it, are the model's.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the modules beside this one

EXTRA_PINS = ("reasoning_gym==0.1.25",)
STEPS, GROUP, BATCH = 2, 4, 8
CONTEXT = 16384
"""Tokens: the tiny model's are bytes, and the tool prompts are long."""
CASE_SECONDS = 900
TURN_ENDS = "{{ '<|im_end|>' + '\n' }}"
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}ENDS{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHAT.replace("ENDS", TURN_ENDS),
    # A last message of the agent's stays open. One script begins the agent's message itself and samples its rest. Under
    # plain ChatML that message is closed before anything is sampled, so that what is posted later is not what the
    # policy continued: it would all be unproven, and is then masked.
    "open agent": CHAT.replace("ENDS", "{% if not (loop.last and m['role'] == 'agent') %}" + TURN_ENDS + "{% endif %}"),
}


@dataclass(frozen=True)
class Case:
    """One run. `scripts` below `environments/`; `arguments` for the scripts, `{data}` being the folder of data sets."""

    name: str
    covers: str
    scripts: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    template: str = "chatml"
    steps: int = STEPS
    least_proven: float = 0.99
    """Of the tokens that the script wants trained, the least share that the endpoints know to have sampled."""


CASES = (
    Case("gsm8k", "bare configuration, managed chat", ("gsm8k_server.py",)),
    Case("math", "overrides, sglang", ("math_server.py",)),
    Case("regex", "managed chat", ("community/regex_generation/regex_env.py",)),
    Case(
        "reasoning_gym",
        "managed completion, overrides",
        ("reasoning_gym_environment/reasoning_gym_environment.py",),
        settings=("env.max_token_length=12288",),
    ),
    Case("tool_calling", "tool calls as JSON, managed completion", ("tool_calling_server.py",)),
    Case(
        "gym_taxi",
        "multi-turn, no log-probabilities",
        ("game_environments/gymnasium/gym_taxi.py",),
        least_proven=0.6,  # the whole conversation is tokenized anew, which need not give what was sampled
    ),
    Case(
        "blackjack_thinking",
        "lists of groups, no log-probabilities",
        ("game_environments/gymnasium/blackjack/blackjack_env_thinking.py",),
        template="open agent",
        least_proven=0.6,  # as above, with thoughts cut
    ),
    Case(
        "word_hunt",
        "raw completion, no name, no log-probabilities",
        ("community/word_hunt/word_hunt_env.py",),
        arguments=("--env.dictionary_path", "{data}/words.txt"),
        least_proven=0.9,  # as above
    ),
    Case(
        "gsm8k+regex",
        "two scripts",
        ("gsm8k_server.py=2", "community/regex_generation/regex_env.py=1"),
        steps=6,  # the one that starts sooner fills the first two
    ),
)


@dataclass
class Outcome:
    """What a case left."""

    case: Case
    code: int
    seconds: float
    steps: int = 0
    groups: Counter[str] = field(default_factory=Counter)  # by what became of them
    tokens: Counter[str] = field(default_factory=Counter)  # trained, and masked by reason
    wanted: Counter[str] = field(default_factory=Counter)  # tokens of all groups: proven, unproven
    scripts: Counter[str] = field(default_factory=Counter)  # groups that were trained on, by script
    said: str = ""

    @property
    def passed(self) -> bool:
        """Whether it trained its steps, on something of every script, and enough of all that came was proven."""
        all_took_part = len(self.scripts) == len(self.case.scripts)
        enough = self.tokens["trained"] > 0 and self.proven >= self.case.least_proven
        return self.code == 0 and self.steps == self.case.steps and enough and all_took_part

    @property
    def proven(self) -> float:
        """The share of the tokens wanted that is proven, 0 where none came."""
        return self.wanted["proven"] / max(1, self.wanted.total())


class ScriptedSampler:
    """A fake: a policy that says what `atropos_answers` chooses. What it scores, it scores with the real policy."""

    turns = 0

    def __init__(self, policy: Any, draw: random.Random) -> None:
        self._policy, self._draw = policy, draw
        self.ref, self.context_length = policy.ref, policy.context_length

    def tokenizer(self) -> Any:
        return self._policy.tokenizer()

    async def sample(self, prompt: Any, params: Any, n: int) -> list[Any]:
        text = self.tokenizer().decode(prompt.tolist())
        places = range(n)
        if n == 1:  # one at a time they take turns
            ScriptedSampler.turns += 1
            places = range(ScriptedSampler.turns, ScriptedSampler.turns + 1)
        return [await self._scored(text, prompt, params, place) for place in places]

    async def _scored(self, text: str, prompt: Any, params: Any, place: int) -> Any:
        import numpy as np
        from tinker_atropos import Sample

        from conformance.atropos_answers import answer

        tokenizer = self.tokenizer()
        chosen = tokenizer.encode(answer(text, place, self._draw), add_special_tokens=False)
        whole = [*chosen, tokenizer.eos_token_id]
        tokens = np.asarray(whole[: params.max_tokens], np.int32)
        logprobs = await self._policy.logprobs(np.concatenate([prompt, tokens]))
        reason: Any = "stop" if len(tokens) == len(whole) else "length"
        return Sample(tokens, logprobs[len(prompt) :].astype(np.float32), reason, self.ref)

    async def logprobs(self, tokens: Any) -> Any:
        return await self._policy.logprobs(tokens)


def run_with_scripted_sampler(arguments: Sequence[str]) -> None:
    """Be `tinker-atropos`, but for what the policy of the trainer `tinker` says."""
    import tinker_atropos_tinker
    from tinker_atropos.cli import main

    opened = tinker_atropos_tinker._open_policy
    draw = random.Random(0)

    async def scripted(ref: Any, config: Any) -> Any:
        return ScriptedSampler(await opened(ref, config), draw)

    tinker_atropos_tinker._open_policy = scripted
    main(list(arguments))


def write_model(folder: Path, template: str) -> None:
    from tinker_atropos_local_tinker.tiny_model import make_tokenizer, write_tiny_model

    write_tiny_model(folder, context=CONTEXT)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def build_interpreter(folder: Path) -> Path:
    """Return a virtual environment with what the scripts need."""
    given = os.environ.get("ATROPOS_PYTHON")
    if given:
        return Path(given)
    from tinker_atropos_atropos.script_interpreter import PINS

    print(f"building an interpreter for the scripts: {', '.join((*PINS, *EXTRA_PINS))}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *PINS, *EXTRA_PINS], check=True)
    return folder


def command(case: Case, checkout: Path, python: Path, folder: Path) -> list[str]:
    """Return the arguments of `tinker-atropos`."""
    data = folder / "data"
    arguments = [argument.format(data=data) for argument in case.arguments]
    settings = [
        f"env.python={python}",
        f"env.cwd={data}",
        "env.steps_per_eval=0",
        f"env.max_token_length={CONTEXT - 1024}",
        *case.settings,
        *([f"env.args=[{', '.join(arguments)}]"] if arguments else []),
    ]
    line = ["run", "--trainer", "tinker", "--local", "--yes", "--steps", str(case.steps)]
    line += ["--group-size", str(GROUP), "--batch-size", str(BATCH), "--lora-rank", "8", "--seed", "1"]
    line += [
        "--model",
        str(folder / "models" / case.template.replace(" ", "-")),
        "--output",
        str(folder / "runs"),
        "--name",
        case.name,
    ]
    for script in case.scripts:
        line += ["--env", f"atropos:{checkout / 'environments' / script}"]
    keys = [setting.partition("=")[0] for setting in settings]
    for place, setting in enumerate(settings):
        if keys[place] not in keys[place + 1 :]:  # a case's own go before what all have
            line += ["--set", setting]
    return line


def run_case(case: Case, checkout: Path, python: Path, folder: Path) -> Outcome:
    arguments = command(case, checkout, python, folder)
    log = folder / f"{case.name}.log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # the checkout stays as it is
    environment |= {"HF_DATASETS_CACHE": str(folder / "cache")}
    began = time.monotonic()
    with log.open("wb") as output:
        output.write(f"tinker-atropos {shlex.join(arguments)}\n".encode())
        output.flush()
        try:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--be-tinker-atropos", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CASE_SECONDS,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
    outcome = Outcome(case, code, time.monotonic() - began)
    outcome.said = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    read_run(folder / "runs" / case.name, outcome)
    return outcome


def read_run(folder: Path, outcome: Outcome) -> None:
    """Count what a run's own records say."""
    from tinker_atropos.rollout.records import read_records
    from tinker_atropos.run_folder import RunFolder

    if not folder.is_dir():
        return
    outcome.steps = int(max((row["step"] for row in RunFolder(folder).read_metrics()), default=0))
    for path in sorted((folder / "rollouts").glob("*.jsonl.gz")):
        for record in read_records(path):
            trained = record["outcome"] == "trained"
            outcome.groups["trained" if trained else record["reason"] or record["outcome"]] += 1
            if trained:
                outcome.scripts[record["task"]["split"]] += 1
            for trajectory in record["trajectories"]:
                sampled = sum(sum(segment["mask"]) for segment in trajectory["segments"])
                outcome.wanted.update(proven=sampled, unproven=trajectory["masked"].get("unproven", 0))
                if trained:
                    outcome.tokens["trained"] += sampled
                outcome.tokens.update({f"masked: {reason}": n for reason, n in trajectory["masked"].items()})


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [("script", "what it covers", "", "s", "steps", "proven", "groups", "tokens")]
    for outcome in outcomes:
        posted = sum(outcome.groups.values())
        by = ""
        if len(outcome.scripts) > 1:
            by = f" ({', '.join(f'{n} of {name}' for name, n in sorted(outcome.scripts.items()))})"
        groups = f"{posted} posted: " + ", ".join(f"{n} {what}" for what, n in sorted(outcome.groups.items())) + by
        tokens = ", ".join(f"{n:,} {what}" for what, n in sorted(outcome.tokens.items(), reverse=True))
        verdict = "ok" if outcome.passed else f"FAIL ({outcome.code})"
        seconds = f"{outcome.seconds:.0f}"
        proven = f"{outcome.proven:.0%} (≥ {outcome.case.least_proven:.0%})"
        case = outcome.case
        rows.append((case.name, case.covers, verdict, seconds, str(outcome.steps), proven, groups, tokens))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def not_run() -> str:
    """Say what was not run, and how it would be."""
    lines = [f"SKIPPED {len(CASES)} of {len(CASES)} Atropos scripts: ATROPOS_CHECKOUT names no checkout of Atropos"]
    lines += [f"SKIPPED {case.name}: {case.covers}; {', '.join(case.scripts)}" for case in CASES]
    return "\n".join([*lines, "to run them: ATROPOS_CHECKOUT=/path/to/atropos make conformance"])


def main() -> int:
    if sys.argv[1:2] == ["--be-tinker-atropos"]:
        run_with_scripted_sampler(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description="Run unmodified Atropos scripts through tinker-atropos.")
    parser.add_argument("--only", help="names of cases, with commas")
    parser.add_argument("--folder", type=Path, help="keep everything here")
    options = parser.parse_args()
    given = os.environ.get("ATROPOS_CHECKOUT")
    if not given:
        print(not_run())
        return 0
    checkout = Path(given).resolve()
    if not (checkout / "environments" / "gsm8k_server.py").is_file():
        print(f"error: ATROPOS_CHECKOUT={given}: there is no environments/gsm8k_server.py in it", file=sys.stderr)
        return 2
    wanted = options.only.split(",") if options.only else [case.name for case in CASES]
    unknown = sorted(set(wanted) - {case.name for case in CASES})
    if unknown:
        print(f"error: --only {unknown[0]!r}: known are {', '.join(case.name for case in CASES)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return run_all([case for case in CASES if case.name in wanted], checkout, folder)


def run_all(cases: Sequence[Case], checkout: Path, folder: Path) -> int:
    from conformance import atropos_data

    atropos_data.write(folder / "data")
    for name in {case.template for case in cases}:
        write_model(folder / "models" / name.replace(" ", "-"), TEMPLATES[name])
    python = build_interpreter(folder / "scripts-venv")
    outcomes = []
    for case in cases:
        outcomes.append(run_case(case, checkout, python, folder))
        if outcomes[-1].passed:
            print(f"ok   {case.name} in {outcomes[-1].seconds:.0f} s", flush=True)
        else:
            print(f"FAIL {case.name}\n{outcomes[-1].said}", flush=True)
    print("\n" + table(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
