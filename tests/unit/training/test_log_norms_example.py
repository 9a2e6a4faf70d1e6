"""examples/log_norms.py beside norms that are written out here."""

import importlib.util
import json

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.loops import make_loop
from tests.helpers.toys import gradients_at_steps, tiny_t5, weights_of


def test_logged_norms_are_those_of_gradient_weights_and_update(tmp_path):
    spec = importlib.util.spec_from_file_location("log_norms", ROOT / "examples" / "log_norms.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, seen = tiny_t5(), []
    norms = example.LogNorms(model, every=2)
    loop = make_loop(model, iters=5, log_interval=9, model_path=tmp_path, callbacks=[norms])
    gradients, step = gradients_at_steps(model, loop.backend.optimizer), loop.train_step

    def noted(*batch):
        before = weights_of(model)
        info = step(*batch)
        seen.append((dict(gradients), before, weights_of(model)))
        return info

    loop.train_step = noted
    loop.train()
    norms.hook.remove()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "norm/weight/shared" in line]
    assert [line["step"] for line in found] == [2, 4]
    for line in found:
        gradient, before, after = seen[line["step"] - 1]
        for part in ("encoder.block.1", "shared", "decoder.final_layer_norm"):
            names = [name for name, _ in model.named_parameters() if name.startswith(f"{part}.")]
            update = {name: after[name] - before[name] for name in names}
            for kind, values in (("gradient", gradient), ("weight", after), ("update", update)):
                norm = torch.cat([values[name].flatten() for name in names]).norm().item()
                assert line[f"norm/{kind}/{part}"] == pytest.approx(norm, rel=1e-5)
