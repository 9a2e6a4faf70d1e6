"""The console command: the whole chain from an installation to tokens, exit codes, and what `--help` may import."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

import lm_experiments_tools
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.tools import main as module
from lm_experiments_tools.tools.main import main
from tests.helpers import ROOT


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lmtools {lm_experiments_tools.__version__}\n"


def test_from_documentation_to_tokens(tmp_path, capsys):
    out = str(tmp_path)
    assert main(["corpus", "--output", f"{out}/corpus", "--max_megabytes", "0.4"]) == 0
    assert main(["vocab", "--input", f"{out}/corpus", "--size", "1000", "--output", f"{out}/v.model"]) == 0
    for split in ("train", "valid"):
        command = ["tokenize", "--input", f"{out}/corpus/{split}.jsonl", "--vocab", f"{out}/v.model"]
        assert main([*command, "--output", f"{out}/{split}", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    for line, words in zip(lines, ["valid.jsonl", "train.jsonl", "v.model", "train.bin", "valid.bin"], strict=True):
        assert words in line and "MB" in line
    train = IndexedDataset(tmp_path / "train")
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus" / "train.jsonl").open(encoding="utf-8")]
    assert train.num_documents == len(texts)
    vocabulary = Tokenizer.load(tmp_path / "v.model")
    # character for character, except what the vocabulary has no piece for
    decoded = re.escape(vocabulary.decode(train[1])[:200]).replace(re.escape(" ⁇ "), ".")
    assert re.match(decoded, texts[1].replace("\n", " "))
    assert train.tokens.max() < 900 and IndexedDataset(tmp_path / "valid").num_tokens > 100


def test_several_inputs_and_flags_reach_the_tokenizer(tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"body": "some words of text"}\n{"text": 1}\n' * 20)
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    model, prefix = str(tmp_path / "v.model"), str(tmp_path / "t")
    vocab = ["vocab", "--input", a, b, "--size", "115", "--output", model, "--text_key", "body"]
    assert main(vocab) == 0
    assert re.search(
        r"115 ids .*; 40 bad lines left out \(the first: \S+[ab].jsonl:2: no key 'body'", capsys.readouterr().out
    )
    assert main(vocab) == 2 and main([*vocab, "--overwrite"]) == 0
    assert f"--output {model} exists" in capsys.readouterr().err
    command = ["tokenize", "--input", a, b, "--vocab", model, "--output", prefix, "--text_key", "body", "--append_eos"]
    assert main([*command, "--max_bad_lines", "40"]) == 0
    assert "40 documents" in capsys.readouterr().out.splitlines()[-1]
    dataset = IndexedDataset(prefix)
    assert len(dataset) == 40 and all(dataset[i][-1] == 1 for i in range(40)) and dataset.meta["bad_lines"] == 40
    assert main([*command, "--max_bad_lines", "39"]) == 2
    error = capsys.readouterr().err
    assert "more than 39 bad lines: 40" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tokenise"], "did you mean tokenize?"),
        (["tokenize", "--ouput", "x"], "did you mean --output?"),
        (["vocab", "--input", "x.jsonl", "--output", "y"], "--size"),
        (["vocab", "--input", "x.jsonl", "--size", "500", "--output", "y"], "x.jsonl does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and len(error.strip().splitlines()) == 1


def test_interrupt_is_130_without_a_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_run", interrupted)
    assert main(["corpus", "--output", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
def test_ctrl_c_while_tokenizing_keeps_the_finished_pieces(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "some words of text to be cut into many pieces"}\n' * 600_000)
    (tmp_path / "v.txt").write_text("some words of text to be cut into many pieces\n" * 50)
    assert (
        main(["vocab", "--input", str(tmp_path / "v.txt"), "--size", "123", "--output", str(tmp_path / "v.model")])
        == 0
    )
    command = ["tokenize", "--input", "d.jsonl", "--vocab", "v.model", "--output", "t", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
         "from lm_experiments_tools.tools.main import main; sys.exit(main())", *command],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    while not list(tmp_path.glob("t.shards-*/*.idx")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    (folder,) = tmp_path.glob("t.shards-*")
    kept = f"another run resumes from the finished shards in {folder.name}\n"
    assert process.stderr.read() == f"{kept}interrupted\n"
    assert list(folder.glob("*.idx")) and not (tmp_path / "t.idx").exists()


@pytest.mark.parametrize("command", ["", "tokenize", "plan"])
def test_help_is_quick_and_imports_nothing_heavy(command):
    code = (
        "import sys, time; start = time.process_time()\n"
        "from lm_experiments_tools.tools.main import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\n"
        "seconds = time.process_time() - start\n"
        "heavy = {'torch', 'transformers', 'numpy', 'sentencepiece', 'datasets'} & set(sys.modules)\n"
        "assert code in (0, None) and not heavy and seconds < 1, (code, heavy, seconds)"
    )
    words = [*command.split(), "--help"]
    run = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert f"usage: lmtools {command or 'COMMAND'} " in run.stdout
