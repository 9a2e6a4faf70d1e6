"""Command line and YAML: precedence, types, sentences for mistakes, speed of --help."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
import yaml

from lm_experiments_tools.config import cli
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError

REQUIRED = ["--data_path", "tokens", "--model_cfg", "t5-small", "--lr", "1e-3"]

# Every flag of the ancestor's T5 scripts, as its users write them; a list of command lines, since some exclude others.
ANCESTOR = [
    """--data_path D --valid_data_path V --working_dir . --model_cfg t5.json
       --model_cls transformers:T5ForConditionalGeneration --input_seq_len 512 --target_seq_len 192 --vocab v.model
       --task span_corruption --optimizer Adafactor --weight_decay 1e-05 --scale_parameter --relative_step
       --warmup_init --model_path RUN --log_interval 500 --valid_interval 100 --save_interval 100000 --save_best
       --use_generate_on_valid --init_checkpoint RUN/model_5.pth --skip_used_data --reset_lr --reset_iteration
       --reset_optimizer --batch_size 32 --iters 10 --gradient_accumulation_steps 2 --fp16 --fp16_allreduce
       --apex_opt_lvl O2 --min_loss_scale 1 --max_loss_scale 65536 --clip_grad_norm 1.0 --early_stopping_patience 3
       --optimize_metric exact_match --optimize_mode max --seed 1""",
    """--data_path D --valid_data_path V --base_model t5-base --lr 5e-05 --clip_grad_value 5.0 --use_lr_drop
       --lr_drop_factor 0.5 --lr_drop_patience 3 --lr_drop_threshold 1e-3 --lr_drop_threshold_mode abs
       --lr_drop_cooldown 1 --lr_drop_min_lr 1e-6 --lr_drop_eps 1e-9""",
    """--data_path D --model_cfg t5.json --lr 1e-3 --lr_scheduler linear --num_warmup_steps 5
       --num_training_steps 100""",
    "--data_path D --valid_data_path V --model_cfg t5.json --init_checkpoint RUN --validate_only",
]


def parse(*argv: str) -> tuple[T5PretrainingArgs, dict[str, str]]:
    return cli.parse(T5PretrainingArgs, [*REQUIRED, *argv])


def refusal(*argv: str, required: list[str] = REQUIRED) -> str:
    with pytest.raises(UserError) as error:
        cli.parse(T5PretrainingArgs, [*required, *argv])
    sentence = str(error.value)
    assert "\n" not in sentence and "Traceback" not in sentence and sentence.endswith((".", "?"))
    return sentence


@pytest.fixture
def write_yaml(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("command", ANCESTOR)
def test_ancestors_flags_parse(command):
    words = command.split()
    args, origins = cli.parse(T5PretrainingArgs, words)
    for name in (word.removeprefix("--") for word in words if word.startswith("--")):
        assert origins[name] == "command line"
        assert getattr(args, name) not in (None, False)


def test_command_line_beats_yaml_beats_default(write_yaml):
    first = write_yaml("lr: 1e-4\niters: 20\nbatch_size: 4\n")
    second = write_yaml("iters: 30\nseed: 7\n", "second.yaml")
    args, origins = cli.parse(
        T5PretrainingArgs,
        ["--data_path", "d", "--model_cfg", "m", "--config", first, "--config", second, "--batch_size", "10"],
    )
    assert (args.lr, args.iters, args.seed, args.log_interval) == (1e-4, 30, 7, 10)
    assert args.batch_size == 10, "a command line that repeats the default still beats YAML"
    assert origins["lr"] == f"{first} line 1" and origins["iters"] == f"{second} line 1"
    assert origins["batch_size"] == "command line" and origins["log_interval"] == "default"


def test_command_line_turns_off_what_yaml_turned_on(write_yaml):
    config = write_yaml("fp16: true\nclip_grad_norm: 1.0\nvocab: a.model\n")
    args, _ = parse("--config", config, "--no_fp16", "--clip_grad_norm", "None", "--vocab", "None", "--bf16")
    assert (args.fp16, args.bf16, args.clip_grad_norm, args.vocab) == (False, True, None, None)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("weight_decay: 1e-4", "weight_decay", 1e-4),
        ("iters: 1_000", "iters", 1000),
        ("fp16: true", "fp16", True),
        ("compile: yes", "compile", True),
        ("clip_grad_norm: null", "clip_grad_norm", None),
        ("valid_data_path: 2024", "valid_data_path", "2024"),
        ("valid_data_path: 'null'", "valid_data_path", "null"),
        ("valid_data_path: --odd", "valid_data_path", "--odd"),
        ("text-key: body", "text_key", "body"),
        ("max_loss_scale: 1.6777216e+07", "max_loss_scale", 2.0**24),
        ("---\nseed: 5 # five\n", "seed", 5),
        ("", "seed", 42),
    ],
)
def test_yaml_values_take_the_type_of_the_field(write_yaml, text, name, value):
    args, _ = parse("--config", write_yaml(text))
    assert getattr(args, name) == value and type(getattr(args, name)) is type(value)


def test_flag_forms():
    assert "--data_path is missing" in refusal(required=["--lr", "1"])
    assert parse("--batch-size", "3")[0].batch_size == 3
    assert parse("--batch_size=3")[0].batch_size == 3
    assert parse("--batch_size", "3", "--batch_size", "4")[0].batch_size == 4, "the last one wins"
    assert parse("--fp16")[0].fp16 and parse("--fp16", "true")[0].fp16 and parse("--fp16=True")[0].fp16
    assert not parse("--fp16", "--no-fp16")[0].fp16 and not parse("--fp16", "false")[0].fp16
    assert parse("--vocab=--odd=name")[0].vocab == "--odd=name"
    assert parse("--early_stopping_patience", "-1")[0].early_stopping_patience == -1
    assert parse("--keep_checkpoints", "none")[0].keep_checkpoints is None
    assert parse("--vocab", "-hello")[0].vocab == "-hello"
    assert parse("--trained", "a", "-b", "-1e-3")[0].trained == ("a", "-b", "-1e-3")
    assert "--lr is -0.001" in refusal("--lr", "-1e-3")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--itres", "5"], ["--itres", "did you mean --iters?"]),
        (["--train_batch_size", "5"], ["--train_batch_size", "--batch_size"]),
        (["5"], ["'5'", "belongs to no flag"]),
        (["--fp16", "maybe"], ["--fp16", "true or false", "'maybe'"]),
        (["--iters", "many"], ["--iters takes a whole number, not 'many'"]),
        (["--clip_grad_norm", "big"], ["--clip_grad_norm takes a number or none, not 'big'"]),
        (["--backend", "mpi"], ["--backend takes one of auto, horovod, accelerate, local, not 'mpi'"]),
        (["--iters"], ["--iters needs a value"]),
        (["--config", "absent.yaml"], ["absent.yaml", "No such file"]),
    ],
)
def test_mistake_on_the_command_line_is_one_sentence(argv, words):
    sentence = refusal(*argv)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nitres: 5", ["run.yaml line 2", "'itres'", "did you mean iters?"]),
        ("iters: many", ["run.yaml line 1: iters takes a whole number, not 'many'"]),
        ("model:\n  lr: 1", ["line 1", "'model'"]),
        ("fp16: maybe", ["fp16", "true or false", "run.yaml line 1"]),
        ("lr: 1\nlr: 2", ["line 2: lr is set a second time", "line 1"]),
        ("- lr", ["must hold lines of `name: value`"]),
        ("config: other.yaml", ["unknown setting 'config'"]),
        ("fp16: true\nbf16: true", ["fp16 is set in", "line 1", "bf16 is set in", "line 2"]),
    ],
)
def test_mistake_in_yaml_is_one_sentence_with_file_and_line(write_yaml, text, words):
    sentence = refusal("--config", write_yaml(text))
    assert "run.yaml" in sentence and all(word in sentence for word in words), sentence


def test_none_in_yaml_is_a_word_where_a_flag_has_no_null(write_yaml):
    """As on the command line. YAML itself knows ~, null and nothing at all as null (yaml.safe_load)."""
    data = ["--data_path", "d.jsonl", "--from_pretrained", "m"]

    def read(args_class, words, *lines):
        return cli.parse(args_class, [*words, "--config", write_yaml("\n".join(lines))])[0]

    assert cli.parse(FinetuningArgs, [*data, "--metrics", "none"])[0].metrics == ("none",)
    for line in ("metrics: none", "metrics: [none]", "metrics: 'none'"):
        assert read(FinetuningArgs, data, line).metrics == ("none",)
    for text in ("~", "null", ""):
        assert yaml.safe_load(f"metrics: {text}") == {"metrics": None}
        with pytest.raises(UserError, match="line 1: metrics has no value, but it takes a list, each text"):
            read(FinetuningArgs, data, f"metrics: {text}")
    assert read(T5PretrainingArgs, REQUIRED, "valid_interval: none").valid_interval is None
    phase = "- {iters: 5, lr_scheduler: none, data_path: [none, other], noise_density: 0.3}"
    args = read(T5PretrainingArgs, [*REQUIRED, "--model_path=run"], "phases:", phase)
    (first,) = phases_of(args)
    assert (first.lr_scheduler, first.data_path, first.iters) == (None, ("none", "other"), 5)


def test_iters_beside_phases_is_refused_even_as_its_default(write_yaml, capsys):
    phases = ["--model_path", "run", "--phases", "{iters: 4}", "{iters: 5}"]
    args, _ = parse(*phases)
    assert [phase.iters for phase in phases_of(args)] == [4, 5]
    default = str(T5PretrainingArgs.iters)
    assert "--iters and --phases exclude each other" in refusal(*phases, "--iters", default)
    assert "--iters and --phases exclude each other" in refusal(*phases, "--config", write_yaml(f"iters: {default}"))
    with pytest.raises(SystemExit):
        parse(*phases, "--print_config")
    assert cli.parse(T5PretrainingArgs, ["--config", write_yaml(capsys.readouterr().out)])[0] == args


def test_print_config_reads_back_to_equal_arguments(write_yaml, capsys):
    changes = ["--lr=3e-05", "--vocab=a: b # c", "--fp16", "--text_key=null", "--resume=1e3", "--iters=9"]
    expected, _ = parse(*changes)
    with pytest.raises(SystemExit) as stop:
        parse(*changes, "--print_config")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "lr: 3.0e-05  # command line" in printed and "\nseed: 42\n" in printed
    again, origins = cli.parse(T5PretrainingArgs, ["--config", write_yaml(printed)])
    assert again == expected and "default" not in origins.values()
    assert set(yaml.safe_load(printed)) == {field.name for field in dataclasses.fields(T5PretrainingArgs)}


MAIN = """
import sys
from lm_experiments_tools.config.cli import parse, run_main
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError

def main():
    what = sys.argv.pop(1)
    if what == "parse":
        parse(T5PretrainingArgs)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "crash":
        error = RuntimeError("first line\\nsecond line")
        error.step = 7
        raise error
    if what == "disk":
        open("/proc/nowhere/file", "w")
    if what == "code":
        return 5

run_main(main)
"""


@pytest.mark.parametrize(
    ("argv", "code", "last_line"),
    [
        (["parse", "--itres", "5"], 2, "error: unknown flag --itres: did you mean --iters?"),
        (["parse", *REQUIRED], 0, ""),
        (["interrupt"], 130, "interrupted"),
        (["code"], 5, ""),
        (["disk"], 1, "error: rank 3: /proc/nowhere/file: No such file or directory"),
        (["crash"], 1, "rank 3 step 7: RuntimeError: first line"),
    ],
)
def test_run_main_exit_codes_and_last_lines(argv, code, last_line, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    result = subprocess.run([sys.executable, "-c", MAIN, *argv], text=True, capture_output=True)
    assert result.returncode == code
    lines = result.stderr.splitlines()
    assert (lines[-1] if lines else "") == last_line
    assert ("Traceback" in result.stderr) == (argv[0] == "crash")
    assert len(lines) <= 1 or argv[0] == "crash"


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_rank_comes_from_any_launcher(name):
    assert cli.launcher_rank({name: "2"}) == 2
    assert cli.launcher_rank({}) == 0
