"""Fine-tunes a pretrained language model privately: it learns to document functions.

pip install '.[language]'    # in a clone: the model is one of its benchmarks
python examples/finetune_lm.py                     # SmolLM2-135M, which is downloaded
python examples/finetune_lm.py --checkpoint DIR    # SmolLM2 or llama, of Hugging Face
"""

import argparse
import functools
import importlib
import inspect
import pathlib
import sys

import numpy as np
import optax

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import dpadambc
from benchmarks.language.smollm import texts, weights
from dpadambc import clipping, training

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--checkpoint", type=pathlib.Path)
args = parser.parse_args()

# To protect: a function each, with the first sentence of its documentation.
modules = """cluster fft integrate interpolate linalg ndimage optimize signal sparse
sparse.linalg spatial spatial.distance special stats stats.mstats"""
names = [f"scipy.{name}" for name in modules.split()] + ["numpy", "numpy.linalg"]
pairs = {}
for module in map(importlib.import_module, names):
    for key, value in vars(module).items():
        lines = (inspect.getdoc(value) or "").splitlines()
        text = next((line for line in lines if line.endswith(".")), "")
        if callable(value) and text:
            pairs[text] = (f"{module.__name__}.{key}", text)

# Adapters of six blocks. What the blocks before make of a text is computed once.
if args.checkpoint:
    pretrained = weights.load_checkpoint(args.checkpoint)
else:
    pretrained = weights.load(weights.fetch())
start = texts.begin(pretrained, "lora", 6, weights.CACHE)
rows = texts.tokenize(list(pairs.values()), start.tokenizer, length=40)
rows = rows.take(np.random.default_rng(0).permutation(len(pairs)))
train, test = rows.take(slice(200, None)), rows.take(slice(200))

mechanism = dpadambc.PoissonGaussian.calibrate(  # line 1 that is not in ordinary code
    target_epsilon=8.0,
    target_delta=1e-4,
    sampling_prob=128 / len(train.first),
    iterations=args.iterations,
    clip_rule=clipping.Automatic(),
    l2_clip_norm=1.0,
    normalize_by=128,
)
secret = {"key": training.secret_key(), "target_delta": 1e-4}  # line 2
fit = functools.partial(training.fit, frozen=start.parts.frozen, **secret)  # line 3
loss_fn, data = start.parts.loss_fn, start.examples(train)
result = fit(loss_fn, start.parts.trained, data, mechanism, optax.adam(3e-3))

print(f"epsilon {result.epsilon:.2f} at delta 1e-04")
number = np.sum(test.tokens != texts.PADDING) - np.sum(test.first)
for name, trained in (("before", start.parts.trained), ("after", result.state.params)):
    print(f"test loss {name} {np.sum(start.losses(trained, test)) / number:.3f}")
    names = ["scipy.stats.norm", "scipy.optimize.minimize"]
    print(*texts.write(start.whole(trained), names, start.tokenizer, 1), sep="\n")
