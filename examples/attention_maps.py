"""Draw attention weights of a model on a text, or block-sparse layouts.

    python examples/attention_maps.py runs/mine "The cat sat on the mat." maps.png
    python examples/attention_maps.py Fixed,Variable,BigBird,BSLongformer,LocalSlidingWindow \
        '{"attention": "bidirectional"}' docs/images/layouts_bidirectional.png
"""

import json
import math
import sys

import torch

from lm_experiments_tools.attention.layouts import get_sparsity_config
from lm_experiments_tools.models.saved import open_saved
from lm_experiments_tools.tracking.curve import new_figure

LENGTH = 2048  # of a layout, in tokens


def weights_of(model, tokenizer, text):
    """{title: float[queries, keys]} of every layer and head, by eager attention; a decoder reads what it writes."""
    model.eval().set_attn_implementation("eager")
    inputs = tokenizer(text, return_tensors="pt")
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = model.generate(**inputs, max_new_tokens=32)[:, :-1]
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    return {
        f"{kind} {layer}.{head}": weights
        for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
        for layer, of_heads in enumerate(outputs.get(kind) or ())
        for head, weights in enumerate(of_heads[0].float())
    }


def layouts(names, settings):
    """{title: [blocks, blocks] of 0 and 1} of head 0."""
    configs = {name: get_sparsity_config(name, 1, **{"block": 64, **settings}) for name in names.split(",")}
    found = {name: config.make_layout(LENGTH)[0] for name, config in configs.items()}
    return {f"{name}: {layout.float().mean():.1%}": layout for name, layout in found.items()}


def draw(maps, path):
    columns = min(5, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = new_figure(2.2 * columns, 2.2 * rows + 0.4)
    for number, (title, values) in enumerate(maps.items(), start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.imshow(values.numpy() ** 0.5, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    name, value, output = sys.argv[1:]
    if value.startswith("{"):
        draw(layouts(name, json.loads(value)), output)
    else:
        opened = open_saved(name)
        draw(weights_of(opened.model, opened.tokenizer, value), output)
