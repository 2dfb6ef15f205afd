"""A configuration is what file and overrides say, no more and no less."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator
from tinker_atropos import (
    AdapterConfig,
    AdapterSpec,
    ConfigError,
    EnvironmentConfig,
    EnvironmentSpec,
    PluginError,
    Task,
    TrainerConfig,
    TrainerSpec,
    single_turn,
)
from tinker_atropos.cli.run import describe
from tinker_atropos.config import Config, load, parse_assignment, validate
from tinker_atropos.registry import Registry
from tinker_atropos.trainer import Quote
from tinker_atropos.yaml_file import parse_value, read_yaml, write_yaml


class Nested(BaseModel):
    model_config = {"extra": "forbid"}
    depth: int = 1


class SumsConfig(EnvironmentConfig):
    dataset: str = "small"
    difficulty: int = 1
    stops: tuple[str | int, ...] = ()
    nested: Nested = Nested()
    folder: Path | None = None

    @field_validator("difficulty")
    @classmethod
    def _known(cls, value: int) -> int:
        if value == 13:
            raise RuntimeError("the plugin's own bug")
        return value


class LoraConfig(TrainerConfig):
    lora_rank: int = 32
    learning_rate: float | None = None
    local: bool = False
    wandb_project: str | None = None
    betas: dict[str, float] = Field({"one": 0.9})


class ChatConfig(AdapterConfig):
    template_kwargs: dict[str, Any] = Field({})


def nothing(*_: Any) -> Any:
    raise AssertionError("a configuration builds nothing")


@pytest.fixture
def registry() -> Registry:
    registry = Registry(points=[])
    registry.add(
        "env",
        EnvironmentSpec(
            name="Sums",
            make=nothing,
            config=SumsConfig,
            defaults={"env.group_size": 4, "env.batch_size": 8, "trainer.learning_rate": 1e-3, "other_trainer.x": 1},
        ),
    )
    registry.add("env", EnvironmentSpec(name="walker", make=nothing, kind="control"))
    registry.add("env", EnvironmentSpec(name="pictures", make=nothing, needs=frozenset({"images"})))
    registry.add(
        "trainer",
        TrainerSpec(
            name="lora",
            make=nothing,
            open_policy=nothing,
            kinds=frozenset({"text"}),
            config=LoraConfig,
            unused=lambda config: {"wandb_project": "not built"} if config.wandb_project is not None else {},
            default_model=lambda config: "tiny" if config.local else "large",
            defaults={"env.group_size": 2, "env.steps_per_eval": 7},
        ),
    )
    registry.add("adapter", AdapterSpec(name="managed_server", make=nothing, config=ChatConfig, sessions=True))
    return registry


Resolve = Callable[..., Config]


@pytest.fixture
def resolve(registry: Registry, tmp_path: Path) -> Resolve:
    """Resolve a file (as text) and assignments, with environment and trainer given."""

    def make(text: str = "", *assignments: str, base: Any = None, plugins: bool = True, **short: Any) -> Config:
        path = None
        if text:
            path = tmp_path / "run.yaml"
            path.write_text(text)
        given = [("run.env", "sums", "--env"), ("run.trainer", "lora", "--trainer")] if plugins else []
        overrides = [*given, *(parse_assignment(assignment) for assignment in assignments)]
        overrides += [(path.replace("__", "."), value, f"--{path}") for path, value in short.items()]
        return load(path, overrides, registry=registry, base=base)

    return make


def error(resolve: Resolve, *arguments: str, **named: Any) -> str:
    with pytest.raises((ConfigError, PluginError)) as raised:
        resolve(*arguments, **named)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_overrides_beat_the_file_beats_plugin_defaults_beat_model_defaults(resolve: Resolve) -> None:
    config = resolve("env: {total_steps: 9, batch_size: 12}\nlora: {lora_rank: 4}\n", "env.total_steps=11")
    assert (config.env.total_steps, config.env.batch_size, config.env.group_size) == (11, 12, 4)
    assert (config.env.steps_per_eval, config.env.max_num_workers) == (7, -1)
    assert (config.trainer.lora_rank, config.trainer.learning_rate) == (4, 1e-3)
    origins = {key: config.origins[f"env.{key}"].rpartition("/")[2] for key in type(config.env).model_fields}
    assert origins["total_steps"] == "--set env.total_steps"
    assert origins["batch_size"] == "run.yaml"
    assert origins["group_size"] == "suits Sums"
    assert origins["steps_per_eval"] == "suits lora"
    assert origins["max_num_workers"] == "default"


def test_a_users_value_beats_a_default_that_is_spelled_otherwise(resolve: Resolve) -> None:
    assert resolve("lora: {learning_rate: 0.5}\n").trainer.learning_rate == 0.5
    assert resolve("trainer: {learning_rate: 0.5}\n").trainer.learning_rate == 0.5


def test_max_staleness_comes_from_max_batches_offpolicy(resolve: Resolve) -> None:
    assert resolve("env: {max_batches_offpolicy: 3}").max_staleness == 3
    assert resolve("env: {max_batches_offpolicy: 3}\nrollout: {max_staleness: 0}").max_staleness == 0


def test_nested_lists_floats_and_null_come_through_set(resolve: Resolve) -> None:
    config = resolve(
        "managed_server: {template_kwargs: {a: {b: 1, c: 2}}}\nsums: {stops: [x]}\nlora: {learning_rate: 1}\n",
        "managed_server.template_kwargs.a.b=5",
        "managed_server.template_kwargs.d=[1, two]",
        "env.stops=[a, 7]",
        "env.nested.depth=3",
        "trainer.learning_rate=null",
        "trainer.betas.two=1e-4",
    )
    assert config.adapter.template_kwargs == {"a": {"b": 5, "c": 2}, "d": [1, "two"]}
    assert config.environment.stops == ("a", 7)
    assert config.environment.nested.depth == 3
    assert config.trainer.learning_rate is None
    assert config.trainer.betas == {"two": 1e-4}


def test_a_key_inside_a_mapping_keeps_what_the_file_says_under_the_sections_other_name(resolve: Resolve) -> None:
    config = resolve("lora: {betas: {one: 0.5}}\n", "trainer.betas.two=0.25")
    assert config.trainer.betas == {"one": 0.5, "two": 0.25}


def test_sections_compare_like_plugin_names(resolve: Resolve) -> None:
    config = resolve("Managed-Server: {template_kwargs: {a: 1}}\nENV: {total_steps: 3}\n", "LORA.lora_rank=2")
    assert (config.env.total_steps, config.trainer.lora_rank) == (3, 2)
    assert config.adapter.template_kwargs == {"a": 1}


@pytest.mark.parametrize(
    ("text", "assignment", "says"),
    [
        ("env: {group_sise: 4}", "", "env.group_sise: unknown key. Did you mean 'group_size'?"),
        ("", "env.Group-Size=4", "Did you mean 'group_size'?"),
        ("", "ENV.GROUP_SIZE=4", "Did you mean 'group_size'?"),
        ("envv: {group_size: 4}", "", "envv: unknown section. Did you mean 'env'?"),
        ("lor:\n", "", "lor: unknown section. Did you mean 'lora'?"),
        ("lor: {}\n", "", "lor: unknown section"),
        ("", "env.lora_rank=4", "Did you mean 'lora.lora_rank'?"),
        ("", "sums.group_size=4", "Did you mean 'env.group_size'?"),
        ("", "trainer.rank=4", "trainer.rank: unknown key"),
        ("", "managed_server.x=4", "managed_server.x: unknown key"),
        ("", "services.x=4", "services.x: unknown key"),
        ("", "env.nested.dept=4", "sums.nested.dept: unknown key"),
        ("", "env.=4", "expected section.key, got 'env.'"),
        ("", "env.group_size.x=4", "env.group_size: input should be a valid integer"),
        ("openai: {model: x}", "", "Did you mean 'model_name'?"),
        ("openai: [{model_name: x}, {model: x}]", "", "openai.1.model: unknown key"),
        ("openai: [3]", "", "openai.0: expected a mapping of keys"),
        ("env: 3", "", "env: expected a section of keys, got 3"),
        ("trainer: lora", "", "to choose a plugin write run.trainer"),
        ("slurm: yes please", "", "slurm: expected true or false"),
        ("", "slurm.nodes=4", "slurm is true or false and has no keys"),
        ("env: {total_steps: 3}\nEnv: {group_size: 2}", "", "stands twice"),
    ],
)
def test_what_is_unknown_is_refused_with_path_and_near_name(
    resolve: Resolve, text: str, assignment: str, says: str
) -> None:
    assert says in error(resolve, text, *([assignment] if assignment else []))


@pytest.mark.parametrize("text", ["", "lora_rank=8", "=8", "tinker.lora_rank", "env=gsm8k"])
def test_an_assignment_needs_a_path_and_a_value(text: str) -> None:
    with pytest.raises(ConfigError, match="expected section"):
        parse_assignment(text)


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("env.total_steps=true", "env.total_steps: input should be a valid integer, got True (bool)"),
        ('env.total_steps="8"', "got '8' (str), from --set env.total_steps"),
        ("env.total_steps=8.0", "got 8.0 (float)"),
        ("env.total_steps=null", "got None (NoneType)"),
        ("env.total_steps=-1", "greater than or equal to 1"),
        ("env.total_steps=0", "greater than or equal to 1"),
        ("env.total_steps=99999999999999999999", "is too large a number"),
        (f"env.total_steps={'9' * 5000}", "input should be a valid integer"),
        ("env.use_wandb=1", "valid boolean, got 1 (int)"),
        ("env.max_num_workers=0", "use -1 for as many"),
        ("rollout.top_k=0", "use -1 for all"),
        ("rollout.temperature=.nan", "got nan; expected a finite number"),
        ("rollout.temperature=-.inf", "got -inf; expected a finite number"),
        ("rollout.context_overflow=crash", "'truncate' or 'drop'"),
        ("env.difficulty=a", "sums.difficulty: input should be a valid integer, got 'a' (str)"),
        ("env.difficulty=13", "the check of these settings fails in itself: RuntimeError: the plugin's own bug"),
        ("env.dataset=42", "to mean text, quote it: '\"42\"'"),
        ("env.stops=[1, .nan]", "sums.stops.1: got nan"),
        ("env.dataset=!!binary aGk=", "sums.dataset: got b'hi' (bytes)"),
        ("trainer.save_checkpoint_interval=-1", "lora.save_checkpoint_interval"),
        ("run.name=a/b", "can't name a folder"),
        ("run.name='..'", "can't name a folder"),
        ("run.name='-x'", "can't name a folder"),
        ('run.name="a\\u001b[31m"', "can't name a folder"),
        (f"run.name={'ž' * 60}", "can't name a folder"),
        (f"run.output=/tmp/{'x' * 300}", "run.output"),
        ('run.output="a\\0b"', "run.output"),
        ("rollout.adapter=", "rollout.adapter"),
        ("rollout.adapter=false", "expected a plugin's name, got False"),
        ("rollout.adapter=nope", "no adapter is called 'nope'"),
    ],
)
def test_a_wrong_value_is_refused_not_converted(resolve: Resolve, assignment: str, says: str) -> None:
    assert says in error(resolve, "", assignment)


def test_values_that_json_has_not_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value, says in ((b"x", "bytes"), ({1}, "set"), (loop, "deep"), ("\udcff", "Unicode"), (10**5000, "too large")):
        with pytest.raises(ConfigError, match=says):
            validate(SumsConfig, {"dataset": value}, path="sums")


@pytest.mark.parametrize(
    ("text", "assignments", "says"),
    [
        ("", ["env.total_steps=3", "env.total_steps=4"], "given as 3 (--set env.total_steps) and 4"),
        ("", ["trainer.lora_rank=3", "lora.lora_rank=4"], "are one setting, given as 3"),
        ("", ["env.difficulty=3", "sums.difficulty=4"], "are one setting"),
        ("", ["env.difficulty=3", "SUMS.difficulty=4"], "are one setting"),
        ("", ["openai.0.model_name=a", "openai.model_name=b"], "given as 'a'"),
        ("", ["trainer.betas.a=1", "trainer.betas={b: 2}"], "are one setting"),
        ("", ["trainer.betas={b: 2}", "lora.betas.a=1"], "are one setting"),
        ("", ["env.total_steps=1", "env.total_steps=true"], "given as 1"),
        ("sums: {difficulty: 1}\nenv: {difficulty: 2}", [], "are one setting, given as 1"),
        ("lora: {lora_rank: 1}\ntrainer: {lora_rank: 2}", [], "are one setting, given as 1"),
        ("", ["openai.1.model_name=x"], "only the first entry"),
        ("", ["openai[1].model_name=x"], "only the first entry"),
        ("", ["openai.api_key=x"], "--set openai.api_key: has no effect here"),
        ("", ["openai.weight=0"], "has no effect here"),
        ("", ["env.use_wandb=true"], "has no effect here: metrics go to metrics.jsonl"),
        ("", ["slurm=true"], "has no effect here"),
        ("", ["trainer.wandb_project=x"], "--set trainer.wandb_project: has no effect here: not built"),
        ("", ["tinker.lora_rank=8"], "--set tinker.lora_rank: has no effect here: tinker takes no part in this run"),
        ("rollout: {max_staleness: 1}", ["env.max_batches_offpolicy=0"], "rollout.max_staleness is given"),
        ("rollout: {max_staleness: 1}", ["env.max_batches_offpolicy=1"], "rollout.max_staleness is given"),
        ("env: {ensure_scores_are_not_same: false}", ["rollout.max_filtered_groups=8"], "no group is filtered out"),
        ("env: {steps_per_eval: 0}", ["rollout.eval_tasks=8"], "nothing is evaluated"),
    ],
)
def test_an_override_that_changes_nothing_is_refused(
    resolve: Resolve, text: str, assignments: list[str], says: str
) -> None:
    assert says in error(resolve, text, *assignments)


def test_one_value_given_twice_alike_is_no_contradiction(resolve: Resolve) -> None:
    config = resolve("", "trainer.lora_rank=8", "lora.lora_rank=8", "openai[0].model_name=m")
    assert (config.trainer.lora_rank, config.model) == (8, "m")


def test_every_override_shows_in_the_result(resolve: Resolve) -> None:
    """Each key of each section, set to another value that is allowed, is there afterwards."""
    changed: dict[str, dict[str, Any]] = {
        "run": {"name": "n", "output": "o", "seed": 3, "deterministic": True, "previews": 1},
        "env": {
            "group_size": 3,
            "batch_size": 9,
            "total_steps": 2,
            "steps_per_eval": 1,
            "max_batches_offpolicy": 4,
            "max_token_length": 99,
            "max_num_workers": 5,
            "ensure_scores_are_not_same": False,
            "tokenizer_name": "t",
        },
        "openai": {"model_name": "m", "num_requests_for_eval": 2},
        "rollout": {
            "max_staleness": 0,
            "max_filtered_groups": 5,
            "max_failed_groups": 6,
            "max_tokens": 7,
            "max_turns": 8,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 4,
            "episode_timeout": 3.5,
            "episode_retries": 0,
            "min_group_size": 2,
            "context_overflow": "drop",
            "eval_tasks": 9,
            "eval_temperature": 0.5,
            "show_every": 0,
        },
        "sums": {"dataset": "d", "difficulty": 2, "stops": ["s"], "folder": "f"},
        "lora": {"lora_rank": 1, "learning_rate": 2.0, "local": True, "save_checkpoint_interval": 3},
    }
    sizes = ["env.group_size=3", "env.batch_size=9"]
    for section, entries in changed.items():
        for key, value in entries.items():
            path = f"{section}.{key}"
            more = sizes if path not in ("env.group_size", "env.batch_size") else sizes[:1] * (key == "batch_size")
            more = ["env.batch_size=9"] if path == "env.group_size" else more
            config = resolve("", f"{path}={json.dumps(value)}", *more)
            assert config.as_dict()[section][key] == value, path
            assert config.origins[path] == f"--set {path}"


@pytest.mark.parametrize(
    ("assignments", "says"),
    [
        (["env.group_size=5", "env.batch_size=12"], "must be a multiple of env.group_size 5; use 10 or 15"),
        (["env.group_size=16", "env.batch_size=8"], "use 16"),
        (["env.group_size=1"], "a group of 1 always has equal scores"),
        (["rollout.min_group_size=5"], "5 is more than env.group_size 4"),
    ],
)
def test_sizes_that_do_not_go_together(resolve: Resolve, assignments: list[str], says: str) -> None:
    assert says in error(resolve, "", *assignments)


def test_a_group_of_one_is_fine_without_filtering(resolve: Resolve) -> None:
    config = resolve("", "env.group_size=1", "env.ensure_scores_are_not_same=false")
    assert config.groups_per_batch == 8


ORIGINAL = """
env:
  group_size: 16
  batch_size: 128
  max_batches_offpolicy: 3
  tokenizer_name: "meta-llama/Llama-3.1-8B-Instruct"
  use_wandb: true
  rollout_server_url: "http://localhost:8000"
  wandb_name: "gsm8k-env"
  ensure_scores_are_not_same: true
  max_token_length: 256
  max_num_workers: 24
  total_steps: 50
  steps_per_eval: 25
openai:
  - model_name: "meta-llama/Llama-3.1-8B-Instruct"
    base_url: "http://localhost:8001/v1"
    api_key: "a-secret"
    weight: 1.0
    num_requests_for_eval: 256
    server_type: sglang
  - model_name: other
    base_url: "http://localhost:8002/v1"
tinker:
  lora_rank: 32
  learning_rate: 0.00004
  max_token_trainer_length: 2048
  checkpoint_dir: "./temp/"
  save_checkpoint_interval: 0
  wandb_project: "p"
  wandb_group: null
  wandb_run_name: "r"
  wandb_run_suffix: "s"
  tool_call_parser: hermes
slurm: false
testing: false
"""


def test_a_file_of_the_original_is_accepted_and_says_what_has_no_effect(tmp_path: Path) -> None:
    pytest.importorskip("tinker_atropos_tinker")
    registry = Registry()
    registry.add("env", EnvironmentSpec(name="sums", make=nothing, config=SumsConfig))
    registry.add("adapter", AdapterSpec(name="managed_server", make=nothing, config=ChatConfig, sessions=True))
    path = tmp_path / "original.yaml"
    path.write_text(ORIGINAL)
    plugins = [("run.env", "sums", "--env"), ("run.trainer", "tinker", "--trainer")]
    config = load(path, plugins, registry=registry)
    assert (config.trainer.lora_rank, config.trainer.learning_rate) == (32, 4e-5)
    assert (config.model, config.max_staleness) == ("meta-llama/Llama-3.1-8B-Instruct", 3)
    assert sorted(config.unused) == [
        "env.rollout_server_url",
        "env.use_wandb",
        "env.wandb_name",
        "openai.api_key",
        "openai.base_url",
        "openai.server_type",
        "openai[1]",
        "slurm",
        "testing",
        "tinker.checkpoint_dir",
        "tinker.tool_call_parser",
        "tinker.wandb_project",
        "tinker.wandb_run_name",
        "tinker.wandb_run_suffix",
    ]

    assert {config.origins[key] for key in ("slurm", "testing", "openai[1]")} == {str(path)}


def test_a_dry_run_says_what_the_trainer_makes_of_values_left_open(resolve: Resolve) -> None:
    config = resolve("")
    quote = Quote(hosted=False, lines=("learning rate   0.02",))
    config = replace(config, trainer_spec=replace(config.trainer_spec, quote=lambda *_: quote))
    assert "# learning rate 0.02" in describe(config).splitlines()


def test_all_unknown_keys_of_a_section_are_told_at_once(resolve: Resolve) -> None:
    text = error(resolve, "env: {group_sise: 4, worker_timeout: 3}\n")
    assert "env.group_sise: unknown key. Did you mean 'group_size'? env.worker_timeout: unknown key. Known" in text
    assert text.count("Known keys") == 1


def test_the_reference_of_all_settings_is_fresh() -> None:
    for plugin in ("gsm8k", "math_server", "atropos", "tinker", "managed_server"):
        pytest.importorskip(f"tinker_atropos_{plugin}")
    scripts = Path(__file__).parents[2] / "scripts"
    written = runpy.run_path(str(scripts / "write_configuration_docs.py"))
    assert written["PAGE"].read_text(encoding="utf-8") == written["page"](), (
        "docs/configuration.md is not what the models say; run python scripts/write_configuration_docs.py"
    )


def test_defaults_in_the_reference_can_be_typed() -> None:
    written = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_configuration_docs.py"))
    for value in (math.inf, -math.inf, 5e-7, 10.0, 3):
        assert parse_value(written["typed"](value)) == value


def test_openai_may_be_one_mapping(resolve: Resolve) -> None:
    assert resolve("openai: {model_name: m, server_type: sglang}").model == "m"
    assert resolve("openai: []").model == "large"


def test_the_trainers_default_model_depends_on_its_settings(resolve: Resolve) -> None:
    assert resolve("", "trainer.local=true").model == "tiny"


AWKWARD = """
run: {name: "1e5", seed: 7}
env: {stops: ["a: b", "#", "yes", "017", "\\x85", "\\e[0m"], total_steps: 2}
sums: {dataset: "a long text   with spaces\\n# no comment\\n\\n  'quoted'", folder: ~/data}
openai: {api_key: a-secret}
lora: {betas: {"1": 1.0e-20, b: 5}}
managed_server: {template_kwargs: {long: "LONG", none: null, deep: {list: [1, [2, "1e3"]]}}}
"""


def test_what_a_dry_run_prints_is_a_file_that_gives_the_same(resolve: Resolve, tmp_path: Path) -> None:
    config = resolve(AWKWARD.replace("LONG", "word " * 100), "env.difficulty=3")
    printed = describe(config)
    assert "a-secret" not in printed
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    again = resolve(printed, plugins=False)
    assert again.as_dict() == config.as_dict()
    assert again.environment == config.environment
    assert read_yaml(path)["run"]["name"] == "1e5"


def test_a_resumed_run_has_the_configuration_it_wrote(resolve: Resolve) -> None:
    config = resolve(AWKWARD, "rollout.max_staleness=2")
    base = {**config.as_dict()}
    again = resolve("", base=base, plugins=False)
    assert again.as_dict() == config.as_dict()
    assert again.origins["env.total_steps"] == "the run's own config.yaml"
    assert resolve("", "env.total_steps=9", base=base, plugins=False).env.total_steps == 9
    assert resolve(write_yaml(base), plugins=False).as_dict() == config.as_dict()


def test_plugins_are_named_in_their_own_spelling(resolve: Resolve) -> None:
    config = resolve("run: {env: SUMS, trainer: LORA}", plugins=False)
    assert (config.run.env, config.run.trainer) == ("Sums", "lora")
    assert config.name.startswith("sums-lora-")


def test_missing_plugins_say_how_to_name_one(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"run.env: not given; say `--env gsm8k`"):
        load(None, [], registry=registry)
    with pytest.raises(ConfigError, match=r"run.trainer: not given; say `--trainer tinker`"):
        load(None, [("run.env", "sums", "--env")], registry=registry)


def test_a_trainer_that_cannot_learn_the_kind_is_refused_before_an_adapter_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "torch_thing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-thing\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[tinker_atropos.trainers]\ncontrol_only = a_control_trainer\nbad = missing\n"
    )
    (tmp_path / "a_control_trainer.py").write_text(
        "from tinker_atropos import TrainerSpec, hookimpl\n@hookimpl\ndef trainer_spec():\n"
        "    return TrainerSpec(name='control_only', make=print, open_policy=print, kinds=frozenset({'control'}))\n"
    )
    registry = Registry()
    for env in ("walker", "pictures"):
        kind = "control" if env == "walker" else "text"
        needs = frozenset({"images"}) if env == "pictures" else frozenset[str]()
        registry.add("env", EnvironmentSpec(name=env, make=nothing, kind=kind, needs=needs))  # type: ignore[arg-type]
    text_only = TrainerSpec(name="text_only", make=nothing, open_policy=nothing, kinds=frozenset({"text"}))
    registry.add("trainer", text_only)

    def said(env: str) -> str:
        overrides = [("run.env", env, "--env"), ("run.trainer", "text_only", "-"), ("rollout.adapter", "none", "-")]
        with pytest.raises(PluginError) as raised:
            load(None, overrides, registry=registry)
        return str(raised.value)

    assert "is of kind 'control', and trainer 'text_only' learns text" in said("walker")
    assert "Installed trainers that could: control_only" in said("walker")
    assert "needs images, which trainer 'text_only' can't" in said("pictures")


def test_an_adapter_without_sessions_is_refused_for_text(resolve: Resolve, registry: Registry) -> None:
    registry.add("adapter", AdapterSpec(name="server_only", make=nothing))
    assert "opens no text sessions" in error(resolve, "", "rollout.adapter=server_only")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (EnvironmentSpec(name="run", make=nothing), "that is a section of every configuration"),
        (EnvironmentSpec(name="lora", make=nothing), "are both called 'lora'"),
        (EnvironmentSpec(name="odd", make=nothing, defaults={"env.grop_size": 3}), "plugin 'odd' has a wrong default"),
    ],
)
def test_plugins_whose_names_collide_are_refused(registry: Registry, spec: EnvironmentSpec, says: str) -> None:
    registry.add("env", spec)
    overrides = [("run.env", spec.name, "--env"), ("run.trainer", "lora", "--trainer")]
    with pytest.raises(PluginError, match=says):
        load(None, overrides, registry=registry)


def test_a_plugin_may_not_reuse_a_common_key(registry: Registry) -> None:
    class Doubled(EnvironmentConfig):
        group_size: int = 3

    registry.add("env", EnvironmentSpec(name="doubled", make=nothing, config=Doubled))
    with pytest.raises(PluginError, match="defines the settings group_size, which every run has already"):
        load(None, [("run.env", "doubled", "-"), ("run.trainer", "lora", "-")], registry=registry)


def test_single_turn_settings_stand_in_env(registry: Registry) -> None:
    registry.add("env", single_turn("own", lambda split: [Task("a")], lambda c, t: 1))
    overrides = [("run.env", "own", "-"), ("run.trainer", "lora", "-"), ("env.prompt_format", "completion", "-")]
    assert load(None, overrides, registry=registry).environment.prompt_format == "completion"
