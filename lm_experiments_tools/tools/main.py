"""The console command `lmtools`: one subcommand a file, each a dataclass of its flags and a function `run`.

lmtools corpus --output DIR
lmtools vocab --input FILES --size N --output FILE.model
lmtools tokenize --input FILES --vocab FILE.model --output PREFIX
lmtools merge --input PREFIXES --output PREFIX
lmtools inspect --config RUN.yaml
lmtools inspect_bert --config RUN.yaml
lmtools inspect_finetuning --config RUN.yaml
lmtools attention --model DIR --text TEXT --output maps.png
lmtools plan pretrain-t5 --model_cfg t5-v1_1-base --fit 24GiB
lmtools evaluate RUNS --valid_data_path FILE | --suite lm_eval --tasks TASKS
lmtools generate RUN "The <extra_id_0> of the file."
lmtools export RUN --to FOLDER | --output DIR.onnx
lmtools convert FILE --to FOLDER --model_cfg NAME
lmtools compare RUNS
lmtools doctor
lmtools settings --output .
lmtools pretrain-t5 | pretrain-bert | finetune: the scripts, with their flags
lmtools build-horovod
"""

import difflib
import importlib
import logging
import runpy
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from lm_experiments_tools.errors import UserError, os_sentence

# Module NAME of this folder has a frozen dataclass NameArgs and a function run(args); of two_words, TwoWordsArgs. A
# `run` that tells given flags from defaults takes `origins` too, and a module whose settings may follow from others
# has a function `inherit`, both as of `parse`. POSITIONAL of a module names the flag of words before the first flag;
# of two names, the first is that of the first word alone.
# What `run` returns is the exit code, None being 0. A module with a function main(argv) reads its words itself.
COMMANDS = {
    "corpus": "build a text corpus from the documentation of this Python installation",
    "vocab": "train a SentencePiece vocabulary (T5) or a WordPiece one (BERT) on text",
    "tokenize": "turn text into a token file that the trainers read",
    "merge": "join the token files of a job array, or others of one vocabulary",
    "inspect": "look before you train: counts, lengths, padding, steps, samples as the model gets them",
    "inspect_bert": "the same for the sentences of run_bert_pretraining.py",
    "inspect_finetuning": "the same for the examples of run_finetuning.py: labels, lengths, what is cut off",
    "plan": "what a run will hold in memory, part by part, before it starts; settings that fit into so much",
    "attention": "attention maps of a model on a text, and pictures of block-sparse layouts",
    "evaluate": "measure models, or checkpoints of a run, on the same data or by lm_eval, mteb, ...: one table",
    "generate": "let a model write, fill in blanks or label texts: a quick look",
    "export": "write a model for the Hugging Face Hub, or as ONNX, and check what is loaded from it",
    "convert": "make a folder for from_pretrained of weights of t5-experiments, nanoT5 or t5x",
    "compare": "a table of runs: progress, metrics, and the settings that differ",
    "doctor": "what works here: versions, backends tried by two workers, devices, compilers; what to install",
    "settings": "write the settings that accelerate launch takes, accelerate_configs/, to a folder",
}
# Scripts of the repository's top, which an installation has as well.
SCRIPTS = {
    "pretrain-t5": ("run_t5_pretraining.py", "pre-train a T5, or another model with another objective"),
    "pretrain-bert": ("run_bert_pretraining.py", "pre-train a BERT with masked words and sentence pairs"),
    "finetune": ("run_finetuning.py", "fine-tune a pre-trained model"),
    "build-horovod": ("scripts/build_horovod.py", "build Horovod against the installed torch and check it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lmtools`; returns 0 or the command's own code, 2 for a mistake, 1 for a full disk, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(_usage())
            return 0 if argv else 2
        return _run(argv[0], argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {os_sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(name: str, argv: list[str]) -> int:
    if name in SCRIPTS:
        return _run_script(SCRIPTS[name][0], argv)
    if name not in COMMANDS:
        known = [*COMMANDS, *SCRIPTS]
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
        raise UserError(f"lmtools has no command {name!r}: {hint}")
    from lm_experiments_tools.config.cli import parse  # imported here: the list of commands needs no parser

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    command = importlib.import_module(f"lm_experiments_tools.tools.{name}")
    if hasattr(command, "main"):  # whose flags depend on its first word
        return command.main(argv)
    argv = with_names(argv, getattr(command, "POSITIONAL", ()))
    args_class = "".join(word.capitalize() for word in name.split("_")) + "Args"
    args, origins = parse(
        getattr(command, args_class),
        argv,
        description=command.__doc__,
        inherit=getattr(command, "inherit", None),
        program=f"lmtools {name}",
    )
    more = {"origins": origins} if "origins" in signature(command.run).parameters else {}
    return command.run(args, **more) or 0


def with_names(argv: list[str], flags: str | tuple[str, str]) -> list[str]:
    """The command line with names before the words that stand before its first flag."""
    flags = (flags,) if isinstance(flags, str) else flags
    if not argv or not flags or argv[0].startswith("-"):
        return argv
    second = len(flags) > 1 and len(argv) > 1 and not argv[1].startswith("-")
    return [f"--{flags[0]}", *(argv if not second else [argv[0], f"--{flags[1]}", *argv[1:]])]


def _run_script(file: str, argv: list[str]) -> int:
    """Run a script as `python FILE` does; it stands beside the package, and `scripts` in it where it is installed."""
    path = _find(file)
    sys.argv = [str(path), *argv]
    runpy.run_path(str(path), run_name="__main__")
    return 0


def _find(file: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package.parent / file, package / file) if path.is_file())


def _usage() -> str:
    summaries = COMMANDS | {name: summary for name, (_, summary) in SCRIPTS.items()}
    lines = [f"  {name:<18} {summary}" for name, summary in summaries.items()]
    return "\n".join(["usage: lmtools COMMAND [--flags]", "", *lines, "", "lmtools COMMAND --help lists its flags."])


if __name__ == "__main__":
    sys.exit(main())
