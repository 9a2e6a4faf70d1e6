"""Runs of preprocess_data.py, in this process and as programs, on a vocabulary of letters."""

import json
import os
import subprocess
import sys

from lm_experiments_tools.config.cli import parse
from megatron.preprocess_data import PreprocessArgs, preprocess
from tests.helpers import ROOT

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS), *"!'(),-.:;?\""]
SEP = 3


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def arguments(folder, *flags, source=None):
    command = ["--input", str(source or folder / "in"), "--output-prefix", str(folder / "out" / "x")]
    command += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    return parse(PreprocessArgs, [*command, *map(str, flags)])[0]


def run(folder, *flags, **options):
    return preprocess(arguments(folder, *flags, **options))


def outputs(folder):
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def command(folder, *flags):
    program = ROOT / "megatron" / "preprocess_data.py"
    rest = ["--input", folder / "in", "--output-prefix", folder / "out" / "x", "--split-sentences", "--vocab-file"]
    rest += [folder / "vocab.txt", "--tokenizer-type", "BertWordPieceLowerCase", *flags]
    return [sys.executable, *map(str, (program, *rest))]


def start(arguments, cwd, **options):
    environment = {**os.environ, "PYTHONPATH": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, cwd=cwd, env=environment, **pipes, **options)
