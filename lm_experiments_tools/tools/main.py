"""The console command `lmtools`: one subcommand a file, each a dataclass of its flags and a function `run`.

lmtools corpus --output DIR
lmtools vocab --input FILES --size N --output FILE.model
lmtools tokenize --input FILES --vocab FILE.model --output PREFIX
lmtools merge --input PREFIXES --output PREFIX
lmtools inspect --config RUN.yaml
lmtools inspect_bert --config RUN.yaml
lmtools attention --model DIR --text TEXT --output maps.html
lmtools export --from_pretrained DIR --output DIR.onnx
"""

import difflib
import importlib
import logging
import sys
from collections.abc import Sequence

from lm_experiments_tools.errors import UserError, os_sentence

# Module NAME of this folder has a frozen dataclass NameArgs and a function run(args); of two_words, TwoWordsArgs.
COMMANDS = {
    "corpus": "build a text corpus from the documentation of this Python installation",
    "vocab": "train a SentencePiece vocabulary (T5) or a WordPiece one (BERT) on text",
    "tokenize": "turn text into a token file that the trainers read",
    "merge": "join the token files of a job array, or others of one vocabulary",
    "inspect": "look before you train: counts, lengths, padding, steps, samples as the model gets them",
    "inspect_bert": "the same for the sentences of run_bert_pretraining.py",
    "attention": "attention maps of a model on a text, and pictures of block-sparse layouts",
    "export": "write a fine-tuned model as ONNX and check it against torch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lmtools`; returns 0, 2 for a mistake the user can mend, 1 for a disk that refuses, 130 after Ctrl-C."""
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
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"lmtools has no command {name!r}: {hint}")
    from lm_experiments_tools.config.cli import parse  # imported here: the list of commands needs no parser

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    command = importlib.import_module(f"lm_experiments_tools.tools.{name}")
    args_class = "".join(word.capitalize() for word in name.split("_")) + "Args"
    args, _ = parse(getattr(command, args_class), argv, description=command.__doc__)
    command.run(args)
    return 0


def _usage() -> str:
    lines = [f"  {name:<12} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: lmtools COMMAND [--flags]", "", *lines, "", "lmtools COMMAND --help lists its flags."])


if __name__ == "__main__":
    sys.exit(main())
