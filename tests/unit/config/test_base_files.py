"""`base:` in YAML files: what beats what, where files are looked for, circles; `--print_config` of what is chosen."""

import pytest

import run_t5_pretraining
from lm_experiments_tools.config import cli
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError

REQUIRED = ["--data_path", "tokens", "--model_cfg", "t5-small", "--lr", "1e-3"]


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def parse(*argv: str):
    return cli.parse(T5PretrainingArgs, [*REQUIRED, *argv])


def test_file_beats_its_base_and_the_command_line_beats_both(write):
    far = write("common/far.yaml", "seed: 1\niters: 1\nbatch_size: 1\nlog_interval: 1\n")
    near = write("common/near.yaml", "iters: 2\nbase: far.yaml\nbatch_size: 2\nlog_interval: 2\n")
    config = write("run.yaml", "batch_size: 3\nlog_interval: 3\nbase: common/near.yaml\n")
    args, origins = parse("--config", config, "--log_interval", "4")
    assert (args.seed, args.iters, args.batch_size, args.log_interval) == (1, 2, 3, 4)
    names = ("seed", "iters", "batch_size", "log_interval", "streams")
    lines = [f"{far} line 1", f"{near} line 1", f"{config} line 1", "command line", "default"]
    assert [origins[name] for name in names] == lines


def test_later_base_of_a_list_wins_and_one_may_be_reached_twice(write):
    write("shared.yaml", "seed: 5\n")
    write("a.yaml", "base: shared.yaml\niters: 1\nbatch_size: 1\n")
    write("b.yaml", "base: [shared.yaml]\niters: 2\n")
    args, _ = parse("--config", write("run.yaml", "base: [a.yaml, b.yaml]\n"))
    assert (args.seed, args.iters, args.batch_size) == (5, 2, 1)


def test_base_is_looked_for_beside_the_file_from_any_folder(write, tmp_path, monkeypatch):
    write("files/base.yaml", "iters: 3\n")
    write("files/run.yaml", "base: base.yaml\n")
    monkeypatch.chdir(tmp_path)
    args, origins = parse("--config", "files/run.yaml")
    assert args.iters == 3 and origins["iters"] == "files/base.yaml line 1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: run.yaml\n", ["run.yaml line 1: base", "leads back to itself"]),
        ("iters: 3\nbase: other.yaml\n", ["other.yaml line 1: base", "back to itself"]),
        ("base: typo.yaml\n", ["typo.yaml line 1: unknown setting 'itres': did you mean iters?"]),
        ("base: typo.yaml\nbase: typo.yaml\n", ["line 2: base is set a second time"]),
    ],
)
def test_mistakes_in_a_sentence(write, text, words):
    write("other.yaml", "base: run.yaml\n")
    write("typo.yaml", "itres: 1\n")
    with pytest.raises(UserError) as error:
        parse("--config", write("run.yaml", text))
    sentence = str(error.value)
    assert "\n" not in sentence and all(word in sentence for word in words), sentence


def test_a_conflict_names_the_line_of_the_base(write):
    base = write("base.yaml", "seed: 1\nfp16: true\n")
    with pytest.raises(UserError, match="exclude each other") as error:
        parse("--config", write("run.yaml", "base: base.yaml\n"), "--bf16")
    assert f"fp16 is set in {base} line 2" in str(error.value)


def test_print_config_shows_what_speed_would_choose(write, capsys):
    config = write("run.yaml", "iters: 7\n")
    with pytest.raises(SystemExit):
        run_t5_pretraining.main([*REQUIRED, "--config", config, "--no_bf16", "--print_config"])
    lines = capsys.readouterr().out.splitlines()
    assert f"iters: 7  # {config} line 1" in lines and "bf16: false  # command line" in lines and "seed: 42" in lines
    assert any(line.startswith("compile: ") and "  # --speed auto: " in line for line in lines)
    assert "model_cls: 'modeling_t5:T5ForConditionalGeneration'  # --speed auto: the same weights and files" in lines
