"""A graph convolution of one hop, as a network on one root's subgraph.

Each member is encoded, the root takes the mean over itself and its neighbors, and a
dense network labels it:

    e_i = tanh(W_e x_i + b_e),  h = mean_i e_i,  a = tanh(W_c h + b_c) + h,
    d = tanh(W_1 a + b_1),  logits = W_2 d + b_2
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class GCN(nn.Module):
    """With 128 features and 40 classes it has 173,695 parameters."""

    num_classes: int
    latent_size: int = 255

    def setup(self):
        self.encoder = nn.Dense(self.latent_size)
        self.convolution = nn.Dense(self.latent_size)
        self.decoder = nn.Dense(self.latent_size)
        self.head = nn.Dense(self.num_classes)

    def encode(self, features: jax.Array) -> jax.Array:
        """Each node alone, shape (..., latent_size)."""
        return nn.tanh(self.encoder(features))

    def decode(self, mean: jax.Array) -> jax.Array:
        """The logits of roots, from the mean over their neighbors."""
        aggregated = nn.tanh(self.convolution(mean)) + mean
        return self.head(nn.tanh(self.decoder(aggregated)))

    def __call__(self, features: jax.Array, is_padding: jax.Array) -> jax.Array:
        """The logits of one root.

        Args:
          features: of the members of its subgraph, shape (members, features).
          is_padding: True where there is no member, shape (members,).
        """
        return self.decode(
            jnp.mean(self.encode(features), axis=-2, where=~is_padding[..., None])
        )
