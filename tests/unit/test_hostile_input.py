"""Broken and hostile input, thousands of seeded cases of each kind: a sentence or the right content, nothing else.

`make fuzz` runs these and the mutations of token files, at their full counts, in minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tr
from safetensors.torch import save_file

from lm_experiments_tools.checkpoint.legacy import read_old_training_state
from lm_experiments_tools.checkpoint.weights import load_weights
from lm_experiments_tools.data.text.records import RejectedRecords, rows
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import build
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.models.saved import open_saved
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from tests.helpers.checkpoint_toys import random_t5
from tests.helpers.fuzz import edited, watching

ROWS = [
    {"text": "one two", "label": "a"},
    {"inputs": "four é😀 five", "label": 3, "meta": {"text": 1}},
    {"text": ["six.", "", None], "label": ["b", "c"]},
    {"id": 2**60, "text": "nine\u2028ten\n", "score": -1.5e-3},
]
T5 = {"model_type": "t5", "vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.1, "feed_forward_proj": "relu", "tie_word_embeddings": True}
T5 |= {"relative_attention_num_buckets": 8, "pad_token_id": 0, "eos_token_id": 1, "layer_norm_epsilon": 1e-6}
FULL = pytest.mark.slow


def sentence(error: BaseException) -> None:
    text = str(error)
    assert text and "\n" not in text and "Traceback" not in text, text


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_of_5000_edited_rows_those_that_json_reads_are_kept_and_all_others_named(tmp_path, ensure_ascii):
    rng, outcomes, path = random.Random(f"rows {ensure_ascii}"), Counter(), tmp_path / "rows.jsonl"
    good = [json.dumps(row, ensure_ascii=ensure_ascii).encode() for row in ROWS]
    for _ in range(50):
        lines = [edited(rng, rng.choice(good)) if rng.random() < 0.8 else rng.choice(good) for _ in range(100)]
        path.write_bytes(b"\n".join(lines) + b"\n")
        kept, named = [], []
        for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                kept.append((f"{path}:{number}", record))
            elif line.strip():
                named.append(f"{path}:{number}")
        bad = RejectedRecords(10**6, quiet=True)
        reasons = []
        bad.add = lambda rejected, reasons=reasons: reasons.append((rejected.where, str(rejected)))
        found = [(row.where, row.value) for row in rows(str(path), bad)]
        assert repr(found) == repr(kept)  # NaN is not equal to itself
        assert [where for where, _ in reasons] == named
        assert all(reason and "\n" not in reason for _, reason in reasons)
        outcomes.update(kept=len(kept), named=len(named), lines=len(lines))
    assert outcomes["lines"] == 5000 and outcomes["kept"] > 1000 and outcomes["named"] > 1000, outcomes


def test_a_model_beyond_the_memory_is_refused_with_both_numbers(monkeypatch):
    """Bytes of bert-base by hand: 4 for each of its 109,514,298 parameters."""
    config = tr.BertConfig()
    monkeypatch.setattr(build, "total_memory", lambda: 4 * 109_514_298 - 1)
    with pytest.raises(UserError, match=r"needs 417\.8 MiB for its weights, this machine has 417\.8 MiB"):
        build_model(tr.BertForMaskedLM, config, seed=0)
    monkeypatch.setattr(build, "total_memory", lambda: 4 * 109_514_298)
    build.check_size(tr.BertForMaskedLM, config)


# ---- what is read from elsewhere ------------------------------------------------------------------------------------
class Calls:
    """Calls `function` when it is unpickled."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def payloads(canary):
    touch = f"touch {canary}"
    hidden = torch.zeros(2)
    return {
        "os.system": Calls(os.system, touch),
        "exec": Calls(exec, f"open({str(canary)!r}, 'w')"),
        "eval": Calls(eval, f"open({str(canary)!r}, 'w')"),
        "open": Calls(open, str(canary), "w"),
        "import": Calls(__import__, "antigravity"),
        "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "numpy": Calls(np.load, str(canary)),
        "nested": {"model_state_dict": {"weight": hidden, "bias": Calls(os.system, touch)}},
        "metrics": {"model_state_dict": {"weight": hidden}, "metrics": {"loss": Calls(os.system, touch)}},
        "remove": Calls(os.remove, str(canary.parent / "kept")),
    }


@pytest.mark.parametrize("written", ["torch", pytest.param("legacy", marks=FULL), pytest.param("pickle", marks=FULL)])
@pytest.mark.parametrize("payload", sorted(payloads(Path("x"))))
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(tmp_path, written, payload):
    """30 pickles, each as weights of a file, of a folder, and as the state of a trainer."""
    canary, content = tmp_path / "canary", payloads(tmp_path / "canary")[payload]
    (tmp_path / "kept").touch()
    folder, file = tmp_path / "model", tmp_path / "model_1.pth"
    folder.mkdir()
    for path in (file, folder / "pytorch_model.bin", folder / "trainer.pckl"):
        if written == "pickle":
            path.write_bytes(pickle.dumps(content))
        else:
            torch.save(content, path, _use_new_zipfile_serialization=written == "torch")
    (folder / "config.json").write_text(json.dumps({**T5, "architectures": ["T5ForConditionalGeneration"]}))
    model = random_t5()
    with watching() as ran:
        for read in (
            lambda: load_weights(model, file),
            lambda: load_weights(model, folder),
            lambda: read_old_training_state(file),
            lambda: read_old_training_state(folder),
            lambda: open_saved(str(folder)),
        ):
            with pytest.raises(UserError) as refusal:
                read()
            sentence(refusal.value)
    assert not canary.exists() and (tmp_path / "kept").exists() and ran == []


OUTSIDE = ["../secret", "/etc/passwd", "a/../../secret", "..", "a//../../secret", "../../../../../../etc/passwd"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_out_of_a_folder_is_not_followed(tmp_path, name):
    """6 names as a shard of weights, and of a member of torch's archive."""
    model, folder = random_t5(), tmp_path / "model"
    folder.mkdir()
    save_file({"shared.weight": model.shared.weight.detach().clone()}, tmp_path / "secret")
    (folder / "config.json").write_text(json.dumps({**T5, "architectures": ["T5ForConditionalGeneration"]}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"shared.weight": name}}))
    with watching() as ran:
        for read in (lambda: load_weights(model, folder), lambda: open_saved(str(folder))):
            with pytest.raises(UserError, match="outside its directory") as refusal:
                read()
            sentence(refusal.value)
    with zipfile.ZipFile(tmp_path / "archive.pth", "w") as archive:
        archive.writestr(f"archive/{name}", b"x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as refusal:
        load_weights(model, tmp_path / "archive.pth")
    sentence(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before and ran == []


IMPORTS = [
    "os:system",
    "subprocess:Popen",
    "builtins:exec",
    "antigravity:fly",
    "this:s",
    "evil:Model",
    "evil",
    "evil.Model",
]
IMPORTS += ["os.path:join", "..evil:Model", "evil:Model:x", ":x", "x:", "torch:load", "transformers:T5Config", "é:é"]
IMPORTS += ["torch.nn:Linear.__init__", "evil;import os:x", "__import__('evil'):x", "evil.py:Model"]


@pytest.mark.parametrize("name", [*IMPORTS[:6], *(pytest.param(name, marks=FULL) for name in IMPORTS[6:])])
def test_names_in_the_files_of_a_model_import_nothing(tmp_path, monkeypatch, name):
    """20 names of classes in each place of a checkpoint that names one; evil.py lies beside and in the folder."""
    folder = tmp_path / "model"
    random_t5().save_pretrained(folder)
    for place in (tmp_path, folder):
        (place / "evil.py").write_text("open('canary', 'w')\nclass Model: pass\n")
    monkeypatch.chdir(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    edits = {
        "architectures": {"architectures": [name]},
        "model_type": {"model_type": name},
        "auto_map": {"auto_map": {"AutoConfig": name, "AutoModelForSeq2SeqLM": name}},
        "attention": {"sparse_config_cls": name},
        "hidden_act": {"feed_forward_proj": name},
    }
    for what, edit in edits.items():
        (folder / "config.json").write_text(json.dumps({**config, **edit}))
        with watching() as ran, contextlib.redirect_stdout(io.StringIO()):
            try:
                open_saved(str(folder))
            except UserError as error:
                sentence(error)
        assert ran == [] and not Path("canary").exists(), (what, ran)
    for base in (torch.nn.Module, torch.optim.Optimizer):
        if name.partition(":")[0].partition(".")[0] != "evil":  # a flag that names a module imports it
            with watching() as ran, pytest.raises(UserError) as refusal:
                get_cls_by_name(name, base)
            sentence(refusal.value)
            assert ran == [] and not Path("canary").exists()
