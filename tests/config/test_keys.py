"""Every key of the schema has an effect: the test changes it and compares an observation with and without the change.

An entry of the table names a key, another value for it, and what is observed: a finished run of two steps, the rows
drawn before weights are loaded, or the messages about the config.
"""

import json
import socket
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from safetensors import safe_open
from trio.testing import MockClock

import oxrl.generators.embedded.generator as embedded
import oxrl.tracking.mlflow
from oxrl.config import Config, load_config
from oxrl.config.checks import contradictions
from oxrl.config.reference import SECTIONS, fields, section_class
from oxrl.data.prepare import prepare
from oxrl.data.render import Renderer
from oxrl.generators.connection import EngineError
from oxrl.guard.findings import states_of
from oxrl.models.chat_templates import TEMPLATES
from oxrl.models.load import load_model
from oxrl.rewards import grade
from oxrl.rollouts.envs import GeneratorClient
from oxrl.run.backends import training_settings, worker_of
from oxrl.run.build import open_engine
from oxrl.run.engines import adapter_rank, capture_options, engine_options, transfer_options
from oxrl.run.environment import environment
from oxrl.run.folder import run_folder
from oxrl.run.launch import run_ranks
from oxrl.run.placement import placed, ranks_to_start
from oxrl.run.prepare import prepare_run
from oxrl.run.reward import configured_reward, default_reward, load_reward
from oxrl.run.spec import model_config
from oxrl.run.train import loop_intervals, train_spec
from oxrl.tracking.step_files import read_index, recorded_steps
from oxrl.tracking.trackers import Tracker
from oxrl.types import Generation, GenerationConfig, Message, Rollout, Sample, Turn
from tests.rollouts.scripted_text import ScriptedText
from tests.rows import sums, write_jsonl


class Effect(NamedTuple):
    """`key=value` on top of `base` changes what `look` returns."""

    value: Any
    look: Callable[..., Any]
    base: tuple[str, ...] = ()
    gives: Any = ...  # what `look` returns with the change, where it is known


class Workspace:
    """Files that the table refers to, and a cache of finished runs."""

    def __init__(self, folder: Path):
        self.folder, self.runs, self.numbers = folder, {}, count()
        self.rows = write_jsonl(folder / "rows.jsonl", sums(8))
        self.more = write_jsonl(folder / "more.jsonl", sums(4, first=40))
        pairs = [{"prompt": f"{i}?", "chosen": "yes it is", "rejected": "no"} for i in range(4)]
        self.pairs = write_jsonl(folder / "pairs.jsonl", pairs)
        self.long = write_jsonl(folder / "long.jsonl", [*sums(3), {"prompt": "a?", "response": "b " * 40}])
        self.bad = write_jsonl(folder / "bad.jsonl", [*sums(2), {"prompt": "no response"}])
        renamed = [{"prompt": f"{i}?", "response": "theirs", "ours": f"reply {i}"} for i in range(4)]
        self.renamed = write_jsonl(folder / "renamed.jsonl", renamed)
        self.acted = write_jsonl(folder / "acted.jsonl", [{"prompt": f"{i}?", "actions": [0]} for i in range(4)])
        self.limited = folder / "limited.py"
        self.limited.write_text(
            "from oxrl.rewards.allowance import current_allowance\n\n\n"
            "def seconds_left(rollout):\n    return current_allowance().left\n"
        )
        self.template = folder / "thinking.jinja"
        self.template.write_text(
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}Hm. {% endif %}"
            "{% endif %}"
        )
        self.hanging = folder / "hanging.py"
        self.hanging.write_text(
            "import threading\n\nimport anyio\n\n\n"
            "async def env(sample, policy):\n    await anyio.sleep_forever()\n\n\n"
            "def calculator(expression: str):\n    threading.Event().wait()\n"
        )

    def config(self, overrides: tuple[str, ...]) -> Config:
        start = ["model.name=tiny", f"run.checkpoint_dir={self.folder / 'checkpoints'}"]
        return load_config(None, [*start, *(each.format(home=self) for each in overrides)])

    def fresh(self) -> Path:
        return self.folder / f"run{next(self.numbers)}"

    def run(self, overrides: tuple[str, ...]) -> Any:
        """Return a finished run; trained once per set of overrides."""
        if overrides not in self.runs:
            self.runs[overrides] = train_spec(prepare_run(self.config(overrides), self.fresh()))
        return self.runs[overrides]

    @property
    def trained(self) -> str:
        """A model with other weights than `tiny`."""
        return str(self.run((*SFT, "train.lr=1e-2")).checkpoint)

    @property
    def reward_model(self) -> str:
        return str(self.run((*PAIRS, "train.alg_name=rm")).folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    here = Workspace(tmp_path_factory.mktemp("keys"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OXRL_DATA_DIR", str(here.folder / "data"))
        solved = [{"question": f"{i}?", "answer": f"so it is {i} #### {i}"} for i in range(8)]
        prepare("gsm8k", files=[f"train={write_jsonl(here.folder / 'raw.jsonl', solved)}"], splits=["train"])
        yield here


STEPS = ("train.train_steps_per_epoch=2", "train.train_batch_size_per_gpu=2")
ROWS = ("data.train_files_path={home.rows}",)
SFT = ("train.alg_name=sft", *ROWS, *STEPS)
LONGER = (*SFT, "train.train_steps_per_epoch=4")
VAL = (*LONGER, "data.val_files_path={home.more}")
PAIRS = ("train.alg_name=dpo", "data.train_files_path={home.pairs}", *STEPS)
RL = (
    "train.alg_name=grpo", *ROWS, *STEPS, "rollout.n_samples=2", "rollout.max_tokens=6", "rollout.log_samples=64",
    "reward.reward_func=oxrl.diagnose.verify_model:any_difference",
)  # fmt: skip
MANY = (*RL, "train.train_batch_size_per_gpu=6")  # more groups than are recorded by default
VLLM = (*RL, "inference_engine.name=vllm")
HTTP = (*RL, "inference_engine.name=http", "inference_engine.urls=[http://127.0.0.1:8000]")
DEEPSPEED = (*SFT, "run.backend=deepspeed")
LENGTH = (*RL, "reward.reward_func=length_target", "reward.params={{target: 3}}")
REFERENCE = (
    *RL, "train.train_steps_per_epoch=3", "train.lr=1e-2", "train.warmup_steps_ratio=0",
    "train.alg_params={{kl_coef: 0.5}}",
)  # fmt: skip
INFERRED = (*RL, "reward.reward_func=null")  # a number reward, which a random model never earns
MIXED = (*SFT, "data.train_files_path={{one: {home.rows}, two: {home.more}}}")
RENAMED = (*SFT, "data.train_files_path={home.renamed}")
ACTED = (*SFT, "data.train_files_path={home.acted}", "data.actions={{words: [left, right]}}")
LONG = (*SFT, "data.train_files_path={home.long}")
LIMITED = (*RL, "reward.reward_func={home.limited}:seconds_left", "train.train_steps_per_epoch=1")
CODE = (*RL, "reward.reward_func=code_reward_func")
CROWDED = (*RL, "rollout.over_sampling_factor=2.0", "rollout.slots=3")
LORA = (*SFT, "lora.enabled=true")
MLFLOW = (*SFT, "run.trackers=[mlflow]")
IMPOSSIBLE = (*RL, "rollout.filter=check_min_reward", "rollout.filter_params={{min_reward: 9}}")
TOOLS = (*RL, "rollout.env=tools", "rollout.tools=[oxrl.rollouts.tools:calculator]")
ENVIRONMENT = ("train.alg_name=grpo", "rollout.env=gym:CartPole-v1", "rollout.max_tokens=6", *STEPS)
HANGING = (*RL, "rollout.env={home.hanging}:env", "rollout.env_seconds=0.02", "train.train_steps_per_epoch=1")
THINKING = (*SFT, "model.chat_template={home.template}")
HANGING_TOOL = (*TOOLS, "rollout.tools=['{home.hanging}:calculator']", "rollout.tool_seconds=0.02")


def logged(name):
    return lambda home, overrides: [line.get(name) for line in home.run(overrides).history]


def completions(home, overrides):
    lines = (home.run(overrides).folder / "rollouts.jsonl").read_text().splitlines()
    return [[each["response"] for each in json.loads(line)["samples"]] for line in lines]


def recorded(home, overrides):
    return read_index(home.run(overrides).folder)


def checkpoints(home, overrides):
    return sorted(path.name for path in (home.run(overrides).folder / "checkpoints").glob("step_*"))


def in_checkpoint(file):
    return lambda home, overrides: (home.run(overrides).checkpoint / file).exists()


def written(name):
    return lambda home, overrides: (home.run(overrides).folder / name).exists()


def store_of_mlflow(home, overrides):
    """Return the URIs that MLflow is opened with; its databases are tested in test_trackers."""
    opened = []

    def note(about):
        opened.append(about.uri)
        return Tracker(lambda *_: None, lambda _: None, "1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oxrl.tracking.mlflow, "open_tracker", note)
        home.run(overrides)
    return opened


def adapter(key):
    def look(home, overrides):
        setting = json.loads((home.run(overrides).checkpoint / "adapter_config.json").read_text())[key]
        return sorted(setting) if isinstance(setting, list) else setting

    return look


def weights(home, overrides):
    with safe_open(home.run(overrides).checkpoint / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return {name: (tensor.dtype, tensor.double().sum().item()) for name, tensor in tensors.items()}


def prepared(what):
    """Look at a run before its weights are loaded, or at the error message."""

    def look(home, overrides):
        try:
            return what(prepare_run(home.config(overrides), home.fresh()))
        except ValueError as refused:
            return str(refused)

    return look


def failed(home, overrides):
    try:
        home.run(overrides)
    except RuntimeError as failure:
        return str(failure)
    return "did not fail"


def state_of(check):
    return lambda home, overrides: {each.check: each.message for each in states_of(home.run(overrides).folder)}[check]


def lines_of_metrics(home, overrides):
    return len((home.run(overrides).folder / "metrics.jsonl").read_text().splitlines())


def trains_its_towers(model):
    return all(weight.requires_grad for weight in model.parameters())


def loaded(what):
    return of_config(lambda config: what(load_model(model_config(config))))


def model_setting(name):
    """Look at a setting that the model is loaded with."""
    return of_config(lambda config: getattr(model_config(config), name))


def runs_unsandboxed(config):
    return "allow_unsandboxed=True" in str(configured_reward(config).check)


def on_a_gpu(option):
    return lambda config: getattr(capture_options(config, "cuda"), option)


def of_config(what):
    return lambda home, overrides: what(home.config(overrides))


def drawn(run):
    return [item[0].id if isinstance(item, tuple) else item.id for item in run.source.get_prompts(8)]


def share_of_more(run):
    return sum(each.startswith("more.jsonl") for each in drawn(run))


def text_drawn(run):
    return sorted(run.tokenizer.decode(item[0].tokens) for item in run.source.get_prompts(4))


def rejected_drawn(run):
    return sorted(run.tokenizer.decode(item[1].tokens) for item in run.source.get_prompts(4))


def engine_settings(name):
    """Look at an argument that the engine is created with."""

    def look(home, overrides):
        created = []

        class Noted(embedded.EmbeddedGenerator):
            def __init__(self, *arguments, **settings):
                created.append(settings[name])
                super().__init__(*arguments, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedded, "EmbeddedGenerator", Noted)
            home.runs.pop(overrides, None)
            home.run(overrides)
        return created

    return look


def turns_of_a_caller(home, overrides):
    """Return the number of turns of a model that only calls a tool."""
    return len(caller(home, overrides).turns)


def first_result(home, overrides):
    return caller(home, overrides).turns[0].messages[1].text


def caller(home, overrides):
    """Return the episode of a model that only calls a tool."""
    config = home.config(overrides)
    tokenizer = prepare_run(config, home.fresh()).tokenizer
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    policy = GeneratorClient(
        ScriptedText(tokenizer, [call] * 9), Renderer(tokenizer), GenerationConfig(max_new_tokens=99), 7
    )
    return anyio.run(environment(config), Sample("s", (Message("user", "1 + 1?"),)), policy)


def rubric_in_judge_prompt(home, overrides):
    """Return whether the rubric is part of the judge's prompt."""
    prompts = []

    class Noted(embedded.EmbeddedGenerator):
        async def generate(self, requests, sampling):
            prompts.extend(self.tokenizer.decode(request.tokens) for request in requests)
            return [Generation((), (), "stop", text="Score: 5")]

    turn = Turn((1,), Generation((2,), (-1.0,), "stop", text="It is so."), (Message("assistant", "It is so."),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "EmbeddedGenerator", Noted)
        judge = load_reward(home.config(overrides))
    anyio.run(grade, [Rollout(Sample("s", (Message("user", "Is it so?"),)), (turn,))], judge)
    return "Is it short?" in prompts[0]


OPEN = {section for section in SECTIONS if section_class(section).model_config["extra"] == "allow"}
num_steps = prepared(lambda run: run.num_steps)
size = prepared(lambda run: len(run.source))
can_start = prepared(lambda run: "can start")
rows_drawn = prepared(drawn)


def worker_sections(home, overrides):
    sections = prepared(lambda run: worker_of(run).args[-1].args[-2:])(home, overrides)
    return [section.get("zero_optimization") for section in sections]


def launch_attempts(home, overrides):
    """Return how often a command that is always killed is started."""
    file = home.folder / f"attempts-{next(home.numbers)}"
    killed = f"import os; open({str(file)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    limit = home.config(overrides).run.max_restarts
    assert run_ranks([], 1, max_restarts=limit, program=[sys.executable, "-c", killed]) == 1
    return len(file.read_text())


def engine_timeout(home, overrides):
    """Return the seconds after which an unresponsive engine counts as lost, by a mock clock."""
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        url = f"http://127.0.0.1:{unresponsive.getsockname()[1]}"
        config = home.config([*overrides, f"inference_engine.urls=[{url}]"])

        async def time_out():
            with pytest.raises(EngineError, match="no response within"):
                async with open_engine(config, None, home.folder, None):
                    pass
            return anyio.current_time()

        clock = MockClock(autojump_threshold=0)
        return anyio.run(time_out, backend="trio", backend_options={"clock": clock})


refused = of_config(contradictions)

KEYS = {
    "run.experiment_id": Effect("mine", of_config(lambda config: run_folder(config, None).name), ROWS, "mine"),
    "run.seed": Effect(7, rows_drawn, SFT),
    "run.checkpoint_dir": Effect(
        "here", of_config(lambda config: run_folder(config, None)), ROWS, Path("here/run").absolute()
    ),
    "run.task": Effect("math", of_config(lambda config: (config.train.lr, default_reward(config))), ROWS),
    "run.training_gpus": Effect(0, model_setting("device"), ROWS, "cpu"),
    "run.backend": Effect("fsdp", of_config(ranks_to_start), (*ROWS, "run.training_gpus=2"), 2),
    "run.sharding": Effect("fsdp", of_config(lambda config: placed(config, gpus=2).run.backend), ROWS, "fsdp"),
    "run.rollout_gpus": Effect(2, of_config(lambda config: config.replicas), VLLM, 2),
    "run.ray_address": Effect("auto", of_config(lambda config: placed(config, gpus=2).run.backend), ROWS, "ray"),
    "run.rank_time_limit": Effect(2.0, engine_timeout, (*RL, "inference_engine.name=http")),
    "run.max_restarts": Effect(0, launch_attempts, ROWS, 1),
    "run.trackers": Effect(["tensorboard"], written("tensorboard"), SFT, True),
    "run.checks": Effect({"mask": "off"}, state_of("mask"), SFT, "off in run.checks"),
    "run.tracking_uri": Effect("sqlite:///mine.db", store_of_mlflow, MLFLOW, ["sqlite:///mine.db"]),
    "train.alg_name": Effect("grpo", prepared(lambda run: run.online), SFT, True),
    "train.alg_params": Effect({"beta": 0.5}, logged("grad_norm"), PAIRS),
    "train.alg_schedule": Effect([{"step": 2, "alg_name": "ipo"}], logged("loss"), PAIRS),
    "train.lr": Effect(3e-3, logged("lr"), SFT),
    "train.betas": Effect([0.5, 0.6], weights, SFT),
    "train.adam_epsilon": Effect(1.0, weights, SFT),
    "train.weight_decay": Effect(0.9, weights, SFT),
    "train.warmup_steps_ratio": Effect(0.9, logged("lr"), LONGER),
    "train.lr_scheduler": Effect("constant", logged("lr"), SFT, [1e-5, 1e-5]),
    "train.clip_grad_norm": Effect(1e-9, weights, SFT),
    "train.total_number_of_epochs": Effect(3, num_steps, SFT, 6),
    "train.train_steps_per_epoch": Effect(5, num_steps, SFT, 5),
    "train.train_batch_size_per_gpu": Effect(4, num_steps, ("train.alg_name=sft", *ROWS), 2),
    "train.gradient_accumulation_steps": Effect(2, logged("trained_tokens"), SFT),
    "train.micro_batch_tokens": Effect(9, prepared(lambda run: loop_intervals(run)["micro_batch_tokens"]), SFT, 9),
    "train.eval_every": Effect(3, lambda *at: [loss is None for loss in logged("eval_loss")(*at)], VAL),
    "train.eval_at_start": Effect(False, logged("step"), VAL, [1, 2, 3, 4]),
    "train.patience": Effect(1, logged("step"), (*VAL, "train.lr=1e-30", "train.eval_every=1"), [0, 1, 2]),
    "train.checkpoint_every": Effect(3, checkpoints, LONGER, ["step_0003", "step_0004"]),
    "train.keep_last": Effect(3, lambda *at: len(checkpoints(*at)), (*LONGER, "train.checkpoint_every=1"), 3),
    "train.log_every": Effect(2, lines_of_metrics, LONGER, 2),
    "train.iterations": Effect(2, weights, RL),
    "train.mini_batches": Effect(2, weights, RL),
    "train.max_logprob_gap": Effect(1e-30, failed, RL),
    "model.name": Effect("{home.trained}", logged("loss"), SFT),
    "model.dtype": Effect("bfloat16", weights, SFT),
    "model.attn_implementation": Effect("eager", loaded(lambda it: it.config._attn_implementation), ROWS, "eager"),
    "model.gradient_checkpointing": Effect(True, loaded(lambda model: model.is_gradient_checkpointing), ROWS, True),
    "model.freeze": Effect("nothing", loaded(trains_its_towers), (*ROWS, "model.name=tiny-vlm"), True),
    "model.compile": Effect(True, prepared(lambda spec: training_settings(spec)["compiles"]), SFT, True),
    "model.ref_model": Effect("{home.trained}", logged("loss"), PAIRS),
    "model.ref_update": Effect("ema", weights, REFERENCE),
    "model.ref_decay": Effect(0.1, weights, (*REFERENCE, "model.ref_update=ema")),
    "model.ref_every": Effect(1, weights, (*REFERENCE, "model.ref_update=periodic")),
    "model.teacher": Effect("{home.trained}", logged("loss"), (*SFT, "train.alg_name=kd", "model.teacher=tiny")),
    "model.revision": Effect("v2", model_setting("revision"), ROWS, "v2"),
    "model.chat_template": Effect(
        "plain", prepared(lambda run: run.tokenizer.chat_template), SFT, TEMPLATES["plain"].text
    ),
    "model.trust_remote_code": Effect(True, model_setting("trust_remote_code"), ROWS, True),
    "model.device": Effect("cuda:99", can_start, SFT),
    "lora.enabled": Effect(True, in_checkpoint("adapter_model.safetensors"), SFT, True),
    "lora.r": Effect(3, adapter("r"), LORA, 3),
    "lora.alpha": Effect(5, adapter("lora_alpha"), LORA, 5),
    "lora.dropout": Effect(0.5, logged("loss"), LORA),
    "lora.target_modules": Effect(["q_proj"], adapter("target_modules"), LORA, ["q_proj"]),
    "data.dataset": Effect("gsm8k", rows_drawn, ("data.columns={{response: solution}}", *STEPS, "train.alg_name=sft")),
    "data.train_files_path": Effect("{home.more}", rows_drawn, SFT),
    "data.val_files_path": Effect("{home.more}", prepared(lambda run: len(run.held_out)), SFT, 4),
    "data.train_dnames": Effect(["mine"], of_config(lambda config: list(config.data.train_files)), SFT, ["mine"]),
    "data.train_ratios": Effect({"one": 0.25, "two": 0.75}, prepared(share_of_more), MIXED, 6),
    "data.columns": Effect({"response": "ours"}, prepared(text_drawn), RENAMED),
    "data.prompt": Effect("{{ours}} {{prompt}}", prepared(text_drawn), RENAMED),
    "data.response": Effect("ours", prepared(text_drawn), RENAMED),
    "data.answer": Effect("ours", prepared(lambda run: run.rows[0].answer), (*RL, *RENAMED[-1:]), "reply 0"),
    "data.chosen": Effect("prompt", prepared(text_drawn), PAIRS),
    "data.rejected": Effect("{{prompt}} never", prepared(rejected_drawn), PAIRS),
    "data.system": Effect("Be brief.", prepared(text_drawn), SFT),
    "data.format": Effect("preference", rows_drawn, SFT),
    "data.max_seq_len": Effect(30, size, LONG, 3),
    "data.overlong": Effect("truncate", size, (*LONG, "data.max_seq_len=30"), 4),
    "data.template_kwargs": Effect(
        {"enable_thinking": False}, prepared(lambda run: text_drawn(run)), THINKING
    ),
    "data.actions": Effect({"words": ["right", "left"]}, prepared(text_drawn), ACTED),
    "data.env_rows": Effect(5, prepared(lambda run: len(run.rows)), ENVIRONMENT, 5),
    "data.env_val_rows": Effect(3, prepared(lambda run: len(run.held_out)), ENVIRONMENT, 3),
    "data.bad_rows": Effect("skip", size, (*SFT, "data.train_files_path={home.bad}"), 2),
    "reward.reward_func": Effect("exact_match", logged("reward"), RL, [0.0, 0.0]),
    "reward.params": Effect({"target": 6}, logged("reward"), LENGTH, [1.0, 1.0]),
    "reward.length_penalty": Effect({"limit": 6, "margin": 6, "weight": 0.5}, logged("reward"), LENGTH, [-0.5, -0.5]),
    "reward.clamp": Effect([0.1, 0.2], lambda *at: max(logged("reward")(*at)) <= 0.2, RL, True),
    "reward.model": Effect("{home.reward_model}", logged("reward"), INFERRED),
    "reward.judge": Effect("tiny", failed, (*INFERRED, "train.train_steps_per_epoch=1")),
    "reward.rubric": Effect("Is it short?", rubric_in_judge_prompt, (*INFERRED, "reward.judge=tiny"), True),
    "reward.normalize": Effect("batch", weights, (*RL, "train.alg_name=reinforce")),
    "reward.time_limit": Effect(5000, lambda *at: [round(left, -2) for left in logged("reward")(*at)], LIMITED, [5000]),
    "reward.allow_unsandboxed": Effect(True, of_config(runs_unsandboxed), CODE, True),
    "rollout.n_samples": Effect(3, lambda *at: [len(step) for step in completions(*at)], RL, [6, 6]),
    "rollout.max_tokens": Effect(3, logged("longest"), RL, [3, 3]),
    "rollout.temperature": Effect(0.1, completions, RL),
    "rollout.top_p": Effect(0.1, completions, RL),
    "rollout.top_k": Effect(1, lambda *at: len(set(completions(*at)[0][:2])), RL, 1),
    "rollout.min_p": Effect(0.9, completions, RL),
    "rollout.stop": Effect(["S"], logged("length"), RL),
    "rollout.eval_temperature": Effect(5.0, logged("eval_reward"), (*RL, "data.val_files_path={home.more}")),
    "rollout.over_sampling_factor": Effect(2.0, logged("drawn"), RL),
    "rollout.partial_rollouts": Effect(True, logged("wasted"), CROWDED, [0, 0]),
    "rollout.filter": Effect("check_reward_nonzero_std", failed, INFERRED),
    "rollout.filter_params": Effect({"min_reward": 9}, failed, (*RL, "rollout.filter=check_min_reward")),
    "rollout.sampler": Effect("solve_rate", logged("sampler_unseen"), RL),
    "rollout.sampler_params": Effect(
        {"low": -0.5}, logged("sampler_unsolved"), (*INFERRED, "rollout.sampler=solve_rate")
    ),
    "rollout.max_draws": Effect(4, failed, IMPOSSIBLE),
    "rollout.lag": Effect(1, logged("age"), (*RL, "train.train_steps_per_epoch=3")),
    "rollout.force_strict_on_policy": Effect(True, refused, (*RL, "train.iterations=2")),
    "rollout.tensor_parallel_size": Effect(2, of_config(engine_options), VLLM),
    "rollout.mode": Effect("fixed", engine_settings("mode"), RL, ["fixed"]),
    "rollout.slots": Effect(3, engine_settings("slots"), RL, [3]),
    "rollout.env": Effect("tools", can_start, RL),
    "rollout.tools": Effect(["oxrl.rollouts.tools:calculator"], can_start, (*RL, "rollout.env=tools"), "can start"),
    "rollout.env_args": Effect(
        {"actions": ["left", "right"]}, prepared(lambda run: run.rows[0].messages[0].text), ENVIRONMENT,
        "You act in CartPole-v1. Answer with one of: left, right.",
    ),
    "rollout.env_seconds": Effect(0.01, failed, HANGING),
    "rollout.tool_seconds": Effect(0.01, first_result, HANGING_TOOL, "error: calculator took longer than 0.01 s"),
    "rollout.max_turns": Effect(3, turns_of_a_caller, TOOLS, 3),
    "rollout.log_samples": Effect(1, lambda *at: [len(step) for step in completions(*at)], RL, [1, 1]),
    "rollout.record": Effect("full", lambda *at: [step["recorded"] for step in recorded(*at)], MANY, [6, 6]),
    "rollout.record_steps": Effect(1, lambda home, at: recorded_steps(home.run(at).folder), RL, [2]),
    "deepspeed.zero_optimization": Effect({"stage": 2}, worker_sections, DEEPSPEED, [{"stage": 2}, None]),
    "deepspeed_ref.zero_optimization": Effect({"stage": 0}, worker_sections, DEEPSPEED, [None, {"stage": 0}]),
    "inference_engine.name": Effect("vllm", of_config(lambda config: config.replicas), RL, 1),
    "inference_engine.urls": Effect(["http://127.0.0.1:8000"], refused, (*RL, "inference_engine.name=http"), []),
    "inference_engine.replicas": Effect(3, of_config(lambda config: config.replicas), VLLM, 3),
    "inference_engine.place": Effect(
        "server", of_config(lambda config: config.in_process), (*VLLM, "run.backend=local"), False
    ),
    "inference_engine.adapter": Effect(
        True, of_config(adapter_rank), (*VLLM, "lora.enabled=true", "run.backend=local"), 16
    ),
    "inference_engine.colocated": Effect(
        True, of_config(lambda config: config.replicas), (*VLLM, "run.backend=ray", "run.training_gpus=2"), 2
    ),
    "inference_engine.precision": Effect("bfloat16", logged("logprob_gap"), RL),
    "inference_engine.capture": Effect(False, of_config(on_a_gpu("capture")), RL, False),
    "inference_engine.compile": Effect(True, of_config(on_a_gpu("compiles")), RL, True),
    "inference_engine.cache_gib": Effect(0.5, of_config(on_a_gpu("cache_bytes")), RL, 2**29),
    "inference_engine.folder": Effect("here", of_config(transfer_options), VLLM, {"folder": "here"}),
    "inference_engine.transfer": Effect("gloo", of_config(transfer_options), HTTP, {"transfer": "gloo"}),
    "inference_engine.gpu_memory_utilization": Effect(0.5, of_config(engine_options), VLLM),
}  # fmt: skip


def test_no_key_is_missing_from_the_table():
    keys = {f"{section}.{key}" for section, key, _ in fields()}
    assert keys <= KEYS.keys()
    assert {key.split(".")[0] for key in KEYS.keys() - keys} == OPEN, "keys without a field are in open sections"


@pytest.mark.trains
@pytest.mark.parametrize("key", KEYS)
def test_the_key_has_an_effect(key, home):
    effect = KEYS[key]
    value = effect.value.format(home=home) if isinstance(effect.value, str) else json.dumps(effect.value)
    change = f"{key}={value}".replace("{", "{{").replace("}", "}}")
    without, with_it = (effect.look(home, overrides) for overrides in (effect.base, (*effect.base, change)))
    assert with_it != without
    assert effect.gives is ... or with_it == effect.gives
