"""The console command `lmtools`, which runs its subcommands.

The subcommand NAME is the module tools/NAME.py. The module defines a dataclass NameArgs of its flags, and a function
`run(args)` or `run(args, origins)`, which returns the exit code (None: 0). A module whose flags depend on the first
word defines `main(argv)` instead.

A constant POSITIONAL in the module lets users write words without a flag. It holds the flag for all such words, or a
pair: the flag for the first word and the flag for the others.
"""

import difflib
import importlib
import itertools
import logging
import runpy
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from lm_experiments_tools import __version__
from lm_experiments_tools.errors import UserError, os_sentence

COMMANDS = {
    "corpus": "build a text corpus from the documentation of this Python installation",
    "vocab": "train a SentencePiece vocabulary (T5) or a WordPiece one (BERT) on text",
    "tokenize": "turn text into a token file that the trainers read",
    "inspect": "show the data of a run: counts, lengths, padding, labels, samples as the model gets them",
    "plan": "estimate the memory of a run before it starts; find settings that fit",
    "evaluate": "measure models, or checkpoints of a run, on the same data or by lm_eval: one table",
    "generate": "generate text, fill in blanks or label texts with a model",
    "export": "write a model for the Hugging Face Hub, and check that it loads with equal logits",
    "convert": "convert weights of t5-experiments, nanoT5 or t5x to a folder for from_pretrained",
    "compare": "a table of runs: progress, metrics, and the settings that differ",
    "settings": "copy accelerate_configs/, settings of accelerate launch, to a folder",
    "schema": "print the JSON schema of a script's YAML file, or a shell's completion of commands and flags",
}
# Scripts at the root of the repository, which an installation also has.
SCRIPTS = {
    "pretrain-t5": ("run_t5_pretraining.py", "pre-train a T5, or another model with another objective"),
    "pretrain-bert": ("run_bert_pretraining.py", "pre-train a BERT with masked tokens and sentence pairs"),
    "finetune": ("run_finetuning.py", "fine-tune a pre-trained model"),
    "build-horovod": ("scripts/build_horovod.py", "build Horovod against the installed torch and check it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lmtools` and return the exit code: 2 for a UserError, 1 for an OSError, 130 after Ctrl-C."""
    from lm_experiments_tools.config.cli import use_utf8

    use_utf8()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(_usage())
            return 0 if argv else 2
        if argv[0] == "--version":
            print(f"lmtools {__version__}")
            return 0
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
    from lm_experiments_tools.config.cli import parse  # the list of commands needs no parser

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    command = importlib.import_module(f"lm_experiments_tools.tools.{name}")
    if hasattr(command, "main"):
        return command.main(argv)
    argv = with_names(argv, getattr(command, "POSITIONAL", ()))
    cls = getattr(command, "".join(word.capitalize() for word in name.split("_")) + "Args")
    args, origins = parse(cls, argv, description=command.__doc__, program=f"lmtools {name}")
    takes_origins = "origins" in signature(command.run).parameters
    return (command.run(args, origins) if takes_origins else command.run(args)) or 0


def with_names(argv: list[str], flags: str | tuple[str, str]) -> list[str]:
    """Insert the flags of words that the user wrote without one.

    `RUN "a text"` becomes `--from_pretrained RUN --text "a text"`. `flags` is the flag for all of them, or a pair: the
    flag for the first word and that for the others.
    """
    names = [flags] if isinstance(flags, str) else list(flags)
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    named = [word for name, first in zip(names, words, strict=False) for word in (f"--{name}", first)]
    return [*named, *argv[len(named) // 2 :]]


def _run_script(file: str, argv: list[str]) -> int:
    """Run a script as `python FILE` does."""
    path = _find(file)
    sys.argv = [str(path), *argv]
    runpy.run_path(str(path), run_name="__main__")
    return 0


def _find(file: str) -> Path:
    """A script next to the package in a clone, or inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package.parent / file, package / file) if path.is_file())


def _usage() -> str:
    summaries = COMMANDS | {name: summary for name, (_, summary) in SCRIPTS.items()}
    lines = [f"  {name:<18} {summary}" for name, summary in summaries.items()]
    return "\n".join(["usage: lmtools COMMAND [--flags]", "", *lines, "", "lmtools COMMAND --help lists its flags."])


if __name__ == "__main__":
    sys.exit(main())
