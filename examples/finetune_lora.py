"""Fine-tunes low-rank adapters privately, on a model that public images have trained.

pip install '.[experiments]'    # in a clone: Flax, and scikit-learn, which has the data
python examples/finetune_lora.py
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import dpadambc
from dpadambc import training

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=float, default=40)
args = parser.parse_args()

images, labels = map(jnp.asarray, load_digits(return_X_y=True))
images = images / 16
public = images[:600], labels[:600]
# Those to protect held their paper sideways: the public model knows little of them.
turned = jnp.rot90(images.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
data = turned[600:1500], labels[600:1500]


class Net(nnx.Module):
    """Each layer is a kernel and an adapter of rank 8, which is zero at first."""

    def __init__(self, rngs):
        self.hidden = nnx.LoRALinear(64, 128, lora_rank=8, rngs=rngs)
        self.out = nnx.LoRALinear(128, 10, lora_rank=8, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


# What is frozen is an argument of its own: the clip and the noise are for the rest.
graph, adapters, base = nnx.split(Net(nnx.Rngs(0)), nnx.LoRAParam, ...)
logits = lambda adapters, base, x: nnx.merge(graph, adapters, base)(x)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
loss_fn = lambda adapters, base, x, y: cross_entropy(logits(adapters, base, x), y)

# Pretraining is ordinary. On images of the same people it would have to be private too,
# and `fit` be told of it, by `spent`.
public_grad = jax.jit(jax.grad(lambda base: loss_fn(adapters, base, *public).mean()))
for _ in range(100):
    base = jax.tree.map(lambda w, g: w - 0.5 * g, base, public_grad(base))

mechanism, optimizer = dpadambc.recipe(
    0.02,
    target_epsilon=3.0,
    target_delta=1e-5,
    num_examples=len(data[1]),
    batch_size=180,
    epochs=args.epochs,
)
secret = {"key": training.secret_key(), "target_delta": 1e-5}
result = training.fit(
    loss_fn, adapters, data, mechanism, optimizer, frozen=base, **secret
)

print(f"epsilon {result.epsilon:.2f} at delta 1e-05")
for name, trained in (("before", adapters), ("after", result.state.params)):
    is_right = logits(trained, base, turned[1500:]).argmax(-1) == labels[1500:]
    print(f"test accuracy {name} fine-tuning {jnp.mean(is_right):.1%}")
