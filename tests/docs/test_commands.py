"""Every command of README.md and docs/ is understood, and runs, at the small sizes of small.yaml."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import yaml
from transformers import ModernBertConfig, ModernBertForMaskedLM, T5Config, T5ForConditionalGeneration

from lm_experiments_tools.config import cli
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.tools import inspect, plan
from lm_experiments_tools.tools.main import COMMANDS, SCRIPTS, main, with_names
from tests.helpers import ROOT
from tests.helpers.pretrained_toys import ROWS, save_toy
from tests.helpers.suite_toys import save_run, write_colours
from tests.helpers.t5x_toys import write_t5x
from tests.helpers.warm import run_job

SMALL = yaml.safe_load((ROOT / "tests" / "docs" / "small.yaml").read_text(encoding="utf-8"))
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ARGUMENTS = {
    "run_t5_pretraining.py": T5PretrainingArgs,
    "run_bert_pretraining.py": BertPretrainingArgs,
    "run_finetuning.py": FinetuningArgs,
}
KINDS = {"plan": plan.SCRIPTS, "inspect": inspect.SCRIPTS}  # tools with the flags of the script named next
CLONED = ("examples", "accelerate_configs", "megatron", "models_configs", "scripts")


def blocks(page: str, language: str) -> list[str]:
    """Texts of a page's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)


@functools.cache
def commands(page: str) -> list[str]:
    """Commands of a page's bash blocks, then those after `$` of its consoles, each on one line without comments."""
    lines, shown = ("".join(blocks(page, kind)).replace("\\\n", " ").splitlines() for kind in ("bash", "console"))
    lines = [line for line in lines if line[:1] != "#"] + [line[2:] for line in shown if line.startswith("$ ")]
    found = [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
    return [line for line in found if line and not re.match(r"(export |code=|exit |\[ )", line)]


def program_of(words: list[str]) -> tuple[str, list[str], list[str]] | None:
    """(program, words up to its name, its arguments) of a command; None where there is no program of ours."""
    for place, word in enumerate(words):
        if word in ARGUMENTS:
            return word, words[: place + 1], words[place + 1 :]
        if word == "lmtools" and words[place + 1] in KINDS:  # its flags are those of the script named next
            tool, *rest = words[place + 1 :]
            named = bool(rest) and not rest[0].startswith("-")
            kind = rest[0] if named else "pretrain-t5"
            return f"lmtools {tool} {kind}", words[: place + 2 + named], rest[named:]
        if word == "lmtools" and place + 1 < len(words):
            return f"lmtools {words[place + 1]}", words[: place + 2], words[place + 2 :]
    return None


def arguments_of(program: str) -> type | None:
    """The dataclass of a program's flags; None for one that has none."""
    name = program.removeprefix("lmtools ")
    tool, _, kind = name.partition(" ")
    if kind:
        return KINDS[tool][kind]
    if name in COMMANDS:
        return getattr(importlib.import_module(f"lm_experiments_tools.tools.{name}"), f"{name.title()}Args")
    return ARGUMENTS.get(SCRIPTS[name][0] if name in SCRIPTS else name)


def reason_not_to_run(command: str) -> str | None:
    """Why a command is not run, by small.yaml, or because it is not a whole one."""
    for beginning, reason in SMALL["not_run"].items():
        if command == beginning or command.startswith(f"{beginning} "):
            return reason
    found = program_of(shlex.split(command))
    if found is None and not command.startswith(("python -m ", "python megatron/", "git ")):
        return "a launcher alone, to be put before a script"
    open_ended = "..." in command and found[0] not in SMALL["rest"]
    return "not whole" if open_ended or "$" in command else None


def is_out_of_place(flag: str, program: str, given: set[str]) -> bool:
    """True for a flag of small.yaml that the command must not get."""
    if flag == "model_cfg":  # one of small.yaml's own
        return bool((SMALL["configurations"].keys() | {"--base_model", "--from_pretrained"}) & given) or (
            program == "lmtools convert" and "--model_cfg" not in given
        )
    return flag == "save_interval" and not {"--model_path", "--config"} & given


def small(command: str) -> str:
    """The command with the flags of small.yaml, and those that its `...` stands for."""
    program, before, given = program_of(shlex.split(command))
    if program not in SMALL["flags"]:
        return command
    if "..." in given:
        rest = {f"--{flag}": str(value) for flag, value in SMALL["rest"][program].items()}
        given = [word for word in given if word != "..."]
        given += [word for flag, value in rest.items() if flag not in given for word in (flag, value)]
    for flag, value in SMALL["flags"][program].items():
        if is_out_of_place(flag, program, set(given)):
            continue
        if f"--{flag}" in given:
            given[given.index(f"--{flag}") + 1] = str(value)
        elif flag not in SMALL["where_given"] or "--config" in given:
            given += [f"--{flag}", str(value)]
    return shlex.join([*before, *given])


def write_text(folder: Path) -> None:
    """Write the text and the rows that pages take as given."""
    rows = [{"source": f"w{n} w{n + 1} w{n + 2}", "target": f"w{n}"} for n in range(1, 13)]
    for name in ("train", "valid", "test", "other", "qasper/train", "qasper/validation"):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labelled = "sentence\tlabel\n" + "".join(f"w{n} w{n + 1}\t{n % 2}\n" for n in range(1, 13))
    for name in ("train.tsv", "dev.tsv", "glue/SST-2/train.tsv", "glue/SST-2/dev.tsv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(labelled)
    (folder / "glue" / "RTE").mkdir()
    for name in ("train", "dev"):
        lines = "".join(f"w{n} w{n + 1}\tw{n + 2}\t{n % 2}\n" for n in range(1, 13))
        (folder / "glue" / "RTE" / f"{name}.tsv").write_text("sentence1\tsentence2\tlabel\n" + lines)
    (folder / "my_tasks").mkdir()
    write_colours(folder / "my_tasks")
    (folder / "prompts.txt").write_text("w1 w2\nw3 w4\n")
    for name in ("my_text.txt", "held_out.txt"):
        (folder / name).write_text("\n".join(" ".join(f"w{n + m}" for m in range(30)) for n in range(20)))
    task = {
        "Definition": ["Say w1."], "Positive Examples": [], "Negative Examples": [], "Categories": ["w"],
        "Instances": [{"id": f"task1_w-{n}", "input": f"w{n}", "output": ["w1"]} for n in range(6)],
    }  # fmt: skip
    splits = {f"splits/default/{name}_tasks.txt": "task1_w\n" for name in ("train", "test")}
    for name, content in {"tasks/task1_w.json": json.dumps(task), **splits}.items():
        path = folder / "natural-instructions" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def write_other_programs(folder: Path) -> None:
    """Write weights as t5-experiments, nanoT5 and t5x do, of a model of small_t5.json."""
    torch.manual_seed(0)
    model = build_model(T5ForConditionalGeneration, load_model_config(str(folder / "small_t5.json"), T5Config), seed=0)
    old, nano = folder / "t5-experiments/runs/mine/model_100000.pth", folder / "nanoT5/logs/pytorch_model.bin"
    for path, content in ((old, {"model_state_dict": model.state_dict()}), (nano, model.state_dict())):
        path.parent.mkdir(parents=True)
        torch.save(content, path)
    if is_there("tensorstore"):
        write_t5x(model, folder / "t5x/t5_1_1_small/checkpoint_1000000")


def write_model(kind: str, folder: Path) -> None:
    """Write a toy of a kind of model, with a tokenizer: small.yaml's `models`."""
    if kind == "modernbert":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
        ids = dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 1)
        config = ModernBertConfig(vocab_size=ROWS, local_attention=6, pad_token_id=0, **sizes, **ids)
        save_toy(kind, folder, ModernBertForMaskedLM(config))
    else:
        save_toy(kind, folder)


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder of a little real text, from the documentation of this Python."""
    folder = tmp_path_factory.mktemp("text")
    assert main(["corpus", "--output", str(folder / "my_text"), "--max_megabytes", "1"]) == 0
    return folder / "my_text"


@pytest.fixture
def world(tmp_path, text, request) -> Path:
    """A folder with what the pages take as given: the clone's files, text, rows, models."""
    for path in ROOT.iterdir():
        if path.suffix == ".py" or path.name in CLONED:
            (tmp_path / path.name).symlink_to(path)
    write_text(tmp_path)
    for name in ("my_text", "text", "TEXT"):
        (tmp_path / name).symlink_to(text)
    for name, settings in SMALL["configurations"].items():
        (tmp_path / name).write_text(json.dumps(settings))
    page = request.node.callspec.params["page"]
    for name, source in re.findall(r"^```python file=(\S+)\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S):
        if "/" not in name:
            (tmp_path / name).write_text(source)
    used = " ".join([*commands(page), *SMALL["before"].get(page, ())])
    used += "".join((ROOT / word).read_text() for word in used.split() if word.startswith("examples/"))
    for name, kind in SMALL["models"].items():
        is_used = any(name in word or fnmatch(name, word) for word in used.split())
        if is_used and name not in SMALL["makes"].get(page, ()):
            write_model(kind, tmp_path / name)
    for name, kind in SMALL["runs"].get(page, {}).items():
        save_run(tmp_path / name, kind)
    if page == "docs/interchange.md":
        write_other_programs(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_commands_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:.*## ", (ROOT / "Makefile").read_text(), flags=re.M), command
        found = program_of([word for word in shlex.split(command) if word != "..."])
        cls = found and arguments_of(found[0])
        reason = reason_not_to_run(command)
        if not cls or (reason and reason.startswith("test_")):  # that test reads it
            assert reason or command.startswith(("python -m ", "python megatron/")), command
            continue
        assert all((ROOT / word).is_file() for word in found[1] if word.endswith(".yaml")), command
        given = with_names(found[2], getattr(importlib.import_module(cls.__module__), "POSITIONAL", ()))
        files = [ROOT / given[place + 1] for place, word in enumerate(given) if word == "--config"]
        assert all(path.is_file() for path in files if "examples" in path.parts), command
        if "..." in command or not all(path.is_file() for path in files):  # the rest of the settings stands elsewhere
            names = {field.name for field in dataclasses.fields(cls)} | {"config", "print_config"}
            assert {word[2:].removeprefix("no_") for word in given if word.startswith("--")} <= names, command
        else:
            cli.parse(cls, given)


def run(line: str, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command; a script without launcher or shell syntax runs in a forked process."""
    program, *rest = shlex.split(line)
    unquoted = re.sub(r"\"[^\"$]*\"|'[^']*'", "", line)
    is_script = program == "lmtools" or (program == "python" and rest[0].endswith(".py"))
    if is_script and not set(unquoted) & set("*$|&;<>"):
        script, log = Path(sys.executable).with_name("lmtools") if program == "lmtools" else rest.pop(0), Path("log")
        log.write_text("")
        return run_job("python", 1, [script, *rest], environment, log.absolute(), timeout=300), log.read_text()
    ended = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=300)
    return ended.returncode, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page, world, monkeypatch):
    whole = [command for command in commands(page) if not reason_not_to_run(command)]
    if not whole:
        pytest.skip(f"{page} has no command to run")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    monkeypatch.chdir(world)
    absent = tuple(beginning for beginning, package in SMALL["needs"].items() if not is_there(package))
    for command in [*SMALL["before"].get(page, ()), *whole]:
        if absent and command.startswith(absent):
            continue
        line = small(command) if program_of(shlex.split(command)) else command
        code, output = run(line, environment)
        assert code == 0, f"{line}\n{output[-5000:]}"


def test_every_exception_of_small_yaml_is_needed():
    everything = [command for page in PAGES for command in commands(page)]
    everything += [command for before in SMALL["before"].values() for command in before]
    for beginning in (*SMALL["not_run"], *SMALL["needs"]):
        assert any(command == beginning or command.startswith(f"{beginning} ") for command in everything), beginning
